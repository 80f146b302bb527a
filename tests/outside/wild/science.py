"""Graphs, proteins, physics, time series, tables and recommendations."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial

from torch import nn

__all__ = ["MODELS"]


def graphs(name: str, **fields: object) -> nn.Module:
    import torch_geometric.nn

    return getattr(torch_geometric.nn, name)(**fields)


def proteins() -> nn.Module:
    from esm import Alphabet, ProteinBertModel

    args = Namespace(
        arch="roberta_large", layers=2, embed_dim=64, attention_heads=4, ffn_embed_dim=128, max_positions=64,
        final_bias=True, logit_bias=False, emb_layer_norm_before=False, token_dropout=False, max_tokens=64,
    )  # fmt: skip
    return ProteinBertModel(args, Alphabet.from_architecture("roberta_large"))


def esm2() -> nn.Module:
    from esm.model.esm2 import ESM2

    return ESM2(num_layers=2, embed_dim=64, attention_heads=4)


def egnn() -> nn.Module:
    from egnn_pytorch import EGNN_Network

    return EGNN_Network(num_tokens=20, dim=32, depth=2, num_nearest_neighbors=4)


def fno() -> nn.Module:
    from neuralop.models import FNO

    return FNO(n_modes=(8, 8), in_channels=2, out_channels=1, hidden_channels=16, n_layers=2)


def tabular(name: str, **fields: object) -> nn.Module:
    import rtdl_revisiting_models

    return getattr(rtdl_revisiting_models, name)(**fields)


def ft_transformer() -> nn.Module:
    from rtdl_revisiting_models import FTTransformer

    return FTTransformer(
        n_cont_features=5, cat_cardinalities=[4, 7], d_out=2, n_blocks=2, d_block=32, attention_n_heads=4,
        attention_dropout=0.0, ffn_d_hidden_multiplier=2.0, ffn_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip


def tab_transformer(name: str, **fields: object) -> nn.Module:
    import tab_transformer_pytorch

    return getattr(tab_transformer_pytorch, name)(
        categories=(10, 5, 6), num_continuous=4, dim=32, depth=2, heads=4, dim_head=8, dim_out=1, **fields
    )


def deepctr(name: str) -> nn.Module:
    from deepctr_torch import models
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    columns = [SparseFeat("user", 20, 8), SparseFeat("item", 30, 8), DenseFeat("age", 1)]
    return getattr(models, name)(columns, columns, dnn_hidden_units=(32, 16))


def i_transformer() -> nn.Module:
    from iTransformer import iTransformer

    return iTransformer(
        num_variates=7, lookback_len=24, depth=2, dim=32, heads=4, dim_head=8, pred_length=6, num_residual_streams=1
    )


def tcn() -> nn.Module:
    from pytorch_tcn import TCN

    return TCN(num_inputs=5, num_channels=[16, 16], output_projection=3)


def chronos() -> nn.Module:
    from momentfm.models.layers.embed import PatchEmbedding

    return PatchEmbedding(d_model=32, patch_len=4, stride=4)


_GRAPH = {"in_channels": 16, "hidden_channels": 32, "num_layers": 2, "out_channels": 8}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "torch_geometric/GCN": partial(graphs, "GCN", **_GRAPH),
    "torch_geometric/GAT": partial(graphs, "GAT", heads=4, **_GRAPH),
    "torch_geometric/GraphSAGE": partial(graphs, "GraphSAGE", **_GRAPH),
    "torch_geometric/GIN": partial(graphs, "GIN", **_GRAPH),
    "torch_geometric/LightGCN": partial(graphs, "LightGCN", num_nodes=40, embedding_dim=16, num_layers=2),
    "esm/ESM-1b": proteins,
    "esm/ESM-2": esm2,
    "egnn-pytorch/EGNN": egnn,
    "neuraloperator/FNO": fno,
    "rtdl/MLP": partial(tabular, "MLP", d_in=6, d_out=2, n_blocks=2, d_block=32, dropout=0.0),
    "rtdl/ResNet": partial(
        tabular, "ResNet", d_in=6, d_out=2, n_blocks=2, d_block=32, d_hidden_multiplier=2.0, dropout1=0.0, dropout2=0.0
    ),
    "rtdl/FTTransformer": ft_transformer,
    "tab-transformer-pytorch/FTTransformer": partial(tab_transformer, "FTTransformer"),
    "tab-transformer-pytorch/TabTransformer": partial(tab_transformer, "TabTransformer", mlp_act=nn.ReLU()),
    "deepctr-torch/DeepFM": partial(deepctr, "DeepFM"),
    "deepctr-torch/AutoInt": partial(deepctr, "AutoInt"),
    "iTransformer/iTransformer": i_transformer,
    "pytorch-tcn/TCN": tcn,
    "momentfm/patches": chronos,
}
