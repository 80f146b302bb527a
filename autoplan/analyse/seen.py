"""The facts about the model that the recorded calls showed, which tell at run time whether a call is a different one.

They are read off the trace once its splits are decided; nothing is decided here, so this is not part of solve.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoplan.analyse.infer import Axes, Shards
from autoplan.analyse.placement.callflow import UNRETURNED, CallFlow, Placement
from autoplan.analyse.placement.sums import place
from autoplan.common.patterns import holders
from autoplan.ops.creation import fills
from autoplan.values import AllReduceGradient, Boundary, Constant, Side, Trace


def returned(trace: Trace) -> tuple[tuple[Any, ...], ...]:
    """Return the paths of the tensors that the model returned."""
    paths = (path for visit in trace.visits if visit.module == "" for path, _ in visit.outputs)
    return tuple(dict.fromkeys(path for path in paths if UNRETURNED not in path))


def given(trace: Trace) -> tuple[str, ...]:
    """Return the names of the model's arguments that held tensors."""
    return tuple(dict.fromkeys(str(path[0]) for v in trace.visits if v.module == "" for path, _ in v.inputs))


def idle(trace: Trace) -> tuple[str, ...]:
    """Return the outermost modules with parameters that no call ran and whose parameters nothing read."""
    busy = {module for name in (*trace.read, *(v.module for v in trace.visits)) for module in (name, *holders(name))}
    parameters = (name for t in trace.tensors if t.kind == "parameter" for name in t.names)
    owners = {holder for name in parameters for holder in holders(name)}
    unused = (name for name in trace.module_classes if name in owners and name not in busy)
    return tuple(name for name in unused if name.rpartition(".")[0] in busy)


def unsummed(
    trace: Trace, shards: Shards, axes: Axes, placement: Placement, constants: tuple[Constant, ...]
) -> tuple[str, ...]:
    """Return the inputs without gradient whose gradient would be partial, and that all-reduces at these constants would
    not make full."""
    floats = _quiet_arguments(trace)
    names = tuple(dict.fromkeys(name for name, _ in floats))

    def differs(*some: str) -> bool:
        more = _more(trace, shards, axes, placement, [t for name, t in floats if name in some])
        summed = (
            kind is AllReduceGradient and Constant(module, side, path, True) in constants
            for module, side, path, kind in more.places
        )
        return bool(more.inside) or not all(summed)

    if not names or not differs(*names):
        return ()
    return names if len(names) == 1 else tuple(name for name in names if differs(name))


def _quiet_arguments(trace: Trace) -> list[tuple[str, int]]:
    """Return the float inputs that did not require a gradient in the recorded calls, with their argument's name."""
    inputs = [(str(path[0]), t) for v in trace.visits if v.module == "" for path, t in v.inputs]
    return [(name, t) for name, t in inputs if trace.tensors[t].differentiable and t not in trace.asking]


@dataclass(frozen=True)
class _Sums:
    """The places where gradients are reduced: inputs and outputs of modules, and tensors read by calls (by index)."""

    places: tuple[tuple[str, Side, tuple[Any, ...], type[Boundary]], ...] = ()
    inside: Mapping[int, frozenset[int]] = field(default_factory=dict)


def of_constants(
    trace: Trace, shards: Shards, axes: Axes, placement: Placement, flow: CallFlow
) -> tuple[tuple[Constant, ...], Mapping[int, frozenset[int]]]:
    """Return the constants whose gradients would need reducing if they had any: a stream may be zeros, though not a
    single number, until a branch fills it. Also return, by call, the tensors whose gradients are summed inside a
    forward: such a sum can be placed beforehand and does nothing while there is no gradient.

    Values that carried a gradient are already handled. A constant that needs other places than these is refused.
    """
    constants = [
        t
        for index, call in enumerate(trace.calls)
        if fills(call.name)
        for t in flow.outputs[index]
        if trace.tensors[t].differentiable and t not in flow.carries and len(trace.tensors[t].shape) > 1
    ]
    more = _more(trace, shards, axes, placement, constants) if constants and shards.marks else _Sums()
    inside = {call: tensors - flow.carries for call, tensors in more.inside.items() if tensors - flow.carries}
    return _constants(more, inside, flow), inside


def of_arguments(
    trace: Trace, shards: Shards, axes: Axes, placement: Placement, flow: CallFlow
) -> tuple[Constant, ...]:
    """Return the same for inputs: one that requires a gradient, or a value computed from weights that takes its place,
    as in a recursion. Nothing is placed inside a forward for their sake."""
    quiet = [t for _, t in _quiet_arguments(trace)]
    more = _more(trace, shards, axes, placement, quiet) if quiet and shards.marks else _Sums()
    return _constants(more, {}, flow)


def _constants(more: _Sums, inside: Mapping[int, frozenset[int]], flow: CallFlow) -> tuple[Constant, ...]:
    """Return the places where gradients of constants need work; `sums`: where all-reduces there are enough."""
    places = [p for p in more.places if flow.carries.isdisjoint(flow.runs_through(*p[:3]).values())]
    sums = more == _Sums(tuple(places), inside) and all(kind is AllReduceGradient for *_, kind in places)
    return tuple(Constant(*place, sums) for place in dict.fromkeys(p[:3] for p in places))


def _more(trace: Trace, shards: Shards, axes: Axes, placement: Placement, asking: list[int]) -> _Sums:
    """Return the additional places where gradients must be reduced if these values carry gradients too."""
    placed = place(shards, CallFlow(trace, asking), axes.gathered)
    existing = {(c.module, c.path, kind) for c, kind in (*placement.inputs, *placement.outputs)}
    new: list[tuple[str, Side, tuple[Any, ...], type[Boundary]]] = []
    new += [(c.module, "input", c.path, k) for c, k in placed.inputs if (c.module, c.path, k) not in existing]
    new += [(c.module, "output", c.path, k) for c, k in placed.outputs if (c.module, c.path, k) not in existing]
    inside = {call: frozenset(t - placement.inside_copies.get(call, set())) for call, t in placed.inside_copies.items()}
    return _Sums(tuple(dict.fromkeys(new)), {call: tensors for call, tensors in inside.items() if tensors})
