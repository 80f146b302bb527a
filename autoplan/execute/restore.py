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
    before = [(module, type(module), _copied(module.__dict__)) for module in model.modules()]
    try:
        yield
    except BaseException:
        for module, cls, attributes in before:
            module.__class__ = cls
            module.__dict__.clear()
            module.__dict__.update(attributes)
            _forget_sharding(module)
        raise


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Dictionaries are changed in place (parameters, hooks): copies of those; everything else as it is."""
    return {key: value.copy() if isinstance(value, dict) else value for key, value in attributes.items()}


def _forget_sharding(module: nn.Module) -> None:
    from torch.distributed._composable_state import _module_state_mapping

    _module_state_mapping.pop(module, None)
