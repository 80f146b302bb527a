"""Report the stages of a long call to a watcher; without one it costs nothing. Ranks have none.

with watched(print):
    stage("recording the model's run")
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

_watcher: ContextVar[Callable[[str], None] | None] = ContextVar("autoplan_watcher", default=None)


def stage(text: str) -> None:
    """Report the stage that begins to the watcher, if there is one."""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(text)


@contextmanager
def set_inside(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Set a context variable in the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def watched(watcher: Callable[[str], None]) -> AbstractContextManager[None]:
    """Report every stage inside to `watcher`."""
    return set_inside(_watcher, watcher)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect garbage seldom: most objects of a long call live until its end; collecting took a tenth of it."""
    before = gc.get_threshold()
    gc.set_threshold(max(1_000_000, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


# Loops with equal rounds: a counter gets the work of a round and the parts, and accounts for all of them.


Round = Callable[[slice], None]
Counter = Callable[[Round, Sequence[slice]], None]

_counter: ContextVar[Counter | None] = ContextVar("autoplan_rounds", default=None)


def run_rounds(work: Round, parts: Sequence[slice]) -> None:
    """Run `work` on each part. All but the last have one size."""
    counter = _counter.get()
    if counter is not None and len(parts) > 2:
        counter(work, parts[:-1])
        parts = parts[-1:]
    for part in parts:
        work(part)


def counted(counter: Counter) -> AbstractContextManager[None]:
    """Let `counter` run the rounds of equal size."""
    return set_inside(_counter, counter)
