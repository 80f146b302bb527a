"""Modules of a live model change their class.

Parameters of a sharded model are read through properties, so every module gets a subclass of its own class. FSDP2 does
the like. `as_it_was.py` gives modules their own class back when a later step fails.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from autoplan.patches.patched import Patch

__all__ = ["CLASSES", "give_class"]


def give_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make a module an instance of another class with the same attributes: a subclass, or the class it had before."""
    module.__class__ = cls


def _canary() -> bool:
    """Does a call of a module go through `_call_impl` of the class that it has now?"""

    class Doubled(nn.Identity):
        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super()._call_impl(*args, **kwargs)

    module = nn.Identity()
    give_class(module, Doubled)
    inside = module(3)
    give_class(module, nn.Identity)
    return (inside, module(3), type(module)) == (6, 3, nn.Identity)


CLASSES = Patch(
    name="classes of modules",
    replaces="the class of each module of a model that holds parameters, by a subclass of it",
    why="a module's own code reads local tensors where optimizers, FSDP2 and checkpoints see DTensors",
    scope="while the model is sharded",
    undone="the module gets its own class back when the plan is undone, or a later step fails",
    where="autoplan/patches/classes.py",
    canary=_canary,
)
