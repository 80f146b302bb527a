"""What a model computes in single precision inside is checked in double precision."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from autoplan.check.verify.on_ranks import Sharding
from autoplan.check.verify.sharded import check_sharding
from autoplan.patches.seeding import Lifted


@pytest.mark.parametrize(
    "single",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: torch.softmax(x, 0, dtype=torch.float32),
        lambda x: torch.nn.functional.softmax(x, 0, dtype=torch.float32),
        lambda x: x + torch.zeros(3, dtype=torch.float32),
    ],
)
def test_every_way_to_ask_for_single_precision(single) -> None:
    with Lifted():
        assert single(torch.ones(3, dtype=torch.float64)).dtype == torch.float64


class Inside(nn.Module):
    """Computes in single precision, and lets it be seen."""

    seen: ClassVar[set[torch.dtype]] = set()  # what a module itself holds is put back after each check

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).float()
        self.seen.add(hidden.dtype)
        return torch.tanh(hidden).to(x.dtype)


class Refusing(Inside):
    """Insists on single precision, so nothing can be lifted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.float().dtype != torch.float32:
            raise ValueError("single precision, please")
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "dtype", "inside"),
    [
        (Inside(), torch.float64, torch.float64),
        (Inside(), torch.float32, torch.float32),  # a check in single precision stays one
        (Refusing(), torch.float64, torch.float32),
    ],
)
def test_models_are_checked_in_double_precision_inside_where_they_can(model, dtype, inside) -> None:
    def shard(sharded: Inside, mesh: object) -> Inside:
        Inside.seen.clear()  # of the unsharded run
        return sharded

    def gather(sharded: Inside, gradients: bool) -> dict[str, torch.Tensor]:
        return {n: p.grad if gradients else p for n, p in sharded.named_parameters()}

    inputs = {"forward": {"x": torch.randn(4, 16, dtype=dtype)}}
    report = check_sharding(model.to(dtype), inputs, Sharding(shard, gather), 2, checks=["forward"])
    assert report.ok and Inside.seen == {inside}
