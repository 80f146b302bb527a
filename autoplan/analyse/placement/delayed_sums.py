"""Delay partial sums past linear steps, and join sums that are added to each other into one all-reduce."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from autoplan.analyse.infer import Shards
from autoplan.analyse.placement.callflow import CallFlow, Crossing
from autoplan.analyse.splits.special import thin_matrix
from autoplan.ops import call_record
from autoplan.ops.records.answers import Linear, Shows
from autoplan.values import Call, Ref

# How far the all-reduce of a partial value can be delayed.
#
# A partial value stays partial through every step that is linear in it: a view, a product with a replicated value, a
# bias of which each rank adds its part, even in place. So it can travel to where its module returns it, or to where
# another module reads it, and be reduced there by a hook, however the steps between are written.

# A bias remains a bias when its rows are selected and viewed.
_SAME_ROWS = frozenset(Shows) - {Shows.NOTHING, Shows.REPEATED}
_STEPS_TO_WAIT = 10


Side = Literal["output", "input"]


@dataclass
class Way:
    """The way of a partial value: the calls and values on it, biases added on it, and the boundary where it ends."""

    crossing: Crossing | None = None
    side: Side = "output"  # of the boundary's module
    path: list[int] = field(default_factory=list)
    values: set[int] = field(default_factory=set)
    biases: list[int] = field(default_factory=list)
    added: set[int] = field(default_factory=set)  # the biases in the form in which they are added (views)


def follow_down(
    tensor: int,
    maker: int,
    flow: CallFlow,
    shards: Shards,
    reductions: Container[int],
    crossing_out: Callable[[int, int], Crossing | None],
    crossing_in: Callable[[int, int], Crossing | None],
) -> Way | None:
    """Follow a partial value, made by a call, down to a module's output, or to the input of its only reader."""
    way = Way(values={tensor})
    for _ in range(_STEPS_TO_WAIT):
        uses = [use for use in flow.uses[tensor] if use > maker]
        step = min(uses, default=None)
        added = None if step is None else step_of(step, tensor, len(uses), flow, shards, reductions)
        if step is None or added is None:
            return _ended(way, "input", crossing_in(tensor, maker))
        way.path.append(step)
        way.biases += added.values()
        way.added |= added.keys()
        maker, tensor = step, flow.outputs[step][0]
        way.values.add(tensor)
        crossing = crossing_out(tensor, maker)
        if crossing is not None:
            return _ended(way, "output", crossing)
    return None


def _ended(way: Way, side: Side, crossing: Crossing | None) -> Way | None:
    way.side, way.crossing = side, crossing
    return None if crossing is None else way


def step_of(
    call: int, tensor: int, uses: int, flow: CallFlow, shards: Shards, reductions: Container[int]
) -> dict[int, int] | None:
    """Return the biases that this call, the next reader, adds to a partial value (value -> bias); None if it blocks."""
    if call in reductions or len(flow.outputs[call]) != 1:
        return None
    if uses != 1 and flow.outputs[call] != [tensor]:  # read by others too, unless they read what is written in place
        return None
    others = [t for t in flow.inputs[call] if t != tensor]
    if any(shards.is_split(t) for t in others):
        return None
    if adds(flow.trace.calls[call]):
        sources = {t: _bias_behind(t, flow, shards) for t in others}
        biases = {t: bias for t, bias in sources.items() if bias is not None}
        return biases if others and len(biases) == len(others) else None
    return {} if is_linear(flow.trace.calls[call], tensor) else None


def adds(call: Call) -> bool:
    """Return whether the call is an addition: of a bias, which is added in parts, or of another sum."""
    return call_record(call.name).linear is Linear.ADDS


def is_linear(call: Call, tensor: int) -> bool:
    """Return whether the call's one result is linear in the value, all other inputs being replicated."""
    linear = call_record(call.name).linear
    return linear is Linear.EACH or (linear is Linear.FIRST and call.args[:1] == (Ref(tensor),))


def _bias_behind(tensor: int, flow: CallFlow, shards: Shards) -> int | None:
    """Return the parameter of which a value is a view or a selection of rows, if nothing else reads either."""
    for _ in range(_STEPS_TO_WAIT):
        if len(flow.uses[tensor]) != 1 or shards.is_split(tensor):
            return None
        if flow.trace.tensors[tensor].kind == "parameter":
            return tensor
        producer = flow.producer.get(tensor)
        if producer is None or tensor in flow.rewritten or len(flow.outputs[producer]) != 1:
            return None
        if call_record(flow.trace.calls[producer].name).shows not in _SAME_ROWS:
            return None
        sources = [t for t in flow.inputs[producer] if t in flow.carries]
        if len(sources) != 1:
            return None
        tensor = sources[0]
    return None


# Partial values that are only added to each other share one all-reduce.
#
# A block may have several partial sums on their way to one place: the routed experts' and the shared expert's, a
# projection's and its adapter's. Reduced where each of them arises they cost one all-reduce each. But each of them
# stays partial through whatever is linear in it, so they can all wait until they have been added to each other, and be
# reduced by one all-reduce where a module returns the result.
#
# Each sum travels down as far as it can, past a thin matrix too (an adapter's second one) if that leads to a meeting.
# Factors on the way get a partial gradient in exchange; where a factor is large, waiting gains nothing.

_STEPS = 12
_SMALL = 4  # a factor is small if it has this many times fewer elements than the value it multiplies

CrossingOut = Callable[[int, int], Crossing | None]


@dataclass
class _Traveller:
    """Sums that travel together: their calls, the way, the value they have become, and the call that made it."""

    sums: tuple[int, ...]
    way: Way
    tensor: int
    made: int


