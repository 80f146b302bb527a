"""What the recorded calls showed of the model as a whole, and what they did not: by it, a call that is another is told.

Read off the trace once its splits are decided; nothing is decided here, which is why it is not in solve.py.
"""

from __future__ import annotations

from typing import Any

from autoplan.analyse.infer import Axes
from autoplan.analyse.placement.callflow import CallFlow
from autoplan.analyse.placement.placement import Placement
from autoplan.analyse.placement.sums import place
from autoplan.analyse.shards import Shards
from autoplan.common.patterns import holders
from autoplan.values import Trace

__all__ = ["given", "idle", "returned", "unsummed"]


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
    """Arguments whose gradient nobody asked for: each rank makes a part of it, and no sum stands in the plan."""
    inputs = [(str(path[0]), t) for v in trace.visits if v.module == "" for path, t in v.inputs]
    floats = [(name, t) for name, t in inputs if trace.tensors[t].differentiable and t not in trace.asking]
    names = tuple(dict.fromkeys(name for name, _ in floats))

    def differs(*some: str) -> bool:
        flow = CallFlow(trace, [t for name, t in floats if name in some])
        placed = place(shards, flow, axes.gathered)
        return (placed.inputs, placed.outputs) != (placement.inputs, placement.outputs)

    if not names or not differs(*names):
        return ()
    return names if len(names) == 1 else tuple(name for name in names if differs(name))
