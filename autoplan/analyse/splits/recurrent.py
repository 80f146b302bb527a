"""Recurrent networks whose weights stayed whole: their rows in shards, each gate cut by hidden unit.

A step needs all of the state before it: the hidden units are the columns of one weight and the rows of the same, so no
axis can be split. But the rows alone can lie in shards, where something is gathered. One call of all steps (`nn.LSTM`)
gets its weights gathered and runs whole, in its own kernel: a state gathered at each step would be as many waits as
there are steps, and no kernel. Where the model's Python makes the steps (`nn.LSTMCell`), a rank computes its hidden
units, and the new state, much less than the weights, is gathered each time.

Nothing else is touched: what goes in and comes out is whole, as analysis found it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from math import prod

from autoplan.analyse.placement.callflow import CallFlow
from autoplan.analyse.shards import Shards
from autoplan.analyse.splits.requests import Demands
from autoplan.common.layout import chunk
from autoplan.ops import call_record
from autoplan.ops.records.answers import Recurrent as Network
from autoplan.values import Call, CallRewrite, CallSite, CellCall, HeldRows, RecurrentCall, Trace, refs_with_paths
from autoplan.values.reasons import CutOfRecurrent

__all__ = ["Recurrent", "recurrent"]

_WORTHWHILE = 0.004  # of all matrix elements: fewer are not worth a gather


@dataclass
class Recurrent:
    """The layout of the rows of each weight, and the calls that know of them."""

    rows: dict[int, str] = field(default_factory=dict)
    how: dict[int, CutOfRecurrent] = field(default_factory=dict)
    calls: tuple[CallRewrite, ...] = ()


def recurrent(shards: Shards, flow: CallFlow, scoped: Collection[CallRewrite], demands: Demands) -> Recurrent:
    """What can be done at the calls of recurrent networks in which nothing is split."""
    trace, found = shards.trace, Recurrent()
    known = {(one.pattern, one.site.function, one.site.place) for one in scoped}
    total = sum(prod(info.shape) for info in trace.tensors if info.kind == "parameter" and len(info.shape) >= 2)
    for place, indices in _places(trace).items():
        held = {index: _held(trace.calls[index], trace, shards.tp) for index in indices}
        weights = {tensor for one in held.values() for tensor, _ in one.values()}
        split = any(map(shards.is_split, (t for i in indices for t in (*flow.inputs[i], *flow.outputs[i]))))
        alike = len({tuple((path, layout) for path, (_, layout) in one.items()) for one in held.values()}) == 1
        own = all(use in indices or _asks_only(use, flow) for tensor in weights for use in flow.uses[tensor])
        large = sum(prod(trace.tensors[tensor].shape) for tensor in weights) >= _WORTHWHILE * total
        allowed = all(demands.may_gather(trace.tensors[tensor].names) for tensor in weights)
        enough = all(chunk(_hidden(trace.calls[i], trace), shards.tp, shards.tp - 1) for i in indices)
        if not weights or split or place in known or not (alike and own and large and allowed and enough):
            continue
        calls = tuple(_instructions(place, indices, held[indices[0]], flow))
        found.calls += calls
        found.rows.update(pair for one in held.values() for pair in one.values())
        found.how.update(dict.fromkeys(weights, CutOfRecurrent(at_each_step=_network(place[1]).one_step)))
    return found


def _places(trace: Trace) -> dict[tuple[str, str, str], list[int]]:
    """The calls of recurrent networks by module, function and place in the code."""
    places: dict[tuple[str, str, str], list[int]] = {}
    for index, call in enumerate(trace.calls):
        network = call_record(call.name).recurrent
        if network is not None and not (network.one_step and call.kwargs):
            places.setdefault((call.module, call.name, call.place), []).append(index)
    return places


def _asks_only(call: int, flow: CallFlow) -> bool:
    """Does nobody read what a call makes? (Recurrent layers look at `weight.data` to learn where it lies.)"""
    made = flow.outputs[call]
    return not any(flow.uses[tensor] for tensor in made) and flow.final.isdisjoint(made)


def _network(function: str) -> Network:
    network = call_record(function).recurrent
    assert network is not None
    return network


def _hidden(call: Call, trace: Trace) -> int:
    """How many hidden units it has: the widest of its weights has all gates of all of them as rows."""
    rows = [trace.tensors[t].shape[0] for _, t in refs_with_paths(call.args) if _is_matrix(t, trace)]
    return max(rows, default=0) // _network(call.name).gates


def _is_matrix(tensor: int, trace: Trace) -> bool:
    return trace.tensors[tensor].kind == "parameter" and len(trace.tensors[tensor].shape) == 2


def _held(call: Call, trace: Trace, tp: int) -> dict[tuple[object, ...], tuple[int, str]]:
    """By path in the arguments: the weights whose rows lie in shards (of a cell its biases too), with the layout.

    Where the hidden units do not divide, rows are cut wherever a rank's part ends.
    """
    hidden, network = _hidden(call, trace), _network(call.name)
    gates = network.gates
    found: dict[tuple[object, ...], tuple[int, str]] = {}
    for path, tensor in refs_with_paths(call.args):
        info = trace.tensors[tensor]
        cell_bias = network.one_step and info.kind == "parameter" and len(info.shape) == 1 and path[0] in (4, 5)
        if cell_bias or _is_matrix(tensor, trace) and (network.one_step and path[0] in (2, 3) or len(path) == 2):
            gated = info.shape[0] == gates * hidden and gates > 1 and hidden % tp == 0
            found["args", *path] = (tensor, f"{gates}*{hidden}!" if gated else f"{info.shape[0]}!")
    return found


def _instructions(
    place: tuple[str, str, str],
    indices: list[int],
    held: dict[tuple[object, ...], tuple[int, str]],
    flow: CallFlow,
) -> Iterator[CallRewrite]:
    trace, (module, function, where) = flow.trace, place
    runs = Counter(visit.module for visit in trace.visits)[module]
    sometimes = len({trace.calls[index].visit for index in indices}) < runs or module in flow.branching
    site = CallSite(function, where)
    network = _network(function)
    if not network.one_step:
        weights = tuple(HeldRows(path, layout) for path, (_, layout) in held.items())
        yield RecurrentCall(module, site, weights=weights, sometimes=sometimes)
    else:
        layout = next(layout for _, layout in held.values())
        yield CellCall(module, site, layout, network.gates, network.states, sometimes=sometimes)
