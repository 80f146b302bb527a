"""Tell whoever watches what a long call is doing; without a watcher it costs nothing. Ranks have none.

with watched(print):
    stage("recording the model's run")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


# Loops whose rounds all do the same: a watcher is given the work of a round and the parts, and says what all of them
# did.


Round = Callable[[slice], None]
Counter = Callable[[Round, Sequence[slice]], None]

_counter: ContextVar[Counter | None] = ContextVar("autoplan_rounds", default=None)


def run_rounds(work: Round, parts: Sequence[slice]) -> None:
    """`work` of each part. All but the last are of one size."""
    counter = _counter.get()
    if counter is not None and len(parts) > 2:
        counter(work, parts[:-1])
        parts = parts[-1:]
    for part in parts:
        work(part)


@contextmanager
def counted(counter: Counter) -> Iterator[None]:
    """Inside, `counter` runs the rounds that are alike."""
    token = _counter.set(counter)
    try:
        yield
    finally:
        _counter.reset(token)
