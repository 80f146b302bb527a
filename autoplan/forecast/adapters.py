"""Low-rank adapters for a model that has none: what fine-tuning with them costs can be asked before they are put in.

Beside each target stand two thin linear layers, A and B, that alone are trained; all else is frozen. Modules of plain
torch stand for those of any library: what a step keeps, sends and updates is the same. Targets are named as peft names
them: endings of module names, a pattern for whole names, or "all-linear" (of the blocks). Experts that lie in one
tensor and routers that are no linear layers get none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from torch import nn

from autoplan.capture.fold import fold
from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.hf.stacks import layers

LORA_RANK = 8  # of peft's LoraConfig
ALL_LINEAR = "all-linear"


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


def targets_of(given: str | Sequence[str] | None) -> tuple[str, ...] | str | None:
    """As they are asked for: a text names one layer, several between commas, or all linear ones."""
    if given is None or given == ALL_LINEAR:
        return given
    names = given.split(",") if isinstance(given, str) else given
    if (
        not isinstance(names, Sequence)
        or not all(isinstance(name, str) and name.strip() for name in names)
        or not names
    ):
        raise AutoplanError(f"lora_targets={given!r}", hint=f"endings of names of layers, or {ALL_LINEAR}")
    return tuple(name.strip() for name in names)


def nothing_frozen(model: nn.Module) -> bool:
    """Then adapters were not put in, nor is a part of it trained."""
    return all(parameter.requires_grad for parameter in model.parameters())


def with_adapters(model: nn.Module, rank: int, targets: tuple[str, ...] | str) -> nn.Module:
    """A copy of `model` without storage, frozen, with adapters beside the targets."""
    copy = fold(model, fold=False).module.requires_grad_(False)
    inside = tuple(f"{name}." for stack in layers(copy) for name in stack.fqns) or ("",)
    adapted: dict[nn.Module, Adapted] = {}
    for path, part in list(copy.named_modules(remove_duplicate=False)):
        for key, child in list(part.named_children()):
            name = f"{path}.{key}" if path else key
            linear = type(child) is nn.Linear or conventions().is_transposed_linear(child)
            if linear and (name.startswith(inside) if targets == ALL_LINEAR else _is_target(name, targets)):
                setattr(part, key, adapted.setdefault(child, Adapted(child, rank)))
    if not adapted and targets == ALL_LINEAR:
        raise AutoplanError(
            f"{type(model).__name__} has no linear layers to put adapters beside, and nothing of it is frozen",
            hint='freeze what is not trained and pass the model itself, or ask for train="full"',
        )
    if not adapted:
        named = targets if isinstance(targets, str) else ", ".join(targets)
        raise AutoplanError(
            f"{type(model).__name__} has no linear layer called {named}",
            hint=f"name those that get adapters in lora_targets (--lora-targets), or {ALL_LINEAR}",
        )
    return copy.train(model.training)


def _is_target(name: str, targets: tuple[str, ...] | str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    return any(name == one or name.endswith(f".{one}") for one in targets)


def _weight(module: nn.Module) -> torch.Tensor:
    weight = module.get_parameter("weight")
    assert weight.dim() == 2
    return weight
