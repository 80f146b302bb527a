"""What is concatenated: arguments, and what layers made of them, beside each other.

Parts of a concatenation have as many dims as each other, and the same sizes but at one. Vectors are concatenated along
their last dim; where they were given as sequences, that dim is the length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from autoplan.capture.feeding.arguments import Arguments
from autoplan.capture.feeding.consumers import demand_of
from autoplan.capture.feeding.failures.failure import Failure
from autoplan.capture.feeding.resize import of_rank, of_shape
from autoplan.capture.feeding.wants import BATCH, Path, State
from autoplan.capture.feeding.watch import is_direct, origin
from autoplan.ops.pieces import joins


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
