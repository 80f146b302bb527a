"""Moves along the sequence: shards, their collectives, and the executors of the instructions."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from autoplan.common.errors import IndivisibleError
from autoplan.common.layout import Layout
from autoplan.common.nested import flatten_tensors
from autoplan.common.torch_internals import collectives_by_name
from autoplan.execute.collectives import (
    Linear,
    RankGroup,
    copy_to_ranks,
    index_of,
    linear,
    sent,
    sum_over_ranks,
    take_rows,
    whole_order,
)
from autoplan.execute.executors import At, Running, executes, runs
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


def positions_of_a_rank(length: int, group: RankGroup) -> int:
    """Return how many positions each rank has."""
    return -(-length // group.size)


def pad(rows: torch.Tensor, length: int, values: bool) -> torch.Tensor:
    """Pad rows (dim 0) to `length`: gradients with zeros, `values` with the last row, since a model's result for zeros
    may have no gradient (a root of their squares)."""
    missing = length - rows.size(0)
    if missing == 0:
        return rows
    more = rows[-1:].expand(missing, *rows.shape[1:]) if values else rows.new_zeros(missing, *rows.shape[1:])
    return torch.cat([rows, more])


def own_rows(x: torch.Tensor, dim: int, group: RankGroup, values: bool = True) -> torch.Tensor:
    """Return this rank's rows, as a view where it needs no padding."""
    rows = x.movedim(dim, 0)
    piece = positions_of_a_rank(rows.size(0), group)
    return pad(rows, piece * group.size, values).narrow(0, group.rank * piece, piece).movedim(0, dim)


def _cut(x: torch.Tensor, dim: int, group: RankGroup, values: bool) -> torch.Tensor:
    return own_rows(x, dim, group, values).clone(memory_format=torch.contiguous_format)


def _gathered(x: torch.Tensor, dim: int, length: int, group: RankGroup) -> torch.Tensor:
    rows = x.movedim(dim, 0).contiguous()
    whole = sent(_NAMED.all_gather_into_tensor, rows, group.size, group.name)
    return whole.narrow(0, 0, length).movedim(0, dim).clone(memory_format=torch.contiguous_format)


def _summed(x: torch.Tensor, dim: int, group: RankGroup, values: bool) -> torch.Tensor:
    rows = x.movedim(dim, 0)
    padded = pad(rows, positions_of_a_rank(rows.size(0), group) * group.size, values).contiguous()
    own = sent(_NAMED.reduce_scatter_tensor, padded, "sum", group.size, group.name)
    return own.movedim(0, dim).clone(memory_format=torch.contiguous_format)


scatter: Linear[[int, RankGroup, bool]]  # of a dim; whether the rows are values, or gradients
gather_whole: Linear[[int, int, RankGroup]]  # of a dim and its full length
gather_sum: Linear[[int, int, RankGroup]]
reduce_scatter: Linear[[int, RankGroup, bool]]
scatter = linear("Scatter", _cut, lambda x, shape, dim, group, _: gather_whole(x, dim, shape[dim], group))
gather_whole = linear("GatherWhole", _gathered, lambda x, _, dim, length, group: scatter(x, dim, group, False))
gather_sum = linear("GatherSum", _gathered, lambda x, _, dim, length, group: reduce_scatter(x, dim, group, False))
reduce_scatter = linear("ReduceScatter", _summed, lambda x, shape, dim, group, _: gather_sum(x, dim, shape[dim], group))


def deals_out(node: Any) -> bool:
    """Return whether a node of the autograd graph is that of a `scatter`."""
    return node.name() == "ScatterBackward"


# The all-to-all of context parallelism, which exchanges positions for pieces of another dim.
#
#     to_pieces      own positions of all pieces            backward: to_positions, added where several ranks hold one
#                    → all positions of own pieces
#     to_positions   the reverse                            backward: to_pieces

Rows = tuple[tuple[int, ...], ...]  # of each rank's piece


