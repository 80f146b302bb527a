"""What arguments are to each other and to what the model makes: joined, added, gone through together, looked up.

Here the shape of one thing tells that of another, where the failed operation alone tells only that they differ.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import prod

import torch

from autoplan.capture.feeding.arguments import Arguments
from autoplan.capture.feeding.failure import Failure
from autoplan.capture.feeding.messages import sizes_differ
from autoplan.capture.feeding.resize import of_rank, of_shape, resized
from autoplan.capture.feeding.wants import BATCH, Path, State, Want
from autoplan.capture.feeding.watch import Demand, FailedCall, demand_of, is_direct, origin
from autoplan.ops import call_record
from autoplan.ops.indexing import takes_bags, takes_targets
from autoplan.ops.pieces import joins
from autoplan.ops.records.answers import Shows
from autoplan.ops.records.sizes import SHAPE
from autoplan.ops.reductions import compares

_MOST_PARTS = 12  # of a list
_TABLES = (("batch", "length"), ("batch", "length", "length"), ("length", "length"))  # of positions, of their pairs
_ELEMENTWISE = re.compile(r"^_*[ri]?(add|sub|mul|div|truediv|maximum|minimum|lerp|where)_*$")


def iterated(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """What is gone through one by one is a list: all of them that are, since they are gone through together."""
    state = failure.state
    for path in failure.watch.iterated:
        leaf = state.at(path)
        if leaf is not None and len(path) == 1 and len(leaf.shape) > 1:
            state = state.with_want(path, Want("list", items=((0, leaf), (1, leaf))))
    if state != failure.state:
        yield state


def as_many(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """Of so many parts as a list has there were to be another number: levels of a pyramid. All lists are as long."""
    state, call = failure.state, failure.watch.failed
    shapes = [tuple(tensor.shape) for tensor in call.tensors()] if call is not None and sizes_differ(failure) else []
    lists = [(path, want) for path, want in state.holding("list") if want.items and want.value is not tuple]
    for ours, theirs in itertools.permutations(shapes, 2):
        for have, want in zip(reversed(ours), reversed(theirs), strict=False):
            if 1 < want <= _MOST_PARTS and have != want and any(len(one.items) == have for _, one in lists):
                longer = state
                for path, one in lists:
                    items = tuple((place, dict(one.items).get(place, one.items[0][1])) for place in range(want))
                    longer = longer.with_want(path, replace(one, items=items))
                yield longer


def joined(state: State, demand: Demand) -> Iterator[State]:
    """Of several arguments that were joined, the one for which the numbers come out: first those whose width is a
    guess, then those of which a layer has asked for it."""
    tensor = demand.tensor
    paths = sorted(origin(tensor), key=lambda path: (leaf := state.at(path)) is None or "width" not in leaf.shape)
    for dim, size in demand.sizes if len(paths) > 1 else ():
        if -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] != size:
            yield from resized(state, paths, tensor.shape[dim], size)


def fitting(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """What is added to something has its shape; targets are one for each id; offsets are in order."""
    call = failure.watch.failed
    if call is None:
        return
    known = call_record(call.name)
    if takes_targets(call.name):
        yield from _targets(failure.state, call)
    elif known.sizes == SHAPE and known.shows is Shows.RESHAPED:
        yield from _viewed(failure.state, call)
    elif takes_bags(known.becomes):
        for path in origin(call.get(2, "offsets")):
            if (leaf := failure.state.at(path)) is not None and leaf.kind != "positions":
                yield failure.state.with_want(path, replace(leaf, kind="positions"))
    elif _ELEMENTWISE.match(call.name) or compares(call.name):
        given = [tensor for tensor in call.tensors() if tensor.dim()]
        for tensor, kept in itertools.permutations(given, 2):
            yield from _without_positions(failure.state, tensor, kept)
        for tensor, made in itertools.permutations(given, 2):
            yield from _fewer_dims(failure.state, tensor, made)
        for tensor, made in itertools.permutations(given, 2):
            yield from _alike(failure.state, tensor, made)


def _targets(state: State, call: FailedCall) -> Iterator[State]:
    ids = [leaf.shape for _, leaf in state.leaves() if leaf.kind == "ids"]
    for path, leaf in state.among(origin(call.get(1, "target"))):
        for shape in dict.fromkeys(ids):
            yield state.with_want(path, replace(leaf, kind="ids", shape=shape))


def _viewed(state: State, call: FailedCall) -> Iterator[State]:
    """An argument itself is viewed: it has as many numbers as the view, one for each position or each pair of them."""
    tensor = call.get(0, "input")
    sizes = [size for part in call.args[1:] for size in (part if isinstance(part, list | tuple) else (part,))]
    path = next(iter(origin(tensor)), None)
    leaf = state.at(path) if path is not None and is_direct(tensor) else None
    if path is None or leaf is None or not sizes or any(type(size) is not int or size < 1 for size in sizes):
        return
    for shape in _TABLES:
        if prod(state.sizes[name] for name in shape) == prod(sizes):
            yield state.with_want(path, replace(leaf, shape=shape))


def _without_positions(state: State, tensor: torch.Tensor, kept: torch.Tensor) -> Iterator[State]:
    """A table that the model keeps has a row for each position, and no batch: all that it is added to has positions."""
    rows = kept.shape[0]
    if not origin(kept) and len(origin(tensor)) > 1 and tensor.dim() == kept.dim() == 2 and 1 < rows != tensor.shape[0]:
        leaves = [(path, leaf) for path, leaf in state.among(origin(tensor)) if leaf.shape[:1] == (BATCH,)]
        for path, leaf in leaves:
            state = state.with_want(path, replace(leaf, shape=(BATCH, rows, *leaf.shape[1:])))
        if leaves:
            yield state


def _fewer_dims(state: State, tensor: torch.Tensor, made: torch.Tensor) -> Iterator[State]:
    """What layers made of an argument has more dims than what it is added to: so has the argument."""
    for path in origin(tensor) if not is_direct(tensor) and tensor.dim() > made.dim() > 1 else ():
        if (leaf := state.at(path)) is not None:
            yield from of_rank(state, path, len(leaf.shape) + made.dim() - tensor.dim())


def _alike(state: State, tensor: torch.Tensor, made: torch.Tensor) -> Iterator[State]:
    """An argument beside what the model made: its dims are those there."""
    if set(origin(tensor)) & set(origin(made)) or tensor.dim() > made.dim() and is_direct(made):
        return
    own = ([1] * made.dim() + list(tensor.shape))[-made.dim() :]
    sizes = [size if size > 1 else mine for size, mine in zip(made.shape, own, strict=True)]
    more = tensor.dim() - made.dim() if not origin(made) else 0  # what the model keeps is the same for all of a batch
    yield from of_shape(state, tensor, [*tensor.shape[: max(more, 0)], *sizes])


# What is concatenated: arguments, and what layers made of them, beside each other.
#
# Parts of a concatenation have as many dims as each other, and the same sizes but at one. Vectors are concatenated
# along their last dim; where they were given as sequences, that dim is the length.


def concatenated(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """A concatenation failed: the part that is unlike the others changes first, and an argument before what layers
    made."""
    call = failure.watch.failed
    if call is None or not joins(call.name) or not isinstance(call.get(0, "tensors"), list | tuple):
        return
    parts = [part for part in call.get(0, "tensors") if isinstance(part, torch.Tensor) and part.dim()]
    dim = call.get(1, "dim")
    dim = dim if isinstance(dim, int) else 0
    if len(parts) < 2:
        return
    state, ranks = failure.state, [part.dim() for part in parts]
    vectors: list[State] = []
    if len(set(ranks)) == 1 and dim % ranks[0] == ranks[0] - 2:
        vectors += _changed(state, [path for part in parts for path in origin(part)], -1)
        vectors += _changed(state, [path for path, leaf in state.leaves() if len(leaf.shape) > 2], -1)
    others = [leaf.shape for path, leaf in state.leaves() if path not in failure.blamed]
    among = any(shape[:-1] == (BATCH,) and shape[-1] != "length" for shape in others)
    if among or _takes(model, sum(part.shape[-1] for part in parts)):
        yield from vectors
    parts.sort(key=lambda part: (ranks.count(part.dim()), not is_direct(part)))
    for part, other in itertools.permutations(parts, 2):
        if part.dim() != other.dim():
            yield from _changed(state, origin(part), other.dim() - part.dim())
        elif -part.dim() <= dim < part.dim():
            sizes = list(other.shape)
            sizes[dim] = part.shape[dim]
            yield from of_shape(state, part, sizes)
    yield from vectors


def one_each(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """A layer got too much by some rows of one length, or too little by how many were looked up: what was given as
    sequences of ids may be one id each."""
    call = failure.watch.failed
    demand = demand_of(call) if call is not None else None
    if demand is None or not isinstance(demand.tensor, torch.Tensor):
        return
    state, tensor = failure.state, demand.tensor
    leaves = {path: leaf for path in origin(tensor) if (leaf := state.at(path)) is not None}
    sequences = [path for path, leaf in leaves.items() if leaf.kind == "ids" and len(leaf.shape) == 2]
    for dim, size in demand.sizes:
        have = tensor.shape[dim] if -tensor.dim() <= dim < tensor.dim() else size
        if len(sequences) > 1 and have * len(sequences) == size:
            yield from _changed(state, sequences, -1)
        for path in sequences if have > size else ():
            rows = leaves[path].sizes(state.sizes)[1] - 1
            if rows and (have - size) % rows == 0:
                yield from _changed(state, (path,), -1)


def _takes(model: torch.nn.Module, width: int) -> bool:
    """Does a weight of the model take vectors of that width?"""
    return any(weight.dim() == 2 and weight.shape[1] == width for weight in model.parameters())


def _changed(state: State, paths: Iterable[Path], more: int) -> Iterator[State]:
    """With so many dims more or fewer: all of them together, then each alone."""
    paths, together = list(dict.fromkeys(paths)), state
    for path in paths:
        together = next(_with_dims(together, path, more), together)
    alone = itertools.chain.from_iterable(_with_dims(state, path, more) for path in paths)
    yield from (one for one in (together, *alone) if one != state)


def _with_dims(state: State, path: Path, more: int) -> Iterator[State]:
    leaf = state.at(path)
    if leaf is None:
        return
    if more == -1 and "length" in leaf.shape:
        at = leaf.shape.index("length")
        yield state.with_want(path, replace(leaf, shape=(*leaf.shape[:at], *leaf.shape[at + 1 :])))
    if more and len(leaf.shape) + more > 0:
        yield from itertools.islice(of_rank(state, path, len(leaf.shape) + more), 2)
