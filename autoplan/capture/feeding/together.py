"""Relate arguments to each other and to what the model computes: joined, added, iterated together, looked up.

Here the shape of one tensor gives that of another; the failed operation alone shows only that they differ.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from autoplan.capture.feeding.arguments import FLAT, of_nodes
from autoplan.capture.feeding.failure import Failure
from autoplan.capture.feeding.messages import index_outside, sizes_differ, unpacked
from autoplan.capture.feeding.resize import of_rank, of_shape, resized
from autoplan.capture.feeding.wants import BATCH, Path, State, Want
from autoplan.capture.feeding.watch import Demand, FailedCall, is_direct, origin
from autoplan.ops import call_record
from autoplan.ops.indexing import takes_bags, takes_targets
from autoplan.ops.pieces import joins
from autoplan.ops.reductions import compares

MOST_PARTS = 12  # most items that a list is given
_ELEMENTWISE = re.compile(r"^_*[ri]?(add|sub|mul|div|truediv|maximum|minimum|lerp|where)_*$")


def iterated(failure: Failure) -> Iterator[State]:
    """Yield a state in which all arguments that are iterated over are lists, since they are iterated together; first
    one in which an argument whose rows index others, `i, j = edges`, holds edges of a graph."""
    state = failure.state
    for path in failure.watch.iterated:
        leaf = state.at(path)
        if leaf is None or len(path) > 1 or "edges" in leaf.shape:
            continue
        if path in failure.watch.linking:
            wants = {name: want if (name,) in failure.watch.rows else FLAT for name, want in state.wants}
            nodes = {name: of_nodes(want) for name, want in wants.items()}
            nodes[str(path[0])] = Want("ids", (2, "edges"), "nodes")
            yield replace(state, wants=tuple(nodes.items()))
        if len(leaf.shape) > 1:
            state = state.with_want(path, Want("list", items=((0, leaf), (1, leaf))))
    if state != failure.state:
        yield state


def as_many(failure: Failure) -> Iterator[State]:
    """Yield states whose lists (levels of a pyramid) are as long as a failed operation, an unpacking or an index needs;
    all equally long."""
    state, call = failure.state, failure.watch.failed
    shapes = [tuple(tensor.shape) for tensor in call.tensors()] if call is not None and sizes_differ(failure) else []
    lengths = {len(parts.items) for _, parts in _lists(state)}
    pairs = [pair for a, b in itertools.permutations(shapes, 2) for pair in zip(reversed(a), reversed(b), strict=False)]
    pairs += [(have, have + 1) for have in lengths if isinstance(failure.error, IndexError)]
    pairs += [(have, needed[0]) for have in lengths if (needed := unpacked(failure))]
    demand = failure.demand if lengths else None  # of what is joined from the items
    tensor: Any = demand.tensor if demand is not None else None
    for dim, size in demand.sizes if demand is not None else ():
        if -tensor.dim() <= dim < tensor.dim() and (have := tensor.shape[dim]):
            pairs += [(length, size * length // have) for length in lengths if size * length % have == 0]
    modules = {len(own) for own in failure.model.modules() if isinstance(own, torch.nn.ModuleList)}
    pairs += [(have, count) for have in lengths for count in sorted(modules - lengths)]  # iterated beside modules
    for path, leaf in state.among(failure.blamed if (index_outside(failure) or (1,))[0] == 0 else ()):
        if leaf.is_tensor and leaf.shape[:1] == (BATCH,) and len(leaf.shape) > 1:  # a row for each of them
            rows = (count for count in sorted(modules) if count > leaf.sizes(state.sizes)[0])
            yield from (state.with_want(path, replace(leaf, shape=(n, BATCH, *leaf.shape[2:]))) for n in rows)
    for have, want in pairs:
        if have != want and have in lengths:
            yield from longer(state, want)


def longer(state: State, length: int = 0) -> Iterator[State]:
    """Yield a state whose lists are as long, or have one item more."""
    lists = _lists(state)
    length = length or max((len(parts.items) for _, parts in lists), default=0) + 1
    for path, parts in lists:
        items = tuple((place, dict(parts.items).get(place, parts.items[0][1])) for place in range(length))
        state = state.with_want(path, replace(parts, items=items))
    if lists and 1 <= length <= MOST_PARTS:
        yield state


def _lists(state: State) -> list[tuple[Path, Want]]:
    """Return the lists whose length is a guess; an annotation fixes that of a tuple."""
    lists = [(path, want) for path, want in state.holding("list") if want.items]
    return [(path, want) for path, want in lists if want.value is None or "*" in str(path[0])]


def joined(state: State, demand: Demand) -> Iterator[State]:
    """Yield states that resize one of several joined arguments so that the total fits: first those whose width is a
    guess, then those whose width a layer has demanded."""
    tensor = demand.tensor
    paths = sorted(origin(tensor), key=lambda path: (leaf := state.at(path)) is None or "width" not in leaf.shape)
    for dim, size in demand.sizes if len(paths) > 1 else ():
        if -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] != size:
            for path, leaf in state.among(paths):  # pictures are joined along their channels
                if len(leaf.shape) == tensor.dim() > 3:
                    own = leaf.sizes(state.sizes)[dim] + size - tensor.shape[dim]
                    yield from state.with_dim(path, dim % tensor.dim(), own)
            yield from resized(state, paths, tensor.shape[dim], size)


def fitting(failure: Failure) -> Iterator[State]:
    """Yield states in which an addend gets the other's shape, targets one number per id, and offsets are ordered."""
    call = failure.watch.failed
    if call is None:
        return
    op = call_record(call.name)
    if takes_targets(call.name):
        yield from _targets(failure.state, call)
    elif takes_bags(op.becomes):
        for path in origin(call.get(2, "offsets")):
            if (leaf := failure.state.at(path)) is not None and leaf.kind != "positions":
                yield failure.state.with_want(path, replace(leaf, kind="positions"))
    elif _ELEMENTWISE.match(call.name) or compares(call.name):
        tensors = [tensor for tensor in call.tensors() if tensor.dim()]
        for tensor, table in itertools.permutations(tensors, 2):
            yield from _without_positions(failure.state, tensor, table)
        for tensor, other in itertools.permutations(tensors, 2):
            yield from _alike(failure.state, tensor, other)


