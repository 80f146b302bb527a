"""Models with low-rank adapters, which alone are trained: what LoRA makes of a model, without a library for it."""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["Adapted", "with_adapters"]


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank update, as adapters are put in."""

    def __init__(self, inner: nn.Linear, rank: int = 16) -> None:
        super().__init__()
        self.inner = inner
        self.down = nn.Linear(inner.in_features, rank, bias=False, device="meta", dtype=inner.weight.dtype)
        self.up = nn.Linear(rank, inner.out_features, bias=False, device="meta", dtype=inner.weight.dtype)

    @property
    def weight(self) -> nn.Parameter:
        return self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) + self.up(self.down(x))
        return out


def with_adapters(model: nn.Module) -> nn.Module:
    """Everything frozen, and adapters at every linear layer but those whose weights Python or a fused scan reads."""
    model.requires_grad_(False)
    for part in list(model.modules()):
        for key, child in list(part.named_children()):
            if type(child) is nn.Linear and key not in ("lm_head", "router", "gate", "out_proj"):
                setattr(part, key, Adapted(child))
    return model
