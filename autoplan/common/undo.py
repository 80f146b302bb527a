"""Undo what libraries did to a model, when a later step fails.

FSDP2 changes classes, parameters and hooks module by module and has no way back. So before it starts, what it changes
is remembered; a model is sharded whole or left as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["undoing", "whole_or_as_it_was"]


@contextmanager
def undoing(undo: list[Callable[[], None]]) -> Iterator[None]:
    """Run the steps of `undo`, last first, if the block raises."""
    try:
        yield
    except BaseException:
        while undo:
            undo.pop()()
        raise


@contextmanager
def whole_or_as_it_was(model: nn.Module) -> Iterator[None]:
    """Put every module's class, attributes, parameters and hooks back if the block raises."""
    before = [(module, type(module), dict(module.__dict__), _contents(module)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls, attributes, contents in before:
            module.__class__ = cls
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for mapping, items in contents:
                mapping.clear()
                mapping.update(items)
            _forget_sharding(module)
        raise


def _contents(module: nn.Module) -> list[tuple[dict[Any, Any], dict[Any, Any]]]:
    """The module's dictionaries (parameters, hooks), which are changed in place and which handles point at."""
    return [(value, dict(value)) for value in module.__dict__.values() if isinstance(value, dict)]


def _forget_sharding(module: nn.Module) -> None:
    from torch.distributed._composable_state import _module_state_mapping

    _module_state_mapping.pop(module, None)
