"""What the recorded calls showed of the model as a whole, and what they did not: by it, a call that is another is told.

Read off the trace once its splits are decided; nothing is decided here, which is why it is not in solve.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoplan.analyse.infer import Axes
from autoplan.analyse.placement.callflow import CallFlow, Placement
from autoplan.analyse.placement.sums import place
from autoplan.analyse.shards import Shards
from autoplan.common.patterns import holders
from autoplan.ops.creation import fills
from autoplan.values import AllReduceGradient, Boundary, Constant, Side, Trace


def returned(trace: Trace) -> tuple[tuple[Any, ...], ...]:
    """Paths of what the model returned."""
    return tuple(dict.fromkeys(path for v in trace.visits if v.module == "" for path, _ in v.outputs))


def given(trace: Trace) -> tuple[str, ...]:
    """The arguments with tensors that it was given."""
    return tuple(dict.fromkeys(str(path[0]) for v in trace.visits if v.module == "" for path, _ in v.inputs))


def idle(trace: Trace) -> tuple[str, ...]:
    """The outermost modules with parameters that no call ran, and of which none read one."""
    busy = {one for name in (*trace.read, *(v.module for v in trace.visits)) for one in (name, *holders(name))}
    held = (name for t in trace.tensors if t.kind == "parameter" for name in t.names)
    holding = {holder for name in held for holder in holders(name)}
    found = (name for name in trace.module_classes if name in holding and name not in busy)
    return tuple(name for name in found if name.rpartition(".")[0] in busy)


def unsummed(trace: Trace, shards: Shards, axes: Axes, placement: Placement) -> tuple[str, ...]:
    """Arguments that need no gradient: each rank makes a part of it, and no sum stands in the plan."""
    floats = _quiet_arguments(trace)
    names = tuple(dict.fromkeys(name for name, _ in floats))

    def differs(*some: str) -> bool:
        return _more(trace, shards, axes, placement, [t for name, t in floats if name in some]) != _Sums()

    if not names or not differs(*names):
        return ()
    return names if len(names) == 1 else tuple(name for name in names if differs(name))


def _quiet_arguments(trace: Trace) -> list[tuple[str, int]]:
    """Arguments that no recorded call asked for a gradient, by name."""
    inputs = [(str(path[0]), t) for v in trace.visits if v.module == "" for path, t in v.inputs]
    return [(name, t) for name, t in inputs if trace.tensors[t].differentiable and t not in trace.asking]


@dataclass(frozen=True)
class _Sums:
    """Where ranks see to gradients: at what modules take and return, and at tensors that calls take (by index)."""

    places: tuple[tuple[str, Side, tuple[Any, ...], type[Boundary]], ...] = ()
    inside: Mapping[int, frozenset[int]] = field(default_factory=dict)


def of_constants(
    trace: Trace, shards: Shards, axes: Axes, placement: Placement, flow: CallFlow
) -> tuple[tuple[Constant, ...], Mapping[int, frozenset[int]]]:
    """What gradients of constants need where these are none: a stream may be zeros until a branch fills it, though not
    a number. The constants, and by call the tensors whose gradients are summed inside of a forward: that can be placed
    beforehand, and is nothing while there is no gradient.

    What carried a gradient was seen to. Where that would be done elsewhere for the sake of constants, they are refused.
    """
    made = [
        t
        for index, call in enumerate(trace.calls)
        if fills(call.name)
        for t in flow.outputs[index]
        if trace.tensors[t].differentiable and t not in flow.carries and len(trace.tensors[t].shape) > 1
    ]
    more = _more(trace, shards, axes, placement, made) if made and shards.marks else _Sums()
    inside = {call: tensors - flow.carries for call, tensors in more.inside.items() if tensors - flow.carries}
    return _constants(more, inside, flow), inside


def of_arguments(
    trace: Trace, shards: Shards, axes: Axes, placement: Placement, flow: CallFlow
) -> tuple[Constant, ...]:
    """The same for arguments: one that asks for a gradient, or what is made of weights and takes its way, as in a
    recursion. Nothing is placed inside of a forward for their sake."""
    made = [t for _, t in _quiet_arguments(trace)]
    more = _more(trace, shards, axes, placement, made) if made and shards.marks else _Sums()
    return _constants(more, {}, flow)


def _constants(more: _Sums, inside: Mapping[int, frozenset[int]], flow: CallFlow) -> tuple[Constant, ...]:
    """Where gradients of constants need something; it can be done if it is a sum, and all that is needed."""
    places = [p for p in more.places if flow.carries.isdisjoint(flow.runs_through(*p[:3]).values())]
    sums = more == _Sums(tuple(places), inside) and all(kind is AllReduceGradient for *_, kind in places)
    return tuple(Constant(*place, sums) for place in dict.fromkeys(p[:3] for p in places))


def _more(trace: Trace, shards: Shards, axes: Axes, placement: Placement, asking: list[int]) -> _Sums:
    """Where else, if these values carry gradients, too."""
    placed = place(shards, CallFlow(trace, asking), axes.gathered)
    known = {(c.module, c.path, kind) for c, kind in (*placement.inputs, *placement.outputs)}
    new: list[tuple[str, Side, tuple[Any, ...], type[Boundary]]] = []
    new += [(c.module, "input", c.path, k) for c, k in placed.inputs if (c.module, c.path, k) not in known]
    new += [(c.module, "output", c.path, k) for c, k in placed.outputs if (c.module, c.path, k) not in known]
    inside = {call: frozenset(t - placement.inside_copies.get(call, set())) for call, t in placed.inside_copies.items()}
    return _Sums(tuple(dict.fromkeys(new)), {call: tensors for call, tensors in inside.items() if tensors})
