"""Models whose other calls run what the usual ones do not. (Apart from tests: two of them run these.)"""

from __future__ import annotations

import torch
from torch import nn


class Optional(nn.Module):
    """With `context` it runs a norm and a layer that never ran, from a list whose others did; or a layer on a value
    whose gradient ranks sum; or it draws."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.into, self.extra = nn.Linear(16, 16), nn.Linear(16, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
        self.ups = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        x = self.into(x)
        normed = self.norms[0](x)
        x = x + self.downs[0](self.ups[0](normed).relu())
        if context is not None and self.what == "random numbers":
            x = x + torch.randn_like(x)
        elif context is not None:
            x = x + self.extra(self.norms[2](x) if self.what == "a norm" else normed[:, :, :].tanh()).tanh()
        return x + self.downs[1](self.ups[1](self.norms[1](x)).relu())


class TwoStreams(nn.Module):
    """The second stream is a constant until `filled` asks for the layer that fills it."""

    def __init__(self, constant: str) -> None:
        super().__init__()
        self.constant = constant
        self.into, self.fill = nn.Linear(16, 16), nn.Linear(16, 16)
        self.ups = nn.ModuleList(nn.Linear(16, 32) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(32, 16) for _ in range(2))

    def forward(self, x: torch.Tensor, filled: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.into(x)
        other = torch.zeros(x.shape) if self.constant == "zeros" else x.new_zeros(x.shape)
        if filled:
            other = other + self.fill(x)
        up = self.ups[1](other) if self.constant != "read inside" else nn.functional.linear(other, self.ups[1].weight)
        return x + self.downs[0](self.ups[0](x).relu()), other + self.downs[1](up.relu())


class Raised(nn.Module):
    """A rate that is 0 when the plan is made: what draws at it was never called."""

    def __init__(self) -> None:
        super().__init__()
        self.input_dropout = 0.0
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.input_dropout:
            x = nn.functional.dropout(x, self.input_dropout)
        return self.down(self.up(x).relu())
