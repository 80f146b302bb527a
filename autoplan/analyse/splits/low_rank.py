"""Low-rank branches parallel to a split projection: their sums join those of the projection.

An adapter adds B(A(x)) to a projection of x; A and B are thin matrices that every rank can hold. Left to themselves
they would cost sums of their own, and keep the projection's sums where they do not merge with those of its neighbours.
Since the branch is linear, its partial sum can pass B and meet the projection's: one sum for both, in the place where
they have been added (joined_sums.py). And the partial gradient of what enters can pass A and be summed with that of all
other readers of x. Each time the gradient of the thin matrix is summed instead, once a step and small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from autoplan.analyse.infer import Axes
from autoplan.analyse.placement.callflow import CallFlow
from autoplan.analyse.shards import Shards
from autoplan.axes.terms import find, leaves
from autoplan.ops import call_record
from autoplan.values import Ref

__all__ = ["branch_weights", "thin_matrix"]

_THIN = 4  # times longer than wide


def branch_weights(axes: Axes, read: Iterable[int]) -> set[int]:
    """Of these weights (inner x outer, the way they are multiplied) the pairs parallel to one from end to end."""
    ends: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for weight in read:
        inner, outer = (tuple(find(leaf).id for leaf in leaves(term)) for term in axes.of(weight))
        ends[weight] = (inner, outer)
    into = defaultdict(list)
    for weight, (inner, _) in ends.items():
        into[inner].append(weight)
    across = set(ends.values())
    found = set()
    for first, (inner, middle) in ends.items():
        for second in into[middle] if middle else ():
            whole = (inner, ends[second][1])
            if middle not in whole and whole in across:
                found |= {first, second}
    return found


def thin_matrix(index: int, flow: CallFlow, shards: Shards) -> int | None:
    """The matrix of a linear call, if it is thin and every rank holds it whole."""
    call = flow.trace.calls[index]
    weight = call.args[1] if call_record(call.name).is_layer and len(call.args) > 1 else None
    if not isinstance(weight, Ref) or len(flow.outputs[index]) != 1:
        return None
    info = flow.trace.tensors[weight.id]
    thin = len(info.shape) == 2 and max(info.shape) >= _THIN * min(info.shape)
    return weight.id if info.kind == "parameter" and thin and not shards.is_split(weight.id) else None
