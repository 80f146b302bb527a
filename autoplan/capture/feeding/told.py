"""Propose other states from a failure, the most specific first, each with its reason in words.

Read are the operation that failed with its arguments, the condition that did not hold, the expression that was running
with the values of its names, and the numbers in the message. Each proposal is tried: a wrong one costs a run.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

import torch

from autoplan.capture.feeding.arguments import field_of, of_items
from autoplan.capture.feeding.conditions import asked_by_condition, exact, value_of
from autoplan.capture.feeding.failure import Failure, empty_rest, none_names
from autoplan.capture.feeding.messages import (
    index_outside,
    is_named,
    keys,
    lacks_a_value,
    sizes_differ,
    told_by_message,
    too_small,
)
from autoplan.capture.feeding.resize import larger, of_kind, of_rank, of_vectors, resized
from autoplan.capture.feeding.together import (
    as_many,
    concatenated,
    fitting,
    iterated,
    joined,
    one_each,
)
from autoplan.capture.feeding.wants import MASKS, Path, State, Want
from autoplan.capture.feeding.watch import Demand, is_direct, origin
from autoplan.common.nested import is_record

Proposal = tuple[State, str]
_OF_DICTS = ("items", "keys", "values", "get")
_FEW = 6


def told(failure: Failure) -> Iterator[Proposal]:
    """Yield what the failure suggests, the most specific first."""
    first = (
        _exact,
        _not_built,
        _too_small,
        as_many,
        _other,
        iterated,
        one_each,
        _of_fewer_dims,
        _spread,
        concatenated,
        _consumer,
        fitting,
        _parted,
        _by_position,
    )
    for propose in (*first, _condition, _none, keys, _left_out, told_by_message, _alike):
        why = f"{type(failure.error).__name__}: {failure.first_line[:120]}"
        for state in propose(failure):
            together = state.with_alike_items(failure.state)
            if together != state:
                yield together, why
            yield state, why


def _exact(failure: Failure) -> Iterator[State]:
    dim, index, size = index_outside(failure) or (0, -1, 0)
    for path, leaf in failure.state.among(failure.blamed) if dim > 0 <= index else ():
        if leaf.sizes(failure.state.sizes)[dim : dim + 1] == (size,):  # just long enough for this number
            shape = (*leaf.shape[:dim], index + 1, *leaf.shape[dim + 1 :])
            yield failure.state.with_want(path, dataclasses.replace(leaf, shape=shape))
    yield from exact(failure)


def _not_built(failure: Failure) -> Iterator[State]:
    """Yield states without an optional argument, where its code needs a part that the model was built without."""
    error, called = failure.error, failure.places[-1].expression() if failure.places else None
    absent = isinstance(error, AttributeError) and isinstance(error.obj, torch.nn.Module)
    if isinstance(error, TypeError) and isinstance(called, ast.Call):
        absent = value_of(failure.places[-1], called.func) is None
    if absent:
        for parameter in failure.arguments.optional:
            if failure.state.holds(parameter.name):
                yield failure.state.without(parameter.name)


def _consumer(failure: Failure) -> Iterator[State]:
    """Yield states in which an argument fits the failed operation's weight."""
    demand = failure.demand
    if demand is None:
        return
    state, tensor = failure.state, demand.tensor
    yield from itertools.islice(joined(state, demand), _FEW)
    for path, leaf in state.among(origin(tensor)):
        if demand.kind == "ids":
            yield from _as_ids(state, path, leaf, demand)
            continue
        if demand.kind == "bool" and any("side" in other.shape for _, other in state.leaves()):
            yield from itertools.islice(of_rank(state, path, 3), 1)  # of an image, flattened on the way
        fits = tensor.is_floating_point() or demand.kind == "bool"
        floating = [state] if fits else list(of_kind(state, path, "float"))
        for floats in floating:
            yield from _sized(floats, path, demand)
        if not fits:
            yield from floating


