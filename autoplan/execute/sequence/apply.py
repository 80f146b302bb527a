"""What is done along the sequence: one of the moves, under the true length of the sequence that it is about."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoplan.common.errors import IndivisibleError
from autoplan.execute.executors import At, executes
from autoplan.execute.hooks.running import Running
from autoplan.execute.hooks.sequence_shards import SequenceShard, mark_shard
from autoplan.execute.sequence.moves import gather_sum, gather_whole, reduce_scatter, scatter
from autoplan.values import (
    AllGatherSequence,
    AllGatherSequenceSumGradient,
    NoteShard,
    ReduceScatterSequence,
    ScatterSequence,
    SequenceBoundary,
    SequenceName,
    WithholdPartial,
)

__all__ = ["gather_shard", "zeros_of_a_shard"]

Change = Callable[[torch.Tensor], torch.Tensor]
Move = Callable[[torch.Tensor, int, int], torch.Tensor]  # of a tensor, its dim, and the whole length


@executes(ScatterSequence)
def _scatter(planned: ScatterSequence, at: At) -> Change:
    """The only one that learns the true length of a sequence, and notes it for the others."""
    running, group, dim, sequence = at.running, at.group, planned.dim, planned.sequence

    def cut(x: torch.Tensor) -> torch.Tensor:
        length = x.size(dim)
        if length % group.size and running.sequence_padding == "error" and torch.is_grad_enabled():
            raise IndivisibleError(
                f"a sequence of {length} is not divisible by {group.size} ranks",
                hint=f"pad it to {-(-length // group.size) * group.size}, or pass sequence_padding='pad'",
            )
        running.lengths[sequence.name] = length
        return scatter(x, dim, group)

    flat = _flattened(lambda x, dim, length: scatter(x, dim, group), planned, running, of_shards=False)
    run = flat if sequence.flattened else cut
    shard = SequenceShard(dim, sequence)
    return lambda x: mark_shard(run(x), shard)


@executes(AllGatherSequence)
def _gather(planned: AllGatherSequence, at: At) -> Change:
    group = at.group
    return _move(lambda x, dim, length: gather_whole(x, dim, length, group), planned, at.running, of_shards=True)


@executes(AllGatherSequenceSumGradient)
def _gather_sum(planned: AllGatherSequenceSumGradient, at: At) -> Change:
    group = at.group
    return _move(lambda x, dim, length: gather_sum(x, dim, length, group), planned, at.running, of_shards=True)


@executes(ReduceScatterSequence)
def _reduce_scatter(planned: ReduceScatterSequence, at: At) -> Change:
    group, dim = at.group, planned.dim
    if not planned.sequence.flattened:
        return lambda x: reduce_scatter(x, dim, group)
    return _flattened(lambda x, dim, length: reduce_scatter(x, dim, group), planned, at.running, of_shards=False)


@executes(NoteShard)
def _note(planned: NoteShard, at: At) -> Change:
    shard = SequenceShard(planned.dim, planned.sequence)
    return lambda x: mark_shard(x, shard)


def gather_shard(x: torch.Tensor, shard: SequenceShard, running: Running) -> torch.Tensor:
    """The whole sequence of a value that says that it is a shard."""
    planned = AllGatherSequence("", "output", (), shard.dim, shard.sequence)
    group = running.group
    return _move(lambda x, dim, length: gather_whole(x, dim, length, group), planned, running, of_shards=True)(x)


def _move(move: Move, planned: SequenceBoundary, running: Running, *, of_shards: bool) -> Change:
    if planned.sequence.flattened:
        return _flattened(move, planned, running, of_shards=of_shards)
    dim, name = planned.dim, planned.sequence.name
    return lambda x: move(x, dim, running.lengths[name])


def _flattened(move: Move, planned: SequenceBoundary, running: Running, *, of_shards: bool) -> Change:
    """Batch times sequence in one dim: the sequence is its minor part. `of_shards`: what comes in is a shard."""
    dim, name, size = planned.dim, planned.sequence.name, running.group.size

    def run(x: torch.Tensor) -> torch.Tensor:
        length = running.lengths[name]
        held = -(-length // size) if of_shards else length
        at = dim % x.dim()
        apart = x.unflatten(at, (-1, held)).movedim(at + 1, -1)
        return move(apart, -1, length).movedim(-1, at + 1).flatten(at, at + 1)

    return run


def zeros_of_a_shard(planned: WithholdPartial, running: Running) -> Change:
    """Zeros of the size that a whole value has once it is cut; of the value's own size where nothing is cut."""
    dim, sequence = planned.dim, planned.sequence
    if dim is None or sequence is None:
        return torch.zeros_like
    return lambda x: _zeros(x, dim, sequence, running)


def _zeros(x: torch.Tensor, dim: int, sequence: SequenceName, running: Running) -> torch.Tensor:
    length = running.lengths[sequence.name]
    shape = list(x.shape)
    shape[dim] = shape[dim] // length * -(-length // running.group.size)
    return x.new_zeros(shape)
