"""What a long call is doing, for whoever watches: a command line shows it; without a watcher it costs nothing.

    with watched(print):
        stage("recording the model's run")

Ranks are threads and processes of their own and have no watcher, so that a stage is told once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_watcher: ContextVar[Callable[[str], None] | None] = ContextVar("autoplan_watcher", default=None)


def stage(text: str) -> None:
    """Tell the watcher, if there is one, what begins now."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(text)


@contextmanager
def watched(watcher: Callable[[str], None]) -> Iterator[None]:
    """Inside, every stage is told to `watcher`."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)
