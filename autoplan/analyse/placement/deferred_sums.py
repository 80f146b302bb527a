"""Where a partial sum can wait until the ranks are asked for their parts.

A value that is a part of a sum stays one through every step that is linear in it: a view, a product with a whole value,
a bias of which each rank adds its part, even in place. It may so travel to where its module returns it, or to where
another module reads it, and be summed there by a hook: the same hook whichever way the steps between are written.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Literal

from autoplan.analyse.placement.callflow import CallFlow, Crossing
from autoplan.analyse.shards import Shards
from autoplan.ops import call_record
from autoplan.ops.records.answers import Linear, Shows
from autoplan.values import Call, Ref

__all__ = ["Way", "adds", "follow_down", "is_linear", "step_of"]

# A bias stays one when its rows are selected and viewed.
_SAME_ROWS = frozenset(Shows) - {Shows.NOTHING, Shows.REPEATED}
_STEPS = 10


Side = Literal["output", "input"]


@dataclass
class Way:
    """A way down: the calls on it, the values it passes, the biases added on it, and the boundary where it ends."""

    crossing: Crossing | None = None
    side: Side = "output"  # of the boundary's module
    path: list[int] = field(default_factory=list)
    values: set[int] = field(default_factory=set)
    biases: list[int] = field(default_factory=list)
    added: set[int] = field(default_factory=set)  # the biases as they are when they are added


def follow_down(
    tensor: int,
    made: int,
    flow: CallFlow,
    shards: Shards,
    reductions: Container[int],
    crossing_out: Callable[[int, int], Crossing | None],
    crossing_in: Callable[[int, int], Crossing | None],
) -> Way | None:
    """Follow a partial value, made by a call, down to a module's output, or to the input of one that alone reads it."""
    way = Way(values={tensor})
    for _ in range(_STEPS):
        uses = [use for use in flow.uses[tensor] if use > made]
        step = min(uses, default=None)
        added = None if step is None else step_of(step, tensor, len(uses), flow, shards, reductions)
        if step is None or added is None:
            return _ended(way, "input", crossing_in(tensor, made))
        way.path.append(step)
        way.biases += added.values()
        way.added |= added.keys()
        made, tensor = step, flow.outputs[step][0]
        way.values.add(tensor)
        crossing = crossing_out(tensor, made)
        if crossing is not None:
            return _ended(way, "output", crossing)
    return None


def _ended(way: Way, side: Side, crossing: Crossing | None) -> Way | None:
    way.side, way.crossing = side, crossing
    return None if crossing is None else way


def step_of(
    call: int, tensor: int, uses: int, flow: CallFlow, shards: Shards, reductions: Container[int]
) -> dict[int, int] | None:
    """May a partial value pass this call, its next reader? Then what is added to it on the way: value -> bias."""
    if call in reductions or len(flow.outputs[call]) != 1:
        return None
    if uses != 1 and flow.outputs[call] != [tensor]:  # read by others too, unless they read what is written in place
        return None
    others = [t for t in flow.inputs[call] if t != tensor]
    if any(shards.is_split(t) for t in others):
        return None
    if adds(flow.trace.calls[call]):
        found = {t: _bias_behind(t, flow, shards) for t in others}
        biases = {t: bias for t, bias in found.items() if bias is not None}
        return biases if others and len(biases) == len(others) else None
    return {} if is_linear(flow.trace.calls[call], tensor) else None


def adds(call: Call) -> bool:
    """Is this an addition: of a bias, which is added in parts, or of another sum?"""
    return call_record(call.name).linear is Linear.ADDS


def is_linear(call: Call, tensor: int) -> bool:
    """Is the call's one result linear in the value, all else being whole?"""
    linear = call_record(call.name).linear
    return linear is Linear.EACH or (linear is Linear.FIRST and call.args[:1] == (Ref(tensor),))


def _bias_behind(tensor: int, flow: CallFlow, shards: Shards) -> int | None:
    """The parameter of which a value is a view or a selection of rows, if nothing else reads either."""
    for _ in range(_STEPS):
        if len(flow.uses[tensor]) != 1 or shards.is_split(tensor):
            return None
        if flow.trace.tensors[tensor].kind == "parameter":
            return tensor
        made = flow.producer.get(tensor)
        if made is None or tensor in flow.rewritten or len(flow.outputs[made]) != 1:
            return None
        if call_record(flow.trace.calls[made].name).shows not in _SAME_ROWS:
            return None
        sources = [t for t in flow.inputs[made] if t in flow.carries]
        if len(sources) != 1:
            return None
        tensor = sources[0]
    return None