def _targets(state: State, call: FailedCall) -> Iterator[State]:
    ids = [leaf.shape for _, leaf in state.leaves() if leaf.kind == "ids"]
    for path, leaf in state.among(origin(call.get(1, "target"))):
        for shape in dict.fromkeys(ids):
            yield state.with_want(path, replace(leaf, kind="ids", shape=shape))


def _without_positions(state: State, tensor: torch.Tensor, kept: torch.Tensor) -> Iterator[State]:
    """Yield a state whose arguments have positions: a table in the model has a row for each, and no batch."""
    rows = kept.shape[0]
    if not origin(kept) and len(origin(tensor)) > 1 and tensor.dim() == kept.dim() == 2 and 1 < rows != tensor.shape[0]:
        leaves = [(path, leaf) for path, leaf in state.among(origin(tensor)) if leaf.shape[:1] == (BATCH,)]
        for path, leaf in leaves:
            state = state.with_want(path, replace(leaf, shape=(BATCH, rows, *leaf.shape[1:])))
        if leaves:
            yield state


def _alike(state: State, tensor: torch.Tensor, made: torch.Tensor) -> Iterator[State]:
    """Yield states in which an argument has the sizes of what the model computed beside it."""
    if set(origin(tensor)) & set(origin(made)) or tensor.dim() > made.dim() and is_direct(made):
        return
    own = ([1] * made.dim() + list(tensor.shape))[-made.dim() :]
    sizes = [size if size > 1 else mine for size, mine in zip(made.shape, own, strict=True)]
    more = tensor.dim() - made.dim() if not origin(made) else 0  # a weight or buffer has no batch dim
    yield from of_shape(state, tensor, [*tensor.shape[: max(more, 0)], *sizes])


# Concatenations of arguments and of what layers computed from them.
#
# The parts have equally many dims, and the same sizes in all but one. Vectors are concatenated along their last dim; if
# they were passed as sequences, that dim is the length.


def concatenated(failure: Failure) -> Iterator[State]:
    """Yield states for a failed concatenation or stack: the odd part changes first, arguments before computed parts."""
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
    if among or _takes(failure.model, sum(part.shape[-1] for part in parts)):
        yield from vectors
    parts.sort(key=lambda part: (ranks.count(part.dim()), not is_direct(part)))
    for part, other in itertools.permutations(parts, 2):
        if part.dim() != other.dim():
            yield from _changed(state, origin(part), other.dim() - part.dim())
            for path, leaf in state.among(origin(part)):  # columns of one, which the model would have squeezed
                extra, now = {*part.shape} - {*other.shape}, leaf.sizes(state.sizes)
                shape = tuple(1 if dim and now[dim] in extra else size for dim, size in enumerate(leaf.shape))
                yield state.with_want(path, replace(leaf, shape=shape))
        elif -part.dim() <= dim < part.dim():
            sizes = list(other.shape)
            sizes[dim] = part.shape[dim]
            yield from of_shape(state, part, sizes)
    yield from vectors


def one_each(failure: Failure) -> Iterator[State]:
    """Yield states with one id in place of a sequence of ids: a layer got too much by some rows of one length, or too
    little by the number of lookups."""
    demand = failure.demand
    if demand is None:
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
    """Return whether a weight of the model takes vectors of that width."""
    return any(weight.dim() == 2 and weight.shape[1] == width for weight in model.parameters())


def _changed(state: State, paths: Iterable[Path], more: int) -> Iterator[State]:
    """Yield states with `more` dims at these paths: all of them together, then each alone."""
    paths, together = list(dict.fromkeys(paths)), state
    for path in paths:
        together = next(_with_dims(together, path, more), together)
    alone = itertools.chain.from_iterable(_with_dims(state, path, more) for path in paths)
    yield from (other for other in (together, *alone) if other != state)


def _with_dims(state: State, path: Path, more: int) -> Iterator[State]:
    leaf = state.at(path)
    if leaf is None:
        return
    if more == -1 and "length" in leaf.shape:
        at = leaf.shape.index("length")
        yield state.with_want(path, replace(leaf, shape=(*leaf.shape[:at], *leaf.shape[at + 1 :])))
    if more and len(leaf.shape) + more > 0:
        yield from itertools.islice(of_rank(state, path, len(leaf.shape) + more), 2)
