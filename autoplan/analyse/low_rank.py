"""Low-rank branches beside a split projection: their sums join those of the projection.

An adapter adds B(A(x)) to a projection of x; A and B are thin matrices that every rank can hold. Left to themselves
they would cost sums of their own, and keep the projection's sums where they do not merge with those of its neighbours.
Since the branch is linear, its partial sum can pass B and meet the projection's: one sum for both, in the place where
they have been added. And the debt of what enters can pass A and be paid with that of all other readers of x. Each time
the gradient of the thin matrix is summed instead, once a step and small.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from autoplan.analyse.axes import Axes
from autoplan.analyse.callflow import Border, CallFlow
from autoplan.analyse.downstream import SUMS, Way, step_of
from autoplan.analyse.shards import Shards
from autoplan.analyse.terms import find, leaves
from autoplan.values import Ref

__all__ = ["branch_weights", "shared_sums", "thin_matrix"]

_THIN = 4  # times longer than wide
_STEPS = 6


def branch_weights(axes: Axes, read: Iterable[int]) -> set[int]:
    """Of these weights (inner x outer, the way they are multiplied) the pairs that lie beside one from end to end."""
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
    weight = call.args[1] if call.name == "linear" and len(call.args) > 1 else None
    if not isinstance(weight, Ref) or len(flow.outputs[index]) != 1:
        return None
    info = flow.trace.tensors[weight.id]
    thin = len(info.shape) == 2 and max(info.shape) >= _THIN * min(info.shape)
    return weight.id if info.kind == "parameter" and thin and not shards.is_split(weight.id) else None


def shared_sums(
    flow: CallFlow, shards: Shards, reductions: Mapping[int, str], border_out: Callable[[int, int], Border | None]
) -> dict[int, Way]:
    """For partial sums that meet behind a thin matrix: the way to the border where one sum serves both."""
    found: dict[int, Way] = {}
    for index, kind in reductions.items():
        if kind == "sum" and len(flow.outputs[index]) == 1:
            met = _meeting(index, flow, shards, reductions)
            if met is None:
                continue
            other, way = met
            way.border = border_out(flow.outputs[way.path[-1]][0], way.path[-1])
            if way.border is not None:
                found[index] = found[other] = way
    return found


def _meeting(index: int, flow: CallFlow, shards: Shards, reductions: Mapping[int, str]) -> tuple[int, Way] | None:
    """The other sum that a branch is added to, and the way there."""
    tensor = flow.outputs[index][0]
    entry = _only_use(tensor, flow)
    if entry is None or thin_matrix(entry, flow, shards) is None:
        return None
    way = Way(path=[entry], values={tensor, flow.outputs[entry][0]})
    if not _pass_bias(entry, way, flow):
        return None
    tensor = flow.outputs[entry][0]
    for _ in range(_STEPS):
        step = _only_use(tensor, flow)
        if step is None or len(flow.outputs[step]) != 1 or flow.outputs[step][0] in way.values:
            return None
        way.path.append(step)
        if flow.trace.calls[step].name in SUMS:
            other = _other_sum(step, tensor, flow, reductions)
            way.values.update(flow.inputs[step])
            return None if other is None else (other, way)
        if step_of(step, tensor, 1, flow, shards, reductions) is None:
            return None
        tensor = flow.outputs[step][0]
        way.values.add(tensor)
    return None


def _pass_bias(entry: int, way: Way, flow: CallFlow) -> bool:
    """A bias of the thin matrix is added in shares, if it is a parameter of its own."""
    call = flow.trace.calls[entry]
    bias = call.args[2] if len(call.args) > 2 else call.kwargs.get("bias")
    if not isinstance(bias, Ref):
        return True
    way.biases, way.added = [bias.id], {bias.id}
    return flow.trace.tensors[bias.id].kind == "parameter" and len(flow.uses[bias.id]) == 1


def _other_sum(step: int, tensor: int, flow: CallFlow, reductions: Mapping[int, str]) -> int | None:
    """The reduction whose result, read by nothing else, is the other operand."""
    others = [t for t in flow.inputs[step] if t != tensor]
    made = flow.producer.get(others[0]) if len(others) == 1 else None
    if made is None or reductions.get(made) != "sum" or _only_use(others[0], flow) != step:
        return None
    return made


def _only_use(tensor: int, flow: CallFlow) -> int | None:
    uses = flow.uses[tensor]
    return uses[0] if len(uses) == 1 and tensor not in flow.final | flow.rewritten else None
