"""Steps that undo what was done, when a later one fails: a model is sharded whole or left as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["undoing"]


@contextmanager
def undoing(undo: list[Callable[[], None]]) -> Iterator[None]:
    """Run the steps of `undo`, last first, if the block raises."""
    try:
        yield
    except BaseException:
        while undo:
            undo.pop()()
        raise
