"""Loops whose rounds all do the same, on parts of one size: a step without storage runs one and counts it for all.

A watcher is given the work of a round and the parts, and says what all of them did; without one each round is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

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
