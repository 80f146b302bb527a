"""Partial gradients of whole values, and how they move upstream until one hook can sum them.

An edge value → call is partial when each rank computes only a part of that gradient. All partial edges of a value need
one sum. When all gradient readers of a value are partial, the partial gradient can be pushed upstream through the call
that made it, merging with its siblings, until it sits on a parameter, a module output or a module input.
"""

from __future__ import annotations

from collections import defaultdict

from autoplan.analyse.placement.callflow import CallFlow, Crossing
from autoplan.analyse.placement.hook_points import HookPoints
from autoplan.analyse.shards import Shards
from autoplan.ops import call_record
from autoplan.ops.creation import fills
from autoplan.ops.records.answers import Reduction

__all__ = ["PartialGradients"]

_NEARBY = 16  # calls that a partial gradient passes before it is merged with others
_ANY_NUMBER = 10**6
_MATRIX = 2  # dims of a parameter whose gradient is too large to sum instead of an activation's


class PartialGradients:
    """The partial edges of every value, and what may be done with them."""

    def __init__(
        self, shards: Shards, flow: CallFlow, hook_points: HookPoints, reductions: dict[int, Reduction]
    ) -> None:
        self.shards, self.flow, self.hook_points, self.reductions = shards, flow, hook_points, reductions
        self.trace = shards.trace
        self.partial: dict[int, set[int]] = defaultdict(set)  # value -> calls whose gradient for it is partial
        self.pushed: set[int] = set()
        self.uses = {v: flow.gradient_uses(v) for v in flow.uses}

    def cover(self, tensor: int) -> list[Crossing]:
        """Module inputs behind which all readers of the value, together, are exactly the partial ones."""
        return self.hook_points.before(tensor, self.partial[tensor], self.uses.get(tensor, set()))

    def call_passes(self, index: int) -> bool:
        """May a partial gradient be pushed from a call's outputs to its inputs?"""
        call = self.trace.calls[index]
        outputs = self.flow.outputs[index]
        mixed = any(self.shards.is_mixed(t) for t in outputs)
        if call.module in self.flow.branching or fills(call.name):
            return False
        if index in self.reductions or call_record(call.name).assigns or any(t in self.flow.rewritten for t in outputs):
            return False
        if not mixed and any(self.shards.is_split(t) and not self.shards.is_mixed(t) for t in self.flow.inputs[index]):
            return False
        large = any(self._is_matrix(t) and not self.shards.is_split(t) for t in self.flow.inputs[index])
        return mixed or not large

    def _is_matrix(self, tensor: int) -> bool:
        info = self.trace.tensors[tensor]
        source = self.shards.axes.sources.get(tensor)
        weight = info.kind == "parameter" or (source is not None and self.trace.tensors[source].quantised)
        return weight and len(info.shape) >= _MATRIX

    def settled(self, tensor: int) -> bool:
        """Nothing flows back to the value that this placement would have to sum."""
        return tensor not in self.flow.carries or not self.shards.has_whole_part(tensor)

    def can_be_partial(self, tensor: int, after: int) -> bool:
        """Is every gradient that reaches the (whole part of the) value partial, or can it be made so?"""
        return self._can_be_partial(tensor, after, {}, _ANY_NUMBER)

    def passes_soon(self, index: int, known: dict[int, bool]) -> bool:
        """Does a partial gradient come up through this call from nearby? `known`: answers to this question so far."""
        return self._can_pass(index, known, _NEARBY)

    def _can_be_partial(self, tensor: int, after: int, known: dict[int, bool], steps: int) -> bool:
        uses = self.uses.get(tensor, set())
        if tensor in self.flow.final or not uses or any(u <= after for u in uses):
            return False
        return all(u in self.partial.get(tensor, ()) or self._can_pass(u, known, steps) for u in uses)

    def _can_pass(self, index: int, known: dict[int, bool], steps: int) -> bool:
        if index not in known:
            outputs = [t for t in self.flow.outputs[index] if not self.settled(t)]
            whole = [t for t in self.flow.outputs[index] if t in self.flow.carries]
            known[index] = steps > 0 and self.call_passes(index) and bool(whole) and all(
                self._can_be_partial(t, index, known, steps - 1) for t in outputs
            )  # fmt: skip
        return known[index]

    def push(self, index: int) -> None:
        """Move the partial gradients of a call's outputs to its inputs."""
        for tensor in self.flow.outputs[index]:
            if self.settled(tensor):
                continue
            for use in self.uses.get(tensor, set()):
                if use not in self.partial.get(tensor, set()):
                    self.push(use)
            self.partial.pop(tensor, None)
            self.pushed.add(tensor)
        for tensor in self.flow.inputs[index]:
            if tensor in self.flow.carries and self.shards.has_whole_part(tensor):
                self.partial[tensor].add(index)

    def push_inside(self) -> None:
        """Push partial gradients that no module boundary can sum, the latest first."""
        stuck: set[int] = set()
        while True:
            candidates = [
                (self.flow.producer[t], t)
                for t, calls in self.partial.items()
                if calls and t not in stuck and t in self.flow.producer and self.where(t) == "inside"
            ]
            if not candidates:
                return
            producer, tensor = max(candidates)
            outputs = [t for t in self.flow.outputs[producer] if not self.settled(t)]
            if self.call_passes(producer) and all(self.can_be_partial(t, producer) for t in outputs):
                self.push(producer)
            else:
                stuck.add(tensor)

    def where(self, tensor: int) -> str:
        """Where the sum of a value's partial gradients can sit: "parameter", "output", "input" or "inside"."""
        calls, uses = self.partial[tensor], self.uses.get(tensor, set())
        if any(self.trace.calls[use].module in self.flow.branching for use in uses):
            return "inside"
        complete = uses <= calls
        if self.trace.tensors[tensor].kind == "parameter":
            return "parameter" if complete else ("input" if self.cover(tensor) else "inside")
        cover = self.cover(tensor)
        if complete and tensor not in self.flow.final and self.hook_points.made_at(tensor):
            return "input" if len(cover) == 1 and self._is_handed_up(tensor) else "output"
        return "input" if cover else "inside"

    def _is_handed_up(self, tensor: int) -> bool:
        """Does a module return the value that another one inside of it has made?

        Its callers may then have it for themselves: decoders return the hidden states that a head reads. Whoever only
        passes on what it is given (an Identity) has not made it.
        """
        made = self.flow.producer[tensor]
        return len({one.visit for one in self.flow.leaving.get(tensor, ()) if one.first <= made < one.last}) > 1
