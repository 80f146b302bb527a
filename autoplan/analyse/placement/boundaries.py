"""Where hooks can sit for a value: the outputs of modules that return it, the inputs of modules that take it.

A hook acts on every run of its module, so a door at which only some runs owe something is closed for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import TypeAlias

from autoplan.analyse.placement.callflow import Border, CallFlow

__all__ = ["Door", "Doors"]

Door: TypeAlias = tuple[str, str, tuple[object, ...]]  # module, "input" or "output", path


class Doors:
    """The open doors of a trace."""

    def __init__(self, flow: CallFlow, closed: Collection[Door]) -> None:
        self.flow, self.closed = flow, closed

    def is_open(self, border: Border, side: str) -> bool:
        return (border.module, side, border.path) not in self.closed

    def leaving(self, tensor: int, made: int) -> Border | None:
        """The innermost module that returns the value, once, before anything else reads it."""
        first_use = min((u for u in self.flow.uses[tensor] if u > made), default=None)
        times = Counter(b.visit for b in self.flow.leaving.get(tensor, []))
        inside = [
            b for b in self.flow.leaving.get(tensor, [])
            if b.first <= made < b.last and self.is_open(b, "output") and times[b.visit] == 1
        ]  # fmt: skip
        for border in sorted(inside, key=lambda b: (b.last - b.first, -b.visit)):
            if first_use is None or border.last <= first_use:
                return border
        return None

    def made_at(self, tensor: int) -> Border | None:
        """Where the value leaves the module that made it."""
        producer = self.flow.producer.get(tensor)
        return None if producer is None else self.leaving(tensor, producer)

    def taking(self, tensor: int, made: int) -> Border | None:
        """The outermost module that takes the value and is alone in reading it."""
        uses = [u for u in self.flow.uses[tensor] if u > made]
        if not uses or tensor in self.flow.final or tensor in self.flow.rewritten:
            return None
        around = [
            b for b in self.flow.entering.get(tensor, [])
            if all(b.first <= u < b.last for u in uses) and self.is_open(b, "input")
        ]  # fmt: skip
        return min(around, key=lambda b: b.first - b.last, default=None)

    def before(self, tensor: int, calls: Collection[int], uses: Collection[int]) -> list[Border]:
        """Module inputs behind which all readers of the value (`uses`), together, are exactly these calls.

        A value that enters under several names (as key and as value) is taken at each of them.
        """
        left, chosen = set(calls), []
        entering = self.flow.entering.get(tensor, [])
        for border in sorted(entering, key=lambda b: b.first - b.last):
            doors = [b for b in entering if b.visit == border.visit]
            if any(not self.is_open(b, "input") or self.flow.passes_through(tensor, b) for b in doors):
                continue
            inside = {u for u in uses if border.first <= u < border.last}
            if inside and inside <= set(calls) and inside & left and not inside - left:
                left -= inside
                chosen += doors
        return [] if left else chosen
