"""Calls that make equal pieces of a value, where ranks hold unequal ones.

Of two pieces of one projection one may be split while its neighbour stays whole. No number that the call is told gives
a rank's lengths then, so they are planned.
"""

from __future__ import annotations

from autoplan.analyse.shards import Shards
from autoplan.analyse.splits.arguments import argument, is_integer, number
from autoplan.ops import call_record
from autoplan.ops.records.sizes import Lengths, PieceCount
from autoplan.values import Call, refs

__all__ = ["parted_dim", "pieces_given"]


def parted_dim(call: Call, shards: Shards) -> int:
    dims = len(shards.trace.tensors[next(refs((call.args, call.kwargs)))].shape)
    told = call_record(call.name).sizes
    if isinstance(told, PieceCount) and told.dim is not None:  # the call says it by its name
        return min(told.dim, dims - 1)
    _, given = argument(call, 2, "dim")
    return number(given if given is not None else 0) % dims


def pieces_given(call: Call, shards: Shards) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
    """Of a call that makes equal pieces: along which dim, and how long they must be on each rank, where those differ.

    They do where one piece is split and its neighbour is not.
    """
    told = call_record(call.name).sizes
    if not isinstance(told, (Lengths, PieceCount)):
        return None
    _, sections = argument(
        call, told.at, "split_size_or_sections", "split_size", "chunks", "sections", "indices_or_sections"
    )
    outputs = list(refs(call.outputs))
    if not is_integer(sections) or not outputs:
        return None
    dim = parted_dim(call, shards)
    wanted = tuple(
        tuple(shards.local_size(shards.axes.of(output)[dim], rank) for output in outputs) for rank in range(shards.tp)
    )
    return None if all(_follow(told, sizes, len(outputs)) for sizes in wanted) else (dim, wanted)


def _follow(told: Lengths | PieceCount, sizes: tuple[int, ...], count: int) -> bool:
    """Would the call give pieces of these lengths, were it told the length of the first, or their number?"""
    whole = sum(sizes)
    if isinstance(told, PieceCount) and told.even:
        return sizes == tuple(whole // count + (place < whole % count) for place in range(count))
    first = sizes[0] if isinstance(told, Lengths) else -(-whole // count)
    return first > 0 and sizes == tuple(max(0, min(first, whole - place * first)) for place in range(count))
