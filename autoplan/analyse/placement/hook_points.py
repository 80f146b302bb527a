"""Where hooks can sit for a value: the outputs of modules that return it, the inputs of modules that take it.

A hook acts on every run of its module, so a hook point at which only some runs need a sum is closed for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TypeAlias

from autoplan.analyse.placement.callflow import CallFlow, Crossing

__all__ = ["HookPoint", "HookPoints"]

HookPoint: TypeAlias = tuple[str, str, tuple[object, ...]]  # module, "input" or "output", path


class HookPoints:
    """The open hook points of a trace."""

    def __init__(self, flow: CallFlow, closed: Collection[HookPoint]) -> None:
        self.flow, self.closed = flow, closed

    def is_open(self, crossing: Crossing, side: str) -> bool:
        return (crossing.module, side, crossing.path) not in self.closed

    def leaving(self, tensor: int, made: int) -> Crossing | None:
        """The innermost module that returns the value, once, before anything else reads it."""
        first_use = min((u for u in self.flow.uses[tensor] if u > made), default=None)
        times = Counter(b.visit for b in self.flow.leaving.get(tensor, []))
        inside = [
            b for b in self.flow.leaving.get(tensor, [])
            if b.first <= made < b.last and self.is_open(b, "output") and times[b.visit] == 1
        ]  # fmt: skip
        for crossing in sorted(inside, key=lambda b: (b.last - b.first, -b.visit)):
            if first_use is None or crossing.last <= first_use:
                return crossing
        return None

    def made_at(self, tensor: int) -> Crossing | None:
        """Where the value leaves the module that made it."""
        producer = self.flow.producer.get(tensor)
        return None if producer is None else self.leaving(tensor, producer)

    def taking(self, tensor: int, made: int) -> Crossing | None:
        """The outermost module that takes the value and is alone in reading it."""
        uses = [u for u in self.flow.uses[tensor] if u > made]
        if not uses or tensor in self.flow.final or tensor in self.flow.rewritten:
            return None
        around = [
            b for b in self.flow.entering.get(tensor, [])
            if all(b.first <= u < b.last for u in uses) and self.is_open(b, "input")
        ]  # fmt: skip
        return min(around, key=lambda b: b.first - b.last, default=None)

    def before(self, tensor: int, calls: Collection[int], uses: Collection[int]) -> list[Crossing]:
        """Module inputs behind which all readers of the value (`uses`), together, are exactly these calls.

        A value that enters under several names (as key and as value) is taken at each of them.
        """
        left, chosen = set(calls), []
        entering = self.flow.entering.get(tensor, [])
        for crossing in sorted(entering, key=lambda b: b.first - b.last):
            names = [b for b in entering if b.visit == crossing.visit]
            if any(not self.is_open(b, "input") or self.flow.passes_through(tensor, b) for b in names):
                continue
            inside = {u for u in uses if crossing.first <= u < crossing.last}
            if inside and inside <= set(calls) and inside & left and not inside - left:
                left -= inside
                chosen += names
        return [] if left else chosen
