"""What an export must know of the model itself: what it ships with, the classes of its blocks, its linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoplan.common.conventions import conventions
from autoplan.emit.exports.export import Surroundings
from autoplan.values import Plan

if TYPE_CHECKING:
    from torch import nn

__all__ = ["surroundings"]


def surroundings(model: nn.Module, plan: Plan) -> Surroundings:
    """Of a model of any device, for its plan."""
    from torch import nn

    shipped = tuple(conventions().shipped_plan(model))
    blocks: dict[str, None] = {}
    for stack in plan.layers:
        for name in stack.fqns:
            cls = type(model.get_submodule(name))
            blocks[f"{cls.__module__}.{cls.__qualname__}"] = None
    linears = tuple(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return Surroundings(shipped, tuple(blocks), linears, conventions().base_path(model))
