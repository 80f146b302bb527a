"""Code that nobody in transformers wrote, of many kinds: split where it can be, and exact.

What is counted is weights of two dims and more; a share below one is said, so that it can only grow.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from outside import attention_kinds, other_kinds, sequence_mixers
from slow_cases import slow_but
from torch import nn

import autoplan
from autoplan.common.patterns import matches

IDS = torch.arange(20).view(2, 10) * 5
IMAGE = torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().view(2, 3, 16, 16)


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    inputs: dict[str, Any]
    share: float = 1.0


def wave(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).mul(0.7).cos().view(shape)


CASES = {
    "torch encoder": Case(attention_kinds.TorchEncoder, {"ids": IDS}),
    "torch encoder and decoder": Case(attention_kinds.TorchSeq2Seq, {"src": IDS, "tgt": IDS[:, :7]}),
    "MultiheadAttention": Case(attention_kinds.FunctionalAttention, {"ids": IDS}),
    "einsum over bare parameters": Case(attention_kinds.EinsumGPT, {"ids": IDS}),
    "one matrix for attention and MLP": Case(attention_kinds.PaLM, {"ids": IDS}),
    "shifted windows": Case(attention_kinds.Swin, {"x": wave(2, 8, 8, 12)}),
    "one relative bias for all layers": Case(attention_kinds.SharedRelativeBias, {"ids": IDS}, 0.99),
    "a bias of each head": Case(attention_kinds.BiasOfEachHead, {"ids": IDS}, 0.99),
    "keys of the first layer for all": Case(attention_kinds.SharedKeysAndValues, {"ids": IDS}),
    "selective scan": Case(sequence_mixers.Mamba, {"ids": IDS}),
    "retention": Case(sequence_mixers.RetNet, {"ids": IDS}),
    "long convolution by FFT": Case(sequence_mixers.Hyena, {"ids": IDS}),
    "gated linear attention": Case(sequence_mixers.GatedLinearAttention, {"ids": IDS}),
    "LSTM": Case(sequence_mixers.LSTMModel, {"ids": IDS}),
    "GRU cell": Case(sequence_mixers.GRUByHand, {"ids": IDS}, 0.45),
    "mixing tokens by a matrix": Case(sequence_mixers.Mixer, {"x": wave(2, 16, 12)}),
    "routed experts": Case(partial(other_kinds.WithExperts, other_kinds.RoutedExperts), {"ids": IDS}, 0.98),
    "weighted experts": Case(partial(other_kinds.WithExperts, other_kinds.WeightedExperts), {"ids": IDS}, 0.98),
    "vision transformer": Case(other_kinds.ViT, {"img": IMAGE}, 0.98),  # positions may stay whole
    "diffusion transformer": Case(
        other_kinds.DiT, {"x": wave(2, 9, 8), "t": torch.tensor([0.2, 0.7]), "ctx": wave(2, 5, 24)}, 0.99
    ),
    "U-Net": Case(other_kinds.UNet, {"img": IMAGE}, 0.9),
    "ResNet": Case(other_kinds.ResNet, {"img": IMAGE}),
    "tables and dot products": Case(
        other_kinds.DLRM, {"dense": wave(4, 13), "sparse": torch.arange(24).view(4, 3, 2)}, 0.97
    ),
    "two towers": Case(other_kinds.TwoTowers, {"x": wave(4, 20), "ids": torch.arange(24).view(4, 6)}),
    "transposed convolution over a skip": Case(other_kinds.SkippingUNet, {"img": IMAGE}),
    "positions by a convolution in groups": Case(other_kinds.PositionsByConvolution, {"x": wave(2, 10, 20)}, 0.99),
    "ids beside features": Case(other_kinds.ColumnsOfFeatures, {"x": torch.arange(20.0).view(5, 4)}),
    "scores of a graph": Case(other_kinds.GraphScores, {"edges": torch.arange(24).view(2, 12)}),
    "codebook autoencoder": Case(other_kinds.CodeBookAutoencoder, {"w": wave(2, 1, 64)}, 0.75),
}


LONG = {
    "torch encoder and decoder", "torch encoder", "diffusion transformer", "keys of the first layer for all",
    "one relative bias for all layers", "vision transformer", "ResNet", "U-Net", "one matrix for attention and MLP",
    "codebook autoencoder", "retention", "mixing tokens by a matrix", "GRU cell", "long convolution by FFT",
}  # fmt: skip


@pytest.mark.parametrize("name", slow_but(CASES, *(name for name in CASES if name not in LONG)))
def test_exact(name: str) -> None:
    torch.manual_seed(0)
    build, inputs, share = CASES[name]
    model = build()
    plan = autoplan.plan(model, tp_size=2, inputs=inputs)
    assert not [finding for finding in plan.findings if finding.level == "error"], plan
    report = autoplan.verify(model, plan, tp_size=2, inputs=inputs)
    assert report.ok, report
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters() if parameter.dim() > 1}
    assert _split(plan, sizes) >= share, plan


def _split(plan: autoplan.Plan, sizes: dict[str, int]) -> float:
    whole = sum(size for name, size in sizes.items() if any(matches(left.fqn, name) for left in plan.replicated))
    return 1 - whole / sum(sizes.values())