def _other(failure: Failure) -> Iterator[State]:
    """Yield states with an optional argument, where a layer got what other layers computed and it does not fit."""
    demand = failure.demand
    for parameter in failure.arguments.optional[:4] if demand is not None and not is_direct(demand.tensor) else ():
        if not failure.state.holds(parameter.name):
            for want in failure.arguments.usual(parameter):
                if want.is_tensor:
                    yield failure.state.with_want((parameter.name,), want)
                    break


def _too_small(failure: Failure) -> Iterator[State]:
    """Yield states with larger sizes, if the message says that one is too small."""
    if too_small(failure):
        yield from larger(failure.state, failure.paths)


def _of_fewer_dims(failure: Failure) -> Iterator[State]:
    """Yield states for an addend with too few dims: it has as many as the other, say a time for each state."""
    call = failure.watch.failed
    operands = list(call.tensors()) if call is not None and sizes_differ(failure) else []
    ranks = {tensor.dim() for tensor in operands}
    if len(operands) != 2 or len(ranks) != 2 or 0 in ranks:
        return
    lower = min(operands, key=torch.Tensor.dim)
    for path, leaf in failure.state.among(origin(lower)):
        if leaf.kind == "ids" or is_direct(lower) and lower.dim() > len(leaf.shape):  # unsqueezed on the way
            yield from of_rank(failure.state, path, len(leaf.shape) + max(ranks) - min(ranks))


def _spread(failure: Failure) -> Iterator[State]:
    """Yield states for a mask that fits one value and not the next, with a size of one where they differ."""
    call = failure.watch.failed
    operands = list(call.tensors()) if call is not None and sizes_differ(failure) else []
    for mask, other in zip(operands, reversed(operands), strict=True) if len(operands) == 2 else ():
        for path, leaf in failure.state.among(origin(mask)):
            if leaf.kind in MASKS and is_direct(mask) and len(leaf.shape) == mask.dim() == other.dim() > 2:
                pairs = enumerate(zip(mask.shape, other.shape, strict=True))
                for dim in (dim for dim, (size, wanted) in pairs if size != wanted):
                    yield failure.state.with_want(
                        path, replace(leaf, shape=(*leaf.shape[:dim], 1, *leaf.shape[dim + 1 :]))
                    )


def _as_ids(state: State, path: Path, leaf: Want, demand: Demand) -> Iterator[State]:
    if leaf.kind == "ids" and leaf.below == demand.below and len(leaf.shape) < 3:
        return
    if leaf.kind in ("float", "whole") and not demand.tensor.is_floating_point():  # columns of features and of ids
        yield from of_kind(state, path, "whole", int(demand.below))
    shapes = [leaf.shape] if len(leaf.shape) <= 2 else []
    for shape in dict.fromkeys([*shapes, ("batch", "length"), ("batch",)]):
        yield state.with_want(path, replace(leaf, kind="ids", below=demand.below, shape=shape))


def _sized(state: State, path: Path, demand: Demand) -> Iterator[State]:
    """Yield states with the right number of dims first, then with the right sizes."""
    tensor, leaf = demand.tensor, state.at(path)
    assert leaf is not None
    channels = next((size for _, size in demand.sizes), 0)
    if demand.ranks and tensor.dim() not in demand.ranks:
        for rank in sorted(demand.ranks, key=lambda rank: abs(rank - tensor.dim())):
            yield from of_rank(state, path, len(leaf.shape) + rank - tensor.dim(), channels)
    if is_direct(tensor) and not tensor.is_floating_point():  # integers were a guess, and so was their shape
        for rank in demand.ranks[:1]:
            yield from of_rank(state, path, rank, channels)
    for dim, size in demand.sizes:
        if -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] != size:
            if is_direct(tensor) and tuple(tensor.shape) == leaf.sizes(state.sizes):
                yield from state.with_dim(path, dim % tensor.dim(), size)
            yield from resized(state, (path,), tensor.shape[dim], size)
    if is_direct(tensor) and len(leaf.shape) < tensor.dim() in demand.ranks:  # unsqueezed on the way
        yield from of_rank(state, path, tensor.dim(), channels)
    if is_direct(tensor) and tuple(tensor.shape) != leaf.sizes(state.sizes):  # reshaped on the way
        for rank in (len(leaf.shape) - 1, len(leaf.shape) + 1):
            if rank >= 2:
                yield from of_rank(state, path, rank, channels)
                yield from of_rank(state, path, rank)
    if is_direct(tensor) and len(leaf.shape) in (2, 3) and demand.spatial is None:
        for rank in demand.ranks:
            yield from of_rank(state, path, rank, channels)


