"""Texts: home-made language models and papers' reference code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

__all__ = ["MODELS"]


def of(module: str, name: str, **fields: object) -> nn.Module:
    import importlib

    return getattr(importlib.import_module(module), name)(**fields)


def x_transformer(**fields: object) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    return TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=Decoder(dim=64, depth=2, heads=4, **fields))


def x_encoder_decoder() -> nn.Module:
    from x_transformers import XTransformer

    return XTransformer(
        dim=64, enc_num_tokens=100, enc_depth=2, enc_heads=4, enc_max_seq_len=32, dec_num_tokens=100, dec_depth=2,
        dec_heads=4, dec_max_seq_len=32,
    )  # fmt: skip


def x_continuous() -> nn.Module:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    return ContinuousTransformerWrapper(
        dim_in=24, dim_out=12, max_seq_len=32, attn_layers=Encoder(dim=64, depth=2, heads=4)
    )


def mamba() -> nn.Module:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=32, n_layers=2))


def mamba_lm() -> nn.Module:
    from mambapy.lm import LM
    from mambapy.mamba import MambaConfig

    return LM(MambaConfig(d_model=32, n_layers=2), vocab_size=100)


_LM = {"num_tokens": 100, "dim": 64, "depth": 2, "heads": 4}

MODELS: dict[str, Callable[[], nn.Module]] = {
    "x-transformers/decoder": x_transformer,
    "x-transformers/rotary and GLU": partial(x_transformer, rotary_pos_emb=True, ff_glu=True, attn_kv_heads=2),
    "x-transformers/encoder and decoder": x_encoder_decoder,
    "x-transformers/continuous": x_continuous,
    "local-attention/LM": partial(
        of, "local_attention", "LocalTransformer", max_seq_len=64, local_attn_window_size=8, dim_head=16, **_LM
    ),
    "linformer/LM": partial(of, "linformer", "LinformerLM", seq_len=32, k=8, **_LM),
    "performer-pytorch/LM": partial(
        of, "performer_pytorch", "PerformerLM", max_seq_len=32, dim_head=16, causal=False, **_LM
    ),
    "reformer-pytorch/LM": partial(
        of, "reformer_pytorch", "ReformerLM", max_seq_len=64, bucket_size=4, n_hashes=2, dim_head=16, causal=True, **_LM
    ),
    "linear-attention-transformer/LM": partial(
        of, "linear_attention_transformer", "LinearAttentionTransformerLM", max_seq_len=32, dim_head=16, **_LM
    ),
    "nystrom-attention/Nystromformer": partial(
        of, "nystrom_attention", "Nystromformer", dim=64, depth=2, heads=4, dim_head=16, num_landmarks=4
    ),
    "g-mlp-pytorch/gMLP": partial(of, "g_mlp_pytorch", "gMLP", num_tokens=100, dim=64, depth=2, seq_len=32),
    "mambapy/Mamba": mamba,
    "mambapy/LM": mamba_lm,
    "minGRU-pytorch/LM": partial(of, "minGRU_pytorch", "minGRULM", num_tokens=100, dim=64, depth=2),
}
