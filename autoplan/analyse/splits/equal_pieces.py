"""Calls that make equal pieces of a value, where ranks hold unequal ones.

Of two pieces of one projection one may be split while its neighbour stays whole. No number that the call is told gives
a rank's lengths then, so they are planned.
"""

from __future__ import annotations

from autoplan.analyse.shards import Shards, refs
from autoplan.analyse.splits.arguments import argument, is_integer, number
from autoplan.values import Call

__all__ = ["parted_dim", "pieces_given"]

_PARTED_DIMS = {"vsplit": 0, "hsplit": 1, "dsplit": 2}  # calls that say it by their name
_EQUAL_PIECES = frozenset({"split", "unsafe_split", "chunk", "unsafe_chunk", "tensor_split", *_PARTED_DIMS})


def parted_dim(call: Call, shards: Shards) -> int:
    dims = len(shards.trace.tensors[next(refs((call.args, call.kwargs)))].shape)
    if call.name in _PARTED_DIMS:
        return min(_PARTED_DIMS[call.name], dims - 1)
    _, given = argument(call, 2, "dim")
    return number(given if given is not None else 0) % dims


def pieces_given(call: Call, shards: Shards) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
    """Of a call that makes equal pieces: along which dim, and how long they must be on each rank, where those differ.

    They do where one piece is split and its neighbour is not.
    """
    _, sections = argument(call, 1, "split_size_or_sections", "split_size", "chunks", "sections", "indices_or_sections")
    outputs = list(refs(call.outputs))
    if call.name not in _EQUAL_PIECES or not is_integer(sections) or not outputs:
        return None
    dim = parted_dim(call, shards)
    wanted = tuple(
        tuple(shards.local_size(shards.axes.of(output)[dim], rank) for output in outputs) for rank in range(shards.tp)
    )
    return None if all(_follow(call.name, sizes, len(outputs)) for sizes in wanted) else (dim, wanted)


def _follow(name: str, sizes: tuple[int, ...], count: int) -> bool:
    """Would the call give pieces of these lengths, were it told the length of the first, or their number?"""
    whole = sum(sizes)
    if name == "tensor_split" or name in _PARTED_DIMS:
        return sizes == tuple(whole // count + (place < whole % count) for place in range(count))
    first = sizes[0] if name in ("split", "unsafe_split") else -(-whole // count)
    return first > 0 and sizes == tuple(max(0, min(first, whole - place * first)) for place in range(count))
