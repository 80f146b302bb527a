"""Low-rank adapters for a model that has none: what fine-tuning with them costs can be asked before they are put in.

Beside each linear layer of the blocks stand two thin ones, A and B, that alone are trained; all else is frozen. Modules
of plain torch stand for those of any library: what a step keeps, sends and updates is the same. Experts that lie in one
tensor, routers that are no linear layers, and what stands outside the blocks get none.
"""

from __future__ import annotations

import torch
from torch import nn

from autoplan.capture.fold import fold
from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.hf.stacks import layers

__all__ = ["LORA_RANK", "Adapted", "nothing_frozen", "with_adapters"]

LORA_RANK = 16  # what peft's guides and most published recipes begin with


class Adapted(nn.Module):
    """A frozen linear layer `inner`, and beside it the low-rank update. Who reads its weight reads that of `inner`."""

    def __init__(self, inner: nn.Module, rank: int) -> None:
        super().__init__()
        self.inner = inner
        own = _weight(inner)
        wide, narrow = own.shape if conventions().is_transposed_linear(inner) else own.shape[::-1]
        self.down = nn.Linear(wide, rank, bias=False, device="meta", dtype=own.dtype)
        self.up = nn.Linear(rank, narrow, bias=False, device="meta", dtype=own.dtype)

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            found: torch.Tensor | nn.Module = getattr(super().__getattr__("inner"), name)
            return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x) + self.up(self.down(x))
        return out


def nothing_frozen(model: nn.Module) -> bool:
    """Then adapters were not put in, nor is a part of it trained."""
    return all(parameter.requires_grad for parameter in model.parameters())


def with_adapters(model: nn.Module, rank: int) -> nn.Module:
    """A copy of `model` without storage, frozen, with adapters beside the linear layers of its blocks."""
    copy = fold(model, fold=False).module.requires_grad_(False)
    blocks = [copy.get_submodule(name) for stack in layers(copy) for name in stack.fqns] or [copy]
    adapted: dict[nn.Module, Adapted] = {}
    parts = {part for block in blocks for part in block.modules()}
    for part in parts:
        for key, child in part.named_children():
            if type(child) is nn.Linear or conventions().is_transposed_linear(child):
                setattr(part, key, adapted.setdefault(child, Adapted(child, rank)))
    if not adapted:
        raise AutoplanError(
            f"{type(model).__name__} has no linear layers to put adapters beside, and nothing of it is frozen",
            hint='freeze what is not trained and pass the model itself, or ask for train="full"',
        )
    return copy.train(model.training)


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module.get_parameter("weight")
    assert weight.dim() == 2
    return weight
