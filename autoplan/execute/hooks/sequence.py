"""Moves along the sequence: shards, their collectives, and the executors of the instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from autoplan.common.errors import IndivisibleError
from autoplan.common.layout import Layout
from autoplan.common.nested import flatten_tensors
from autoplan.common.torch_internals import collectives_by_name
from autoplan.execute.collectives import RankGroup, Recorded, copy_to_ranks, sent, sum_over_ranks
from autoplan.execute.executors import At, Running, executes, runs
from autoplan.execute.hooks.exchange import ToPieces, ToPositions, pad, positions_of_a_rank
from autoplan.execute.vocabulary.own_positions import OwnStream, leave_positions, own_of, own_stream
from autoplan.values import (
    AllGatherPicked,
    AllGatherSequence,
    AllGatherSequenceSumGradient,
    CallOverPositions,
    Exchange,
    ExchangeToPieces,
    ExchangeToPositions,
    NoteShard,
    OwnPositions,
    ReduceScatterCall,
    ReduceScatterSequence,
    ScatterSequence,
    SequenceBoundary,
    SequenceName,
    WholeLength,
    WithholdPartial,
)

# Values that are a rank's shard of the positions are marked, to be recognised later.
#
# Under sequence parallelism the inputs and outputs of blocks are shards. transformers collects these tensors for a
# caller that asks for hidden states, which the plan may never have seen. So the hooks mark the tensors that they shard,
# and marked tensors that leave the model are gathered there.

_MARK = "_autoplan_shard"


class SequenceShard(NamedTuple):
    """The dim along which a value is sharded, and the sequence that it belongs to."""

    dim: int
    sequence: SequenceName


def mark_shard(tensor: torch.Tensor, shard: SequenceShard) -> torch.Tensor:
    """Mark a tensor as a shard, and return it."""
    setattr(tensor, _MARK, shard)
    return tensor


def is_shard(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is marked as a shard."""
    return hasattr(tensor, _MARK)


def shards_in(output: Any) -> list[tuple[tuple[Any, ...], SequenceShard]]:
    """Return the paths of all marked tensors in a model's output."""
    marks = ((path, getattr(tensor, _MARK, None)) for path, tensor in flatten_tensors(output))
    return [(path, shard) for path, shard in marks if shard is not None]


# The four moves of sequence parallelism, differentiable, for any length.
#
#     scatter          replicated → own positions             backward: gather the gradient of all positions
#     gather_whole     own positions → replicated, for        backward: own positions of a replicated gradient
#                      readers that every rank runs alike
#     gather_sum       own positions → replicated, for        backward: own positions of the sum of partial gradients
#                      readers of which each runs a part
#     reduce_scatter   partial sums → own positions           backward: gather the gradient of all positions
#
# Positions are sharded in equal pieces; an indivisible length is padded inside these moves only: the pieces of the last
# ranks end with copies of the last row, which are never read, and a gathered value has its true length again.

_NAMED = collectives_by_name


