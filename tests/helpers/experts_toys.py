"""Plain torch models with experts in stacks of weights, with names and forms of their own."""

from __future__ import annotations

from typing import Any

import torch
from small_models import Decoder, ids, with_experts
from torch import nn
from torch.nn import functional as F

__all__ = ["Adding", "Sorted", "Stacked", "with_listed", "with_stacks"]

_HIDDEN = 40


class Stacked(nn.Module):
    """Experts with biases, one after the other, each for the tokens that chose it: a loop over numbers."""

    def __init__(self, how_many: int, inner: int) -> None:
        super().__init__()
        self.how_many, self.inner = how_many, inner
        self.up = nn.Parameter(torch.randn(how_many, _HIDDEN, inner) / 8)
        self.up_shift = nn.Parameter(torch.randn(how_many, inner) / 8)
        self.down = nn.Parameter(torch.randn(how_many, inner, _HIDDEN) / 8)

    def forward(self, which: torch.Tensor, x: torch.Tensor, *, share: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x)
        for number in range(self.how_many):
            row, place = torch.where(which == number)
            inside = F.gelu(x[row] @ self.up[number] + self.up_shift[number]).view(-1, self.inner)
            result = result.index_add(0, row, inside @ self.down[number] * share[row, place, None])
        return result


class Adding(Stacked):
    """Experts whose sum has a term that belongs to none of them: from outside it looks like any other pool."""

    def forward(self, which: torch.Tensor, x: torch.Tensor, *, share: torch.Tensor) -> torch.Tensor:
        return super().forward(which, x, share=share) + torch.tanh(x)


class Sorted(nn.Module):
    """Experts that get a copy of every token each, weighted beforehand."""

    def __init__(self, how_many: int, inner: int) -> None:
        super().__init__()
        self.how_many = how_many
        self.up = nn.Parameter(torch.randn(how_many, _HIDDEN, inner) / 8)
        self.down = nn.Parameter(torch.randn(how_many, inner, _HIDDEN) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = x.view(self.how_many, -1, x.shape[-1])
        return (F.gelu(apart @ self.up) @ self.down).reshape(x.shape)


class Chosen(nn.Module):
    """A router before a pool of experts of either form."""

    def __init__(self, pool: nn.Module, experts: int) -> None:
        super().__init__()
        self.router, self.pool, self.experts = nn.Linear(_HIDDEN, experts), pool, experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        shares, which = torch.topk(torch.softmax(self.router(tokens), dim=-1), 2)
        if isinstance(self.pool, Stacked):
            return self.pool(which, tokens, share=shares).view(x.shape)
        every = torch.zeros(len(tokens), self.experts, dtype=x.dtype).scatter(1, which, shares)
        copies = tokens.repeat(self.experts, 1) * every.T.reshape(-1, 1)
        return self.pool(copies).view(self.experts, -1, x.shape[-1]).sum(0).view(x.shape)


def with_stacks(kind: type[nn.Module], experts: int = 8, inner: int = 96) -> tuple[Decoder, dict[str, Any]]:
    """A decoder with such experts in every layer, and what it is called with."""
    torch.manual_seed(0)
    model = Decoder()
    for layer in model.layers:
        layer.mlp = Chosen(kind(experts, inner), experts)
    return model, ids()


def with_listed() -> tuple[Decoder, dict[str, Any]]:
    """Experts that are modules of their own."""
    return with_experts(), ids()
