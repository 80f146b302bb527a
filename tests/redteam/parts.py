"""Pieces that many cases share: a plain MLP, a plain attention, and heads taken apart and put together."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["Attention", "Mlp", "joined", "parted"]


def parted(x: Tensor, heads: int) -> Tensor:
    """Return (batch, heads, length, width of a head)."""
    return x.view(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """Return (batch, length, width)."""
    return x.transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    def __init__(self, d: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(x))

    def inner(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))


class Attention(nn.Module):
    def __init__(self, d: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.o(self.mixed(x))

    def scores(self, x: Tensor) -> Tensor:
        q, k = parted(self.q(x), self.heads), parted(self.k(x), self.heads)
        return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5

    def mixed(self, x: Tensor) -> Tensor:
        return joined(torch.softmax(self.scores(x), -1) @ parted(self.v(x), self.heads))


class Net(nn.Module):
    """No gradient is 0 but for rounding: signs and ratios of such values mean nothing."""

    def __init__(self):
        super().__init__()
        self.mix, self.feed, self.norm, self.out = Attention(), Mlp(), nn.LayerNorm(16), nn.Linear(16, 16)
        self.mix.k = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return self.out(self.norm(self.feed(self.mix(x))))