def _condition(failure: Failure) -> Iterator[State]:
    for place in reversed(failure.places[-3:]):
        yield from asked_by_condition(place, failure.state)
        test = place.condition()
        if test is None:
            continue
        for name in [n.id for n in ast.walk(test) if isinstance(n, ast.Name)]:
            if name in place.frame.f_locals and place.value(name) is None:
                yield from _given(failure, name)
        return


def _none(failure: Failure) -> Iterator[State]:
    """Yield states with a value for what is None: the argument of that name, or one that may have become it."""
    if not lacks_a_value(failure):
        return
    names = [name for place in reversed(failure.places) for name in none_names(place)]
    names += [word for place in failure.places[-1:] for word in re.findall(r"\w+", place.text)]
    for name in dict.fromkeys(names):
        yield from _given(failure, name)
    yield from _fields(failure, set(names))
    for parameter in failure.arguments.optional:
        yield from _given(failure, parameter.name, most=2)


def _fields(failure: Failure, names: set[str]) -> Iterator[State]:
    """Yield states with optional fields of a record that the failed line names."""
    words = {word for place in failure.places[-2:] for word in re.findall(r"\w+", place.text)} | names
    for name, want in failure.state.wants:
        if want.kind == "record" and want.value is not None:
            for entry in dataclasses.fields(want.value):
                if entry.name in words and entry.name not in dict(want.items):
                    yield _with_item(failure, (name,), entry.name, want)


def _given(failure: Failure, name: str, most: int = 6) -> Iterator[State]:
    parameter = failure.arguments.find(name)
    if parameter is None:
        return
    for place, want in enumerate(failure.arguments.usual(parameter)):
        if place >= most:
            return
        now = dict(failure.state.wants).get(parameter.name)
        if want.kind != "none" and (now is None or now.kind == "none"):
            yield failure.state.with_want((parameter.name,), want)


def _by_position(failure: Failure) -> Iterator[State]:
    """Yield a state whose arguments are passed by position, for a wrapper that reads `args[0]`."""
    for rest in empty_rest(failure.places[-1:]) if isinstance(failure.error, IndexError) else ():
        if failure.arguments.find(rest) is None:
            items = tuple(enumerate(want for _, want in failure.state.wants))
            yield replace(failure.state, wants=((f"*{rest}", Want("list", value=tuple, items=items)),))


def _parted(failure: Failure) -> Iterator[State]:
    """Yield states for `a, b, c = batch`, a sequence of what the names say, and for `batch.x`, a record with an x."""
    for place in failure.places[-1:]:
        statement = place.statement()
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Name):
            continue
        targets = statement.targets[0]
        if isinstance(targets, ast.Tuple | ast.List) and not any(isinstance(n, ast.Starred) for n in targets.elts):
            names = [re.sub(r"\W+", "_", ast.unparse(element)).strip("_") for element in targets.elts]
            items = of_items("dict", {name: field_of(None, name or "x") for name in names}, failure.model).items
            for path in _held(failure, place.value(statement.value.id), statement.value.id):
                want = Want("list", items=tuple((at, want) for at, (_, want) in enumerate(items)))
                yield failure.state.with_want(path, want)
    if isinstance(failure.error, AttributeError) and failure.error.name:
        name = failure.error.name
        for path in _held(failure, failure.error.obj, ""):
            record = dict(failure.state.wants).get(str(path[0])) if len(path) == 1 else None
            if name in _OF_DICTS:
                yield failure.state.with_want(path, Want("dict"))
            elif record is not None and record.kind == "record":
                yield _with_item(failure, path, name, record)
            elif isinstance(failure.error.obj, torch.Tensor | list):
                yield failure.state.with_want(path, of_items("record", {name: field_of(None, name)}, failure.model))