class _Scatter(Recorded):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: RankGroup, values: bool) -> torch.Tensor:
        ctx.dim, ctx.length, ctx.group = dim, x.size(dim), group
        ctx.deals_out = True
        rows = x.movedim(dim, 0)
        piece = positions_of_a_rank(rows.size(0), group)
        own = pad(rows, piece * group.size, values).narrow(0, group.rank * piece, piece)
        return own.movedim(0, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gather_whole(gradient, ctx.dim, ctx.length, ctx.group), None, None, None


class _GatherWhole(Recorded):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, length: int, group: RankGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        rows = x.movedim(dim, 0).contiguous()
        whole = sent(_NAMED.all_gather_into_tensor, rows, group.size, group.name)
        return whole.narrow(0, 0, length).movedim(0, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Scatter.apply(gradient, ctx.dim, ctx.group, False), None, None, None


class _GatherSum(_GatherWhole):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _ReduceScatter.apply(gradient, ctx.dim, ctx.group, False), None, None, None


class _ReduceScatter(Recorded):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: RankGroup, values: bool) -> torch.Tensor:
        ctx.dim, ctx.length, ctx.group = dim, x.size(dim), group
        rows = x.movedim(dim, 0)
        padded = pad(rows, positions_of_a_rank(rows.size(0), group) * group.size, values).contiguous()
        own = sent(_NAMED.reduce_scatter_tensor, padded, "sum", group.size, group.name)
        return own.movedim(0, dim).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gather_sum(gradient, ctx.dim, ctx.length, ctx.group), None, None, None


def scatter(x: torch.Tensor, dim: int, group: RankGroup) -> torch.Tensor:
    """Return this rank's positions of a replicated value."""
    return _Scatter.apply(x, dim, group, True)


def gather_whole(x: torch.Tensor, dim: int, length: int, group: RankGroup) -> torch.Tensor:
    """Return all positions, for readers that every rank runs alike."""
    return _GatherWhole.apply(x, dim, length, group)


def gather_sum(x: torch.Tensor, dim: int, length: int, group: RankGroup) -> torch.Tensor:
    """Return all positions, for readers of which each rank runs a part."""
    return _GatherSum.apply(x, dim, length, group)


def reduce_scatter(x: torch.Tensor, dim: int, group: RankGroup) -> torch.Tensor:
    """Return this rank's positions of a sum over ranks."""
    return _ReduceScatter.apply(x, dim, group, True)


def deals_out(node: Any) -> bool:
    """Return whether a node of the autograd graph is that of a `scatter`."""
    return getattr(node, "deals_out", False)  # the context of a Function is its node


# Executors along the sequence: each is one of the moves, with the true length of its sequence.

Change = Callable[[torch.Tensor], torch.Tensor]
Move = Callable[[torch.Tensor, int, int], torch.Tensor]  # of a tensor, its dim, and the whole length


@executes(ScatterSequence)
def _scatter(planned: ScatterSequence, at: At) -> Change:
    """Shard a sequence and note its true length for the other moves."""
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

    flat = _move(lambda x, dim, length: scatter(x, dim, group), planned, running, of_shards=False)
    run = flat if sequence.flattened else cut
    shard = SequenceShard(dim, sequence)
    return lambda x: mark_shard(run(x), shard)


@executes(OwnPositions)
def _own(planned: OwnPositions, at: At) -> Change:
    """Keep own positions of a sequence and note its true length."""
    running, group, dim, sequence = at.running, at.group, planned.dim, planned.sequence

    def own(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
        rows, piece = x.movedim(dim, 0), positions_of_a_rank(length, group)
        return pad(rows, piece * group.size, True).narrow(0, group.rank * piece, piece).movedim(0, dim).contiguous()

    def cut(x: torch.Tensor) -> torch.Tensor:
        shard = own_of(x)
        length = running.lengths[sequence.name] = x.size(dim) if shard is None else shard.length
        return own(x, dim, length) if shard is None else shard.own

    run = _move(own, planned, running, of_shards=False) if sequence.flattened else cut
    shard = SequenceShard(dim, sequence)
    return lambda x: mark_shard(run(x), shard)


@executes(AllGatherSequence)
def _gather(planned: AllGatherSequence, at: At) -> Change:
    group, running = at.group, at.running
    if planned.pattern:
        return _move(lambda x, dim, length: gather_whole(x, dim, length, group), planned, running)

    def leave(x: torch.Tensor) -> torch.Tensor:
        if x.dim() < -planned.dim:  # the loss of a run that returns no logits
            return x
        if running.context:
            return leave_positions(x, planned.dim, running.lengths[planned.sequence.name], running)
        return gather_shard(x, SequenceShard(planned.dim, planned.sequence), running)

    return leave


@executes(AllGatherPicked)
def _gather_picked(planned: AllGatherPicked, at: At) -> Change:
    running = at.running
    shard = SequenceShard(planned.dim, planned.sequence)
    return lambda x: gather_shard(x, shard, running) if running.picks else x


@executes(AllGatherSequenceSumGradient)
def _gather_sum(planned: AllGatherSequenceSumGradient, at: At) -> Change:
    group = at.group
    return _move(lambda x, dim, length: gather_sum(x, dim, length, group), planned, at.running)


@executes(ReduceScatterSequence)
def _reduce_scatter(planned: ReduceScatterSequence, at: At) -> Change:
    group, dim = at.group, planned.dim
    if not planned.sequence.flattened:
        return lambda x: reduce_scatter(x, dim, group)
    return _move(lambda x, dim, length: reduce_scatter(x, dim, group), planned, at.running, of_shards=False)


@runs(ReduceScatterCall)
def _call_to_positions(planned: ReduceScatterCall, at: At, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    return reduce_scatter(func(*args, **kwargs), planned.dim, at.group)


@runs(CallOverPositions)
def _call_over_positions(planned: CallOverPositions, at: At, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    running, group, dim, sequence = at.running, at.group, planned.dim, planned.sequence
    if running.runs_whole:
        return func(*args, **kwargs)
    length = running.lengths[sequence.name]
    piece = positions_of_a_rank(length, group)
    own = min(max(length - group.rank * piece, 0), piece)  # without those that pad
    x = (args or (kwargs["input"],))[0]
    parts = x.unflatten(dim, (-1, piece)) if sequence.flattened else x
    parts = parts.narrow(dim, 0, own)
    parts = parts.flatten(dim - 1, dim) if sequence.flattened else parts
    result = func(parts, *args[1:], **{key: value for key, value in kwargs.items() if key != "input"})
    if planned.mean:  # of no position it is NaN
        result = (result if own else result.nan_to_num()) * (own / length)
    return copy_to_ranks(sum_over_ranks(result, group), group)


OwnStream.gather = staticmethod(gather_sum)


@executes(WholeLength)
def _whole_length(planned: WholeLength, at: At) -> Change:
    running, group, dim, name = at.running, at.group, planned.dim, planned.sequence.name

    def show(x: torch.Tensor) -> torch.Tensor:
        move = gather_sum if torch.compiler.is_compiling() else own_stream
        return move(x, dim, running.lengths[name], group)

    return show


@executes(ExchangeToPieces, ExchangeToPositions)
def _exchange(planned: Exchange, at: At) -> Change:
    running, group, dims, layout = at.running, at.group, (planned.dim, planned.feature), Layout.parse(planned.layout)
    rows = layout.rows_of_all(group.size)
    if isinstance(planned, ExchangeToPositions):
        return lambda x: ToPositions.apply(x, dims, layout.size, group, rows, True)
    return lambda x: ToPieces.apply(x, dims, running.lengths[planned.sequence.name], group, rows)


@executes(NoteShard)
def _note(planned: NoteShard, at: At) -> Change:
    shard = SequenceShard(planned.dim, planned.sequence)
    return lambda x: mark_shard(x, shard)


def gather_shard(x: torch.Tensor, shard: SequenceShard, running: Running) -> torch.Tensor:
    """Gather the full sequence of a marked shard."""
    planned = AllGatherSequence("", "output", (), shard.dim, shard.sequence)
    group = running.sequence
    return _move(lambda x, dim, length: gather_whole(x, dim, length, group), planned, running)(x)


def _move(move: Move, planned: SequenceBoundary, running: Running, of_shards: bool = True) -> Change:
    """Run a move, also where batch and sequence share one dim, sequence minor. `of_shards`: is the input a shard?"""
    dim, sequence = planned.dim, planned.sequence

    def run(x: torch.Tensor) -> torch.Tensor:
        length = running.lengths[sequence.name]
        if not sequence.flattened:
            return move(x, dim, length)
        local_length = positions_of_a_rank(length, running.sequence) if of_shards else length
        at = dim % x.dim()
        apart = x.unflatten(at, (-1, local_length)).movedim(at + 1, -1)
        return move(apart, -1, length).movedim(-1, at + 1).flatten(at, at + 1)

    return run


def zeros_of_a_shard(planned: WithholdPartial, running: Running) -> Change:
    """Return a function that makes zeros of the size that a value has once it is sharded, or of its own size."""
    dim, sequence = planned.dim, planned.sequence
    if dim is None or sequence is None:
        return torch.zeros_like

    def zeros(x: torch.Tensor) -> torch.Tensor:
        length, shape = running.lengths[sequence.name], list(x.shape)
        shape[dim] = shape[dim] // length * positions_of_a_rank(length, running.sequence)
        return x.new_zeros(shape)

    return zeros
