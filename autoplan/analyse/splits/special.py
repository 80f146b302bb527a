"""Special cases: recurrent networks, low-rank branches and a loss that the model computes itself."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from autoplan.analyse.infer import Axes, Shards
from autoplan.analyse.placement.callflow import UNRETURNED, CallFlow
from autoplan.analyse.splits.packed import Demands
from autoplan.axes.terms import find, leaves
from autoplan.common.layout import chunk
from autoplan.ops import call_record
from autoplan.ops.records.answers import Recurrent as Network
from autoplan.ops.records.answers import Shows
from autoplan.ops.records.record import REMOVED
from autoplan.values import (
    Call,
    CallRewrite,
    CallSite,
    CellCall,
    HeldRows,
    ModuleVisit,
    RecurrentCall,
    Ref,
    Trace,
    refs_with_paths,
)
from autoplan.values.reasons import CutOfRecurrent

# Low-rank branches parallel to a split projection: their sums join those of the projection.
#
# An adapter adds B(A(x)) to a projection of x; A and B are thin matrices that can be replicated. Naively they would
# cost sums of their own, and keep the projection's sums from merging with those of its neighbours. Since the branch is
# linear, its partial sum can pass B and meet the projection's: one all-reduce for both, where they have been added
# (delayed_sums.py). And the partial gradient of the input can pass A and be summed with that of all other readers of
# x. Each time the gradient of the thin matrix is all-reduced instead, which is small and happens once a step.

_THIN = 4  # times longer than wide


def branch_weights(axes: Axes, read: Iterable[int]) -> set[int]:
    """Return, of these weights (inner x outer, as they are multiplied), the pairs parallel to one from end to end."""
    ends: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for weight in read:
        inner, outer = (tuple(find(leaf).id for leaf in leaves(term)) for term in axes.of(weight))
        ends[weight] = (inner, outer)
    into = defaultdict(list)
    for weight, (inner, _) in ends.items():
        into[inner].append(weight)
    across = set(ends.values())
    weights = set()
    for first, (inner, middle) in ends.items():
        for second in into[middle] if middle else ():
            whole = (inner, ends[second][1])
            if middle not in whole and whole in across:
                weights |= {first, second}
    return weights


def thin_matrix(index: int, flow: CallFlow, shards: Shards) -> int | None:
    """Return the matrix of a linear call, if it is thin and replicated."""
    call = flow.trace.calls[index]
    weight = call.args[1] if call_record(call.name).is_layer and len(call.args) > 1 else None
    if not isinstance(weight, Ref) or len(flow.outputs[index]) != 1:
        return None
    info = flow.trace.tensors[weight.id]
    thin = len(info.shape) == 2 and max(info.shape) >= _THIN * min(info.shape)
    return weight.id if info.kind == "parameter" and thin and not shards.is_split(weight.id) else None


# Removal of a loss that the model itself computes from the logits that it returns.
#
# The problem: `loss = F.cross_entropy(logits.view(-1, vocabulary), targets)` reads across the vocabulary, so the head
# could not stay split: its columns would be gathered, for a loss that ranks can compute from their shards
# (`execute/vocabulary`). The ops between the head and such a loss handle sharded logits, and any other reader there
# gets full logits. So the loss puts no constraint on how the weights may be split.
#
# Only the loss and what is computed from it alone are removed. A loss of logits that no run of the model returns stays,
# as does one that is added to something else: that sum would be lost.


def without_own_loss(trace: Trace, context: bool, own_loss: bool) -> Trace:
    """Return the trace as if the model had returned its logits and computed no loss from them. With `context`, they may
    be a product of the model's own code: such code runs on own positions. With `own_loss`, a loss of logits
    that no run of the model returns stays."""
    recorded, trace = trace, _with_logits(trace, context, own_loss)
    taken = _losses(trace, context)
    if not taken:
        return recorded
    ops, calls = list(trace.ops), list(trace.calls)
    for number in taken:
        first, stop = calls[number].ops
        for op in range(first, stop):
            ops[op] = replace(ops[op], name=REMOVED, args=(), kwargs={}, outputs=())
        calls[number] = replace(calls[number], name=REMOVED, args=(), kwargs={}, outputs=(), ops=(stop, stop))
    targets = _read_for(taken, trace)
    visits = (replace(v, inputs=tuple(item for item in v.inputs if item[1] not in targets)) for v in trace.visits)
    return replace(trace, ops=tuple(ops), calls=tuple(calls), visits=tuple(visits))


def returns_less(trace: Trace) -> bool:
    """Return whether it is a trace as if the model had returned logits that it never returns."""
    return any(UNRETURNED in path for visit in trace.visits for path, _ in visit.outputs)


def _read_for(losses: set[int], trace: Trace) -> set[int]:
    """Return the values that nothing but these calls reads, or what is made for them: an argument among these is one
    that a call may lack, whatever its name."""
    readers: dict[int, set[int]] = defaultdict(set)
    for number, call in enumerate(trace.calls):
        for tensor in call.reads:
            readers[tensor].add(number)
    gone, returned = set(losses), {tensor for visit in trace.visits for _, tensor in visit.outputs}
    for number in reversed(range(len(trace.calls))):
        outputs = set(trace.calls[number].results)
        if outputs and not outputs & returned and all(readers[t] and readers[t] <= gone for t in outputs):
            gone.add(number)
    return {tensor for tensor, by in readers.items() if by and by <= gone}


def _with_logits(trace: Trace, context: bool, own_loss: bool) -> Trace:
    """Return the trace as if a run that returns a loss only had returned the logits, too: where other runs return
    them, or else at `UNRETURNED`."""
    made_by = _makers(trace)
    runs = [visit for visit in trace.visits if visit.module == ""]
    returned: dict[Any, tuple[Any, ...]] = {}  # by the place in the code where they are made: where they are returned
    for visit in runs:
        places = _places_in(visit, trace)
        returned |= {places[made_by[t]]: path for path, t in visit.outputs if made_by.get(t) in places}
    visits = list(trace.visits)
    known = {tensor for visit in runs for _, tensor in visit.outputs}
    handed = _Handed(trace, made_by, context, alone=True)
    for at, visit in enumerate(trace.visits):
        places = _places_in(visit, trace) if visit.module == "" else {}
        outputs = dict(visit.outputs)
        for number in places:
            if not call_record(trace.calls[number].name).loss_of_columns:
                continue
            shown = [t for t in _shown_in(trace.calls[number], trace, made_by) if t in made_by]
            makers = {places.get(made_by[t]): t for t in shown}
            place = next((place for place in makers if place in returned), None)
            path = returned.get(place, ())
            scalar = path in outputs and not trace.tensors[outputs[path]].shape
            if place is not None and (scalar or (path not in outputs and all(isinstance(p[0], str) for p in outputs))):
                visits[at] = replace(visits[at], outputs=(*visits[at].outputs, (path, makers[place])))
            elif not own_loss and place is None and shown and known.isdisjoint(shown) and shown[-1] in handed:
                visits[at] = replace(visits[at], outputs=(*visits[at].outputs, ((UNRETURNED, number), shown[-1])))
    return replace(trace, visits=tuple(visits))


class _Handed:
    """Values that a module hands to the model's own code, which may have changed them since (`alone`: with no others).
    With `context`, this code may multiply them by weights, too."""

    def __init__(self, trace: Trace, made_by: dict[int, int], context: bool, alone: bool = False) -> None:
        self.trace, self.made_by, self.context, self.alone = trace, made_by, context, alone
        within = [item for visit in trace.visits if visit.parent is not None for item in visit.outputs]
        self.outputs = {tensor for path, tensor in within if context or not (alone and path)}

    def __contains__(self, tensor: int) -> bool:
        while tensor not in self.outputs and tensor in self.made_by:
            call = self.trace.calls[self.made_by[tensor]]
            product = call_record(call.name).product
            values = [t for t in call.reads if self.trace.tensors[t].kind not in ("parameter", "constant")]
            if product is not None:
                factor = call.args[product.value] if self.context and len(call.args) > product.value else None
                values = [factor.id] if isinstance(factor, Ref) else []
            if not values or (self.alone and len(set(values)) > 1):
                return False
            tensor = values[0]
        return tensor in self.outputs


def _makers(trace: Trace) -> dict[int, int]:
    """Return the call that makes each tensor: others return it as it was given (`x.float()`), or write into it."""
    calls = reversed(list(enumerate(trace.calls)))
    return {tensor: number for number, call in calls for tensor in set(call.results).difference(call.reads)}


def _places_in(run: ModuleVisit, trace: Trace) -> dict[int, tuple[Any, ...]]:
    """Return, for each call of a run, its place in the code and how often that ran before."""
    count = Counter[tuple[str, str, str]]()
    places: dict[int, tuple[Any, ...]] = {}
    for number in range(*run.calls):
        call = trace.calls[number]
        place = call.module, call.name, call.place
        places[number] = *place, count[place]
        count[place] += 1
    return places


def _losses(trace: Trace, context: bool) -> set[int]:
    """Return the calls of such losses, of values only they read, and of their results; none if others join those."""
    made_by = _makers(trace)
    handed = _Handed(trace, made_by, context)
    returned = {t for visit in trace.visits if visit.module == "" for _, t in visit.outputs if t in handed}
    losses: set[int] = set()
    ways: set[int] = set()
    lost: set[int] = set()
    for number, call in enumerate(trace.calls):
        read = set(call.reads)
        way = _way_from_logits(call, returned, trace, made_by) if call_record(call.name).loss_of_columns else None
        if way is None and not read & lost:
            continue
        if way is None and any(trace.tensors[other].kind != "constant" for other in read - lost):
            return set()
        losses.add(number)
        ways.update(way or ())
        lost |= set(call.results)
    return losses | _only_for(losses, ways, trace)


def _way_from_logits(loss: Call, returned: set[int], trace: Trace, made_by: dict[int, int]) -> list[int] | None:
    """Return the calls (views, casts, slices) between logits that the model returns and their loss; None if it reads
    none."""
    way: list[int] = []
    for tensor in _shown_in(loss, trace, made_by):
        if tensor in returned:
            return way
        way.append(made_by.get(tensor, -1))
    return None


def _shown_in(loss: Call, trace: Trace, made_by: dict[int, int]) -> Iterator[int]:
    """Yield what a loss reads, and what that shows (behind views, casts, slices), back to what is computed."""
    scores = loss.args[0] if loss.args else loss.kwargs.get("input")
    while isinstance(scores, Ref):
        yield scores.id
        number = made_by.get(scores.id, -1)
        if number < 0 or call_record(trace.calls[number].name).shows == Shows.NOTHING:
            return
        scores = trace.calls[number].args[0]


def _only_for(losses: set[int], ways: set[int], trace: Trace) -> set[int]:
    """Return, of the calls on the way to losses, those that nothing else reads, checked from the last to the first."""
    readers: dict[int, set[int]] = {}
    for number, call in enumerate(trace.calls):
        for tensor in call.reads:
            readers.setdefault(tensor, set()).add(number)
    gone = set(losses)
    for number in sorted(ways, reverse=True):
        if all(readers.get(tensor, set()) <= gone for tensor in trace.calls[number].results):
            gone.add(number)
    return gone


# Recurrent networks whose weights have no axis to split: their rows are sharded, each gate by hidden unit.
#
# A step needs all of the previous state: the hidden units are the columns of one weight and the rows of the same, so
# no axis can be split. But the rows alone can be sharded, with an all-gather. A call that runs all steps (`nn.LSTM`)
# gets its weights gathered and runs in its own fused kernel: gathering the state at each step would mean as many waits
# as there are steps, and no fused kernel. Where the model's Python runs the steps (`nn.LSTMCell`), a rank computes its
# hidden units, and the new state, much smaller than the weights, is gathered each time.
#
# Nothing else changes: inputs and outputs stay replicated, as analysis found them.

_WORTHWHILE = 0.004  # share of all matrix elements: fewer are not worth a gather


@dataclass
class Recurrent:
    """The layout of the rows of each weight, and the instructions for the calls that use them."""

    rows: dict[int, str] = field(default_factory=dict)
    how: dict[int, CutOfRecurrent] = field(default_factory=dict)
    calls: tuple[CallRewrite, ...] = ()


def recurrent(shards: Shards, flow: CallFlow, scoped: Collection[CallRewrite], demands: Demands) -> Recurrent:
    """Return the row shardings at calls of recurrent networks in which no axis is split."""
    trace, result = shards.trace, Recurrent()
    taken = {(call.pattern, call.site.function, call.site.place) for call in scoped}
    total = sum(prod(info.shape) for info in trace.tensors if info.kind == "parameter" and len(info.shape) >= 2)
    for place, indices in _places(trace).items():
        rows = {index: _held(trace.calls[index], trace, shards.tp) for index in indices}
        weights = {tensor for by_path in rows.values() for tensor, _ in by_path.values()}
        split = any(map(shards.is_split, (t for i in indices for t in (*flow.inputs[i], *flow.outputs[i]))))
        alike = len({tuple((path, layout) for path, (_, layout) in by_path.items()) for by_path in rows.values()}) == 1
        own = all(use in indices or _asks_only(use, flow) for tensor in weights for use in flow.uses[tensor])
        large = sum(prod(trace.tensors[tensor].shape) for tensor in weights) >= _WORTHWHILE * total
        allowed = all(demands.may_gather(trace.tensors[tensor].names) for tensor in weights)
        enough = all(chunk(_hidden(trace.calls[i], trace), shards.tp, shards.tp - 1) for i in indices)
        if not weights or split or place in taken or not (alike and own and large and allowed and enough):
            continue
        calls = tuple(_instructions(place, indices, rows[indices[0]], flow))
        result.calls += calls
        result.rows.update(pair for by_path in rows.values() for pair in by_path.values())
        result.how.update(dict.fromkeys(weights, CutOfRecurrent(at_each_step=_network(place[1]).one_step)))
    return result


def _places(trace: Trace) -> dict[tuple[str, str, str], list[int]]:
    """Return the calls of recurrent networks by module, function and place in the code."""
    places: dict[tuple[str, str, str], list[int]] = {}
    for index, call in enumerate(trace.calls):
        network = call_record(call.name).recurrent
        if network is not None and not (network.one_step and call.kwargs):
            places.setdefault((call.module, call.name, call.place), []).append(index)
    return places


def _asks_only(call: int, flow: CallFlow) -> bool:
    """Return whether a call's outputs are never read: recurrent layers look at `weight.data` for its address."""
    outputs = flow.outputs[call]
    return not any(flow.uses[tensor] for tensor in outputs) and flow.final.isdisjoint(outputs)