@lru_cache(maxsize=256)
def holders(rows: Rows) -> int:
    """Return how many neighbours hold each piece, where pieces are equally long and in order; 0 where they are not.

    >>> holders(((0, 1), (2, 3))), holders(((0,), (0,), (1,), (1,))), holders(((0, 2), (1, 3)))
    (1, 2, 0)
    """
    same = next((n for n, of_rank in enumerate(rows) if of_rank != rows[0]), len(rows))
    count = len(rows[0])
    even = all(of_rank == tuple(range(n // same * count, (n // same + 1) * count)) for n, of_rank in enumerate(rows))
    return same if even and len(rows) % same == 0 else 0


def exchanged(flat: torch.Tensor, received: list[int], sent_sizes: list[int], group: RankGroup) -> torch.Tensor:
    """Send a part of `flat` to each rank, and return what was received from each, in the order of ranks."""
    return sent(_NAMED.all_to_all_single, flat, received, sent_sizes, group.name)


def _by_rank(own: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Return the rows (dim 1) of each rank one after the other, flat."""
    same = holders(rows)
    if not same or own.size(1) * same != len(rows) * len(rows[0]):
        return torch.cat([take_rows(own, 1, of_rank).flatten() for of_rank in rows])
    pieces = own.unflatten(1, (len(rows) // same, len(rows[0]))).movedim(1, 0)
    return pieces.unsqueeze(1).expand(-1, same, *pieces.shape[1:]).reshape(-1)


def _together(flat: torch.Tensor, rows: Rows, width: int, shape: tuple[int, torch.Size]) -> torch.Tensor:
    """Return all rows (dim 1) of what came from each rank, the sum where several ranks hold one. `shape`: positions,
    and what follows the rows."""
    (piece, rest), same = shape, holders(rows)
    if same and width * same == len(rows) * len(rows[0]):
        parts = flat.view(len(rows) // same, same, piece, len(rows[0]), *rest)
        return (parts.sum(1) if same > 1 else parts.squeeze(1)).movedim(0, 1).flatten(1, 2)
    sizes = [piece * len(of_rank) * rest.numel() for of_rank in rows]
    received = [part.view(piece, len(of_rank), *rest) for part, of_rank in zip(flat.split(sizes), rows, strict=True)]
    if sum(map(len, rows)) == width:
        order, whole = whole_order(rows), torch.cat(received, 1)
        return whole if order is None else take_rows(whole, 1, order)
    whole = flat.new_zeros(piece, width, *rest)
    for part, of_rank in zip(received, rows, strict=True):
        whole.index_add_(1, index_of(of_rank, flat.device), part)
    return whole


def _pieces(x: torch.Tensor, dims: tuple[int, int], length: int, group: RankGroup, rows: Rows) -> torch.Tensor:
    own = x.movedim(dims, (0, 1))  # positions, pieces, the rest
    mine, rest = rows[group.rank], own.shape[2:]
    of_a_row = own.size(0) * rest.numel()
    sizes = [of_a_row * len(mine)] * group.size, [of_a_row * len(of_rank) for of_rank in rows]
    received = exchanged(_by_rank(own, rows), *sizes, group)
    whole = received.view(group.size * own.size(0), len(mine), *rest)
    return whole.narrow(0, 0, length).movedim((0, 1), dims).clone(memory_format=torch.contiguous_format)


def _positions(
    x: torch.Tensor, dims: tuple[int, int], width: int, group: RankGroup, rows: Rows, values: bool
) -> torch.Tensor:
    pieces = x.movedim(dims, (0, 1))
    piece, rest = positions_of_a_rank(pieces.size(0), group), pieces.shape[2:]
    padded = pad(pieces, piece * group.size, values)
    of_a_row = piece * rest.numel()
    sizes = [of_a_row * len(of_rank) for of_rank in rows], [of_a_row * pieces.size(1)] * group.size
    whole = _together(exchanged(padded.reshape(-1), *sizes, group), rows, width, (piece, rest))
    return whole.movedim((0, 1), dims).clone(memory_format=torch.contiguous_format)


to_pieces: Linear[[tuple[int, int], int, RankGroup, Rows]]  # of the dims of positions and of pieces; the length of one
to_positions: Linear[[tuple[int, int], int, RankGroup, Rows, bool]]  # and the width of the other
to_pieces = linear("ToPieces", _pieces, lambda x, shape, d, _, g, rows: to_positions(x, d, shape[d[1]], g, rows, False))
to_positions = linear(
    "ToPositions", _positions, lambda x, shape, d, _, g, rows, *more: to_pieces(x, d, shape[d[0]], g, rows)
)


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
        return scatter(x, dim, group, True)

    flat = _move(lambda x, dim, length: scatter(x, dim, group, True), planned, running, of_shards=False)
    run = flat if sequence.flattened else cut
    shard = SequenceShard(dim, sequence)
    return lambda x: mark_shard(run(x), shard)


@executes(OwnPositions)
def _own(planned: OwnPositions, at: At) -> Change:
    """Keep own positions of a sequence and note its true length."""
    running, group, dim, sequence = at.running, at.group, planned.dim, planned.sequence

    def cut(x: torch.Tensor) -> torch.Tensor:
        shard = own_of(x)
        running.lengths[sequence.name] = x.size(dim) if shard is None else shard.length
        return own_rows(x, dim, group).contiguous() if shard is None else shard.own

    flat = _move(lambda x, dim, length: own_rows(x, dim, group).contiguous(), planned, running, of_shards=False)
    run = flat if sequence.flattened else cut
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
        return lambda x: reduce_scatter(x, dim, group, True)
    return _move(lambda x, dim, length: reduce_scatter(x, dim, group, True), planned, at.running, of_shards=False)


@runs(ReduceScatterCall)
def _call_to_positions(planned: ReduceScatterCall, at: At, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    return reduce_scatter(func(*args, **kwargs), planned.dim, at.group, True)


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
        return lambda x: to_positions(x, dims, layout.size, group, rows, True)
    return lambda x: to_pieces(x, dims, running.lengths[planned.sequence.name], group, rows)


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