def shared_sums(
    flow: CallFlow, shards: Shards, reductions: Mapping[int, str], crossing_out: CrossingOut
) -> dict[int, Way]:
    """Return the way to the boundary where one reduction serves all, for each of the sums that meet."""
    return _Meetings(flow, shards, reductions, crossing_out).find()


class _Meetings:
    def __init__(
        self, flow: CallFlow, shards: Shards, reductions: Mapping[int, str], crossing_out: CrossingOut
    ) -> None:
        self.flow, self.shards, self.reductions, self.crossing_out = flow, shards, reductions, crossing_out
        self.arrived: dict[int, dict[int, _Traveller]] = defaultdict(dict)  # call -> operand -> sums that arrived as it
        self.together: dict[int, int] = {}  # how many sums share the reduction of this one
        self.found: dict[int, Way] = {}

    def find(self) -> dict[int, Way]:
        for index, kind in self.reductions.items():
            if kind == "sum" and len(self.flow.outputs[index]) == 1:
                output = self.flow.outputs[index][0]
                self._travel(_Traveller((index,), Way(values={output}), output, index))
        return self.found

    def _travel(self, traveller: _Traveller) -> None:
        """Go down; at an addition wait for the other operands, and go on with all of them after the last."""
        for _ in range(_STEPS):
            step = self._next(traveller)
            if step is None:
                return
            if self._is_addition(step):
                together = self._meet(step, traveller)
                if together is None:
                    return
                traveller = together
            elif not self._pass(step, traveller):
                return
            self._note(traveller)

    def _next(self, traveller: _Traveller) -> int | None:
        """Return the next reader, if it is the only one, or writes its result into the value."""
        if traveller.tensor in self.flow.final:
            return None
        uses = [use for use in self.flow.uses[traveller.tensor] if use > traveller.made]
        step = min(uses, default=None)
        if step is None or len(self.flow.outputs[step]) != 1:
            return None
        return step if len(uses) == 1 or self.flow.outputs[step] == [traveller.tensor] else None

    def _is_addition(self, step: int) -> bool:
        """Return whether the call adds two values, neither of which is a bias."""
        if not adds(self.flow.trace.calls[step]) or len(self.flow.inputs[step]) != 2:
            return False
        return not any(self.flow.trace.tensors[t].kind == "parameter" for t in self.flow.inputs[step])

    def _meet(self, step: int, traveller: _Traveller) -> _Traveller | None:
        """Return all sums that have arrived at an addition, joined, once every operand is there."""
        arrived = self.arrived[step]
        arrived[traveller.tensor] = traveller
        if set(arrived) != set(self.flow.inputs[step]):
            return None
        output = self.flow.outputs[step][0]
        ways = [other.way for other in arrived.values()]
        way = Way(
            path=[call for each in ways for call in each.path] + [step],
            values=set().union(*(each.values for each in ways), {output}),
            biases=[bias for each in ways for bias in each.biases],
            added=set().union(*(each.added for each in ways)),
        )
        return _Traveller(tuple(index for other in arrived.values() for index in other.sums), way, output, step)

    def _pass(self, step: int, traveller: _Traveller) -> bool:
        """Pass through a call that is linear in the sum."""
        uses = [use for use in self.flow.uses[traveller.tensor] if use > traveller.made]
        added = step_of(step, traveller.tensor, len(uses), self.flow, self.shards, self.reductions)
        if added is None:
            if not self._pass_thin(step, traveller):
                return False
        else:
            if self._has_large_factor(step, traveller, added):
                return False
            traveller.way.biases += added.values()
            traveller.way.added |= added.keys()
        traveller.way.path.append(step)
        traveller.tensor, traveller.made = self.flow.outputs[step][0], step
        traveller.way.values.add(traveller.tensor)
        return True

    def _has_large_factor(self, step: int, traveller: _Traveller, added: Mapping[int, int]) -> bool:
        """Return whether another input of the call that carries gradients is large, next to the value it multiplies."""
        handled = traveller.way.values | added.keys()
        others = [t for t in self.flow.inputs[step] if t not in handled and t in self.flow.carries]
        value, *factors = (prod(self.flow.trace.tensors[t].shape) for t in (traveller.tensor, *others))
        return any(factor * _SMALL > value for factor in factors)

    def _pass_thin(self, step: int, traveller: _Traveller) -> bool:
        """Pass through a thin replicated matrix; a bias of its own is added in parts."""
        if len(traveller.sums) > 1 or thin_matrix(step, self.flow, self.shards) is None:
            return False
        call = self.flow.trace.calls[step]
        if call.args[0] != Ref(traveller.tensor):
            return False
        bias = call.args[2] if len(call.args) > 2 else call.kwargs.get("bias")
        if isinstance(bias, Ref):
            if self.flow.trace.tensors[bias.id].kind != "parameter" or len(self.flow.uses[bias.id]) != 1:
                return False
            traveller.way.biases.append(bias.id)
            traveller.way.added.add(bias.id)
        return True

    def _note(self, traveller: _Traveller) -> None:
        """Reduce sums that have met where they first leave a module together, unless others join them further down."""
        crossing = self.crossing_out(traveller.tensor, traveller.made) if len(traveller.sums) > 1 else None
        if crossing is None or len(traveller.sums) <= max(self.together.get(index, 1) for index in traveller.sums):
            return
        way = replace(traveller.way, crossing=crossing, path=list(traveller.way.path), values=set(traveller.way.values))
        for index in traveller.sums:
            self.together[index], self.found[index] = len(traveller.sums), way
