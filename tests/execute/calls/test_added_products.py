"""Products that add to a value (`addmm`, `baddbmm`), summed over ranks: operands by keyword, `alpha` and `beta`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import autoplan

Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self, product: Product) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 48, bias=False), nn.Parameter(torch.randn(48, 64) / 7)
        self.norm, self.product = nn.LayerNorm(64), product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x, self.up(self.norm(x)).relu(), self.down)


def by_keywords(x: torch.Tensor, h: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return x.baddbmm(batch1=h, batch2=down.expand(len(x), -1, -1), beta=0.3, alpha=2)


def by_place(x: torch.Tensor, h: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    return torch.addmm(x.flatten(0, 1), h.flatten(0, 1), down, alpha=0.5).view_as(x)


@pytest.mark.parametrize("product", [by_keywords, by_place])
def test_they_are_summed_over_ranks(product: Product) -> None:
    torch.manual_seed(0)
    model, inputs = nn.Sequential(Block(product), Block(product)), {"input": torch.randn(3, 5, 64)}
    plan = autoplan.plan(model, tp_size=2, inputs=inputs)
    assert {entry.pattern: entry.style for entry in plan.entries}["*"] == "rowwise", plan
    assert autoplan.verify(model, plan, inputs=inputs).ok
