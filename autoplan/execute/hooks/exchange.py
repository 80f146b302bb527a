"""The all-to-all of context parallelism, which exchanges positions for pieces of another dim.

ToPieces         own positions of all pieces            backward: ToPositions, added where several ranks hold one
                 → all positions of own pieces
ToPositions      the reverse                            backward: ToPieces
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from autoplan.common.torch_internals import collectives_by_name
from autoplan.execute.collectives import RankGroup, Recorded, index_of, sent, take_rows, whole_order

Rows = tuple[tuple[int, ...], ...]  # of each rank's piece
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


class ToPieces(Recorded):
    """`dims`: of positions, of which there are `length`, and of pieces."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: tuple[int, int], length: int, group: RankGroup, rows: Rows) -> Any:
        ctx.how = dims, x.size(dims[1]), group, rows
        own = x.movedim(dims, (0, 1))  # positions, pieces, the rest
        mine, rest = rows[group.rank], own.shape[2:]
        of_a_row = own.size(0) * rest.numel()
        sizes = [of_a_row * len(mine)] * group.size, [of_a_row * len(of_rank) for of_rank in rows]
        received = exchanged(_by_rank(own, rows), *sizes, group)
        whole = received.view(group.size * own.size(0), len(mine), *rest)
        return whole.narrow(0, 0, length).movedim((0, 1), dims).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ToPositions.apply(gradient, *ctx.how, False), None, None, None, None


class ToPositions(Recorded):
    """`dims`: of positions and of pieces, which are `width` wide together."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dims: tuple[int, int], width: int, group: RankGroup, rows: Rows, values: bool
    ) -> Any:
        ctx.how = dims, x.size(dims[0]), group, rows
        pieces = x.movedim(dims, (0, 1))
        piece, rest = positions_of_a_rank(pieces.size(0), group), pieces.shape[2:]
        padded = pad(pieces, piece * group.size, values)
        of_a_row = piece * rest.numel()
        sizes = [of_a_row * len(of_rank) for of_rank in rows], [of_a_row * pieces.size(1)] * group.size
        whole = _together(exchanged(padded.reshape(-1), *sizes, group), rows, width, (piece, rest))
        return whole.movedim((0, 1), dims).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ToPieces.apply(gradient, *ctx.how), None, None, None, None, None
