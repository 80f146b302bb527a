"""Sums over ranks that meet: what is only added to another sum is summed together with it.

A block may have several partial sums on its way to one place: the routed experts' and the shared expert's, a
projection's and its adapter's. Summed where each of them arises they cost one reduction each. But every one of them
stays a partial sum through whatever is linear in it, so they can all wait until they have been added to each other,
and be summed by one reduction where a module returns the result.

Each sum travels down as far as it can, past a thin matrix too (an adapter's second one) if that leads to a meeting.
What it is multiplied with on the way gets a partial gradient for it; where that is large, waiting gains nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

from autoplan.analyse.placement.callflow import CallFlow, Crossing
from autoplan.analyse.placement.deferred_sums import Way, adds, step_of
from autoplan.analyse.shards import Shards
from autoplan.analyse.splits.low_rank import thin_matrix
from autoplan.values import Ref

__all__ = ["shared_sums"]

_STEPS = 12
_SMALL = 4  # a factor is small against what it multiplies when it has so many times fewer elements

CrossingOut = Callable[[int, int], Crossing | None]


@dataclass
class _Traveller:
    """Sums that go the same way: from which calls, the way, the value they have become, and the call that made it."""

    sums: tuple[int, ...]
    way: Way
    tensor: int
    made: int


def shared_sums(
    flow: CallFlow, shards: Shards, reductions: Mapping[int, str], crossing_out: CrossingOut
) -> dict[int, Way]:
    """For sums that meet: the way to the boundary where one reduction serves all of them."""
    return _Meetings(flow, shards, reductions, crossing_out).find()


class _Meetings:
    def __init__(
        self, flow: CallFlow, shards: Shards, reductions: Mapping[int, str], crossing_out: CrossingOut
    ) -> None:
        self.flow, self.shards, self.reductions, self.crossing_out = flow, shards, reductions, crossing_out
        self.arrived: dict[int, dict[int, _Traveller]] = defaultdict(dict)  # call -> operand -> who came with it
        self.together: dict[int, int] = {}  # how many sums are done with this one
        self.found: dict[int, Way] = {}

    def find(self) -> dict[int, Way]:
        for index, kind in self.reductions.items():
            if kind == "sum" and len(self.flow.outputs[index]) == 1:
                output = self.flow.outputs[index][0]
                self._travel(_Traveller((index,), Way(values={output}), output, index))
        return self.found

    def _travel(self, one: _Traveller) -> None:
        """Go down; at an addition wait for the others, and whoever comes last goes on with all of them."""
        for _ in range(_STEPS):
            step = self._next(one)
            if step is None:
                return
            if self._is_addition(step):
                together = self._meet(step, one)
                if together is None:
                    return
                one = together
            elif not self._pass(step, one):
                return
            self._note(one)

    def _next(self, one: _Traveller) -> int | None:
        """The next reader, if it is the only one, or writes its result into the value."""
        if one.tensor in self.flow.final:
            return None
        uses = [use for use in self.flow.uses[one.tensor] if use > one.made]
        step = min(uses, default=None)
        if step is None or len(self.flow.outputs[step]) != 1:
            return None
        return step if len(uses) == 1 or self.flow.outputs[step] == [one.tensor] else None

    def _is_addition(self, step: int) -> bool:
        """Is something added that is no bias?"""
        if not adds(self.flow.trace.calls[step]) or len(self.flow.inputs[step]) != 2:
            return False
        return not any(self.flow.trace.tensors[t].kind == "parameter" for t in self.flow.inputs[step])

    def _meet(self, step: int, one: _Traveller) -> _Traveller | None:
        """All who have arrived at an addition, once every operand is there."""
        here = self.arrived[step]
        here[one.tensor] = one
        if set(here) != set(self.flow.inputs[step]):
            return None
        output = self.flow.outputs[step][0]
        ways = [other.way for other in here.values()]
        way = Way(
            path=[call for each in ways for call in each.path] + [step],
            values=set().union(*(each.values for each in ways), {output}),
            biases=[bias for each in ways for bias in each.biases],
            added=set().union(*(each.added for each in ways)),
        )
        return _Traveller(tuple(index for other in here.values() for index in other.sums), way, output, step)

    def _pass(self, step: int, one: _Traveller) -> bool:
        """Go through a call that is linear in the sum."""
        uses = [use for use in self.flow.uses[one.tensor] if use > one.made]
        added = step_of(step, one.tensor, len(uses), self.flow, self.shards, self.reductions)
        if added is None:
            if not self._pass_thin(step, one):
                return False
        else:
            if any(map(self._is_large, self._factors(step, one, added))):
                return False
            one.way.biases += added.values()
            one.way.added |= added.keys()
        one.way.path.append(step)
        one.tensor, one.made = self.flow.outputs[step][0], step
        one.way.values.add(one.tensor)
        return True

    def _factors(self, step: int, one: _Traveller, added: Mapping[int, int]) -> list[tuple[int, int]]:
        """What else the call reads that carries gradient, with the value it is multiplied with."""
        others = [t for t in self.flow.inputs[step] if t not in one.way.values and t not in added]
        return [(t, one.tensor) for t in others if t in self.flow.carries]

    def _is_large(self, pair: tuple[int, int]) -> bool:
        factor, value = (prod(self.flow.trace.tensors[t].shape) for t in pair)
        return factor * _SMALL > value

    def _pass_thin(self, step: int, one: _Traveller) -> bool:
        """Go through a thin matrix that every rank holds whole; a bias of its own is added in parts."""
        if len(one.sums) > 1 or thin_matrix(step, self.flow, self.shards) is None:
            return False
        call = self.flow.trace.calls[step]
        if call.args[0] != Ref(one.tensor):
            return False
        bias = call.args[2] if len(call.args) > 2 else call.kwargs.get("bias")
        if isinstance(bias, Ref):
            if self.flow.trace.tensors[bias.id].kind != "parameter" or len(self.flow.uses[bias.id]) != 1:
                return False
            one.way.biases.append(bias.id)
            one.way.added.add(bias.id)
        return True

    def _note(self, one: _Traveller) -> None:
        """Sums that have met are done where they first leave a module together, if no others join them further down."""
        crossing = self.crossing_out(one.tensor, one.made) if len(one.sums) > 1 else None
        if crossing is None or len(one.sums) <= max(self.together.get(index, 1) for index in one.sums):
            return
        way = replace(one.way, crossing=crossing, path=list(one.way.path), values=set(one.way.values))
        for index in one.sums:
            self.together[index], self.found[index] = len(one.sums), way
