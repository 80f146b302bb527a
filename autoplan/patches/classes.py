"""Modules of a live model change their class, and what libraries did to a model is undone when a later step fails.

Parameters of a sharded model are read through properties, so every module gets a subclass of its own class. FSDP2 does
the like, and changes parameters and hooks too, module by module, with no way back. So before it starts, what it changes
is remembered; a model is sharded whole or left as it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed._composable_state import _module_state_mapping

from autoplan.patches.patched import Patch

__all__ = ["CLASSES", "give_class", "whole_or_as_it_was"]


def give_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make a module an instance of another class with the same attributes: a subclass, or the class it had before."""
    module.__class__ = cls


@contextmanager
def whole_or_as_it_was(model: nn.Module) -> Iterator[None]:
    """Put every module's class, attributes, parameters and hooks back if the block raises."""
    before = [(module, type(module), dict(module.__dict__), _contents(module)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls, attributes, contents in before:
            give_class(module, cls)
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for mapping, items in contents:
                mapping.clear()
                mapping.update(items)
            _module_state_mapping.pop(module, None)
        raise


def _contents(module: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """The module's dictionaries (parameters, hooks), which are changed in place and which handles point at."""
    return [(value, dict(value)) for value in module.__dict__.values() if isinstance(value, dict)]


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