def _network(function: str) -> Network:
    network = call_record(function).recurrent
    assert network is not None
    return network


def _hidden(call: Call, trace: Trace) -> int:
    """Return the number of hidden units: the widest of the weights has all gates of all of them as rows."""
    rows = [trace.tensors[t].shape[0] for _, t in refs_with_paths(call.args) if _is_matrix(t, trace)]
    return max(rows, default=0) // _network(call.name).gates


def _is_matrix(tensor: int, trace: Trace) -> bool:
    return trace.tensors[tensor].kind == "parameter" and len(trace.tensors[tensor].shape) == 2


def _held(call: Call, trace: Trace, tp: int) -> dict[tuple[object, ...], tuple[int, str]]:
    """Return the weights whose rows are sharded (and biases of a cell), with the layout, by path in the arguments.
    Where the hidden units are indivisible, rows are sharded regardless of gates."""
    hidden, network = _hidden(call, trace), _network(call.name)
    gates = network.gates
    rows: dict[tuple[object, ...], tuple[int, str]] = {}
    for path, tensor in refs_with_paths(call.args):
        info = trace.tensors[tensor]
        cell_bias = network.one_step and info.kind == "parameter" and len(info.shape) == 1 and path[0] in (4, 5)
        if cell_bias or _is_matrix(tensor, trace) and (network.one_step and path[0] in (2, 3) or len(path) == 2):
            gated = info.shape[0] == gates * hidden and gates > 1 and hidden % tp == 0
            rows["args", *path] = (tensor, f"{gates}*{hidden}!" if gated else f"{info.shape[0]}!")
    return rows


def _instructions(
    place: tuple[str, str, str], indices: list[int], layouts: dict[tuple[object, ...], tuple[int, str]], flow: CallFlow
) -> Iterator[CallRewrite]:
    trace, (module, function, where) = flow.trace, place
    runs = Counter(visit.module for visit in trace.visits)[module]
    sometimes = len({trace.calls[index].visit for index in indices}) < runs or module in flow.branching
    site = CallSite(function, where)
    network = _network(function)
    if not network.one_step:
        weights = tuple(HeldRows(path, layout) for path, (_, layout) in layouts.items())
        yield RecurrentCall(module, site, weights=weights, sometimes=sometimes)
    else:
        layout = next(layout for _, layout in layouts.values())
        yield CellCall(module, site, layout, network.gates, network.states, sometimes=sometimes)