def _with_item(failure: Failure, path: Path, name: str, held: Want) -> State:
    """Return the state with one more item of a record. The other items are derived again if edges bring in nodes."""
    current = {key: want for key, want in held.items if isinstance(key, str)}
    fields = {key: field_of(held.value, key) for key in (*current, name)}
    record = of_items("record", fields, failure.model, held.value)
    if dict(record.items).keys() == current.keys():
        return failure.state
    unchanged = {} if "nodes" in str(record) and "nodes" not in str(held) else current
    items = tuple((key, unchanged.get(str(key), want)) for key, want in record.items)
    return failure.state.with_want(path, replace(record, items=items))


def _held(failure: Failure, value: object, name: str) -> Iterator[Path]:
    """Yield the argument that a value is: by its origin, by its name, or since no other is of that kind."""
    wants = dict(failure.state.wants)
    if isinstance(value, torch.Tensor):
        yield from (path for path in origin(value) if is_direct(value) and failure.state.at(path) is not None)
    elif name in wants:
        yield (name,)
    elif is_record(value) or isinstance(value, list):
        yield from ((key,) for key, want in wants.items() if want.kind in ("record", "list"))


def _alike(failure: Failure) -> Iterator[State]:
    """Yield states in which an argument equals one with a similar name: x_enc and x_dec, hidden_h and hidden_c."""
    leaves = dict(failure.state.leaves())
    for path in failure.paths[:3]:
        words = set(re.findall(r"[a-z0-9]+", str(path[-1]).lower()))
        near = [(len(words & set(re.findall(r"[a-z0-9]+", str(p[-1]).lower()))), p) for p in leaves if p != path]
        for shared, other in sorted(near, key=lambda pair: -pair[0])[:2]:
            if shared and leaves[other] != leaves[path]:
                yield failure.state.with_want(path, leaves[other])


def _left_out(failure: Failure) -> Iterator[State]:
    """Yield states with values for optional arguments that are None and named in the running lines."""
    names = [name for place in reversed(failure.places) for name in none_names(place)]
    for name in dict.fromkeys([*names, *empty_rest(failure.places)]):
        yield from _given(failure, name, most=3)


def usually(failure: Failure) -> Iterator[Proposal]:
    """Yield what such arguments usually are: the blamed ones, the others, then optional ones that the message names."""
    arguments = failure.arguments
    for rank in (3, 2):
        yield from ((state, "vectors or sequences of them") for state in of_vectors(failure.state, rank))
    tops = list(dict.fromkeys(str(path[0]) for path in failure.paths))
    names = (*tops, *(name for name, _ in failure.state.wants if name not in tops))
    parameters = [arguments.find(name) or field_of(None, name) for name in names]
    usual_of = [arguments.usual(parameter, parameter in arguments.required[:1]) for parameter in parameters]
    for together in itertools.zip_longest(*usual_of):  # the likeliest of each, then the next
        for number, (parameter, want) in enumerate(zip(parameters, together, strict=True)):
            if want is not None and want != dict(failure.state.wants).get(parameter.name):
                why = f"{'it' if number == 0 else 'such'} is usually so"
                yield failure.state.with_want((parameter.name,), want), why
    for parameter in arguments.optional:
        if not failure.state.holds(parameter.name) and is_named(failure, parameter.name):
            for want in list(arguments.usual(parameter))[:3]:
                yield failure.state.with_want((parameter.name,), want), "the message names it"
    yield from ((state, "larger") for state in larger(failure.state, failure.paths))
