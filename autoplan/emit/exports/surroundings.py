"""What an export must know of the model itself: the keys of the plan it ships with, and the classes of its blocks."""

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
    shipped = tuple(conventions().shipped_plan(model))
    blocks: dict[str, None] = {}
    for stack in plan.layers:
        for name in stack.fqns:
            cls = type(model.get_submodule(name))
            blocks[f"{cls.__module__}.{cls.__qualname__}"] = None
    return Surroundings(shipped, tuple(blocks))
