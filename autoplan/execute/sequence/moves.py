"""The four moves of sequence parallelism, differentiable, for any length.

    scatter          whole value → own positions            backward: the whole gradient from everyone's positions
    gather_whole     own positions → whole, for readers     backward: own positions of a gradient that every rank has
                     that every rank runs alike
    gather_sum       own positions → whole, for readers     backward: own positions of the sum of partial gradients
                     that each rank runs in part
    reduce_scatter   partial sums → own positions           backward: the whole gradient from everyone's positions

Positions are sharded in equal pieces; a length that does not divide is padded inside these moves only: the pieces of
the last ranks end with rows that nobody reads, and what is gathered has its true length again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from autoplan.execute.collectives import RankGroup, Recorded, sent

__all__ = ["deals_out", "gather_sum", "gather_whole", "reduce_scatter", "scatter"]

_NAMED = torch.ops._c10d_functional


def _piece(length: int, group: RankGroup) -> int:
    return -(-length // group.size)


def _pad(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Rows (dim 0) filled up with zeros to `length`."""
    missing = length - rows.size(0)
    return rows if missing == 0 else F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))


def _own(x: torch.Tensor, dim: int, group: RankGroup) -> torch.Tensor:
    rows = x.movedim(dim, 0)
    piece = _piece(rows.size(0), group)
    own = _pad(rows, piece * group.size).narrow(0, group.rank * piece, piece)
    return own.movedim(0, dim).clone(memory_format=torch.contiguous_format)


def _everyone(x: torch.Tensor, dim: int, length: int, group: RankGroup) -> torch.Tensor:
    rows = x.movedim(dim, 0).contiguous()
    whole = sent(_NAMED.all_gather_into_tensor, rows, group.size, group.name)
    return whole.narrow(0, 0, length).movedim(0, dim).clone(memory_format=torch.contiguous_format)


def _summed(x: torch.Tensor, dim: int, group: RankGroup) -> torch.Tensor:
    rows = x.movedim(dim, 0)
    padded = _pad(rows, _piece(rows.size(0), group) * group.size).contiguous()
    own = sent(_NAMED.reduce_scatter_tensor, padded, "sum", group.size, group.name)
    return own.movedim(0, dim).clone(memory_format=torch.contiguous_format)


class _Scatter(Recorded):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: RankGroup) -> torch.Tensor:
        ctx.dim, ctx.length, ctx.group = dim, x.size(dim), group
        return _own(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gather_whole(gradient, ctx.dim, ctx.length, ctx.group), None, None


class _GatherWhole(Recorded):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, length: int, group: RankGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _everyone(x, dim, length, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return scatter(gradient, ctx.dim, ctx.group), None, None, None


class _GatherSum(Recorded):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, length: int, group: RankGroup) -> torch.Tensor:
        ctx.dim, ctx.group = dim, group
        return _everyone(x, dim, length, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return reduce_scatter(gradient, ctx.dim, ctx.group), None, None, None


class _ReduceScatter(Recorded):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, group: RankGroup) -> torch.Tensor:
        ctx.dim, ctx.length, ctx.group = dim, x.size(dim), group
        return _summed(x, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gather_sum(gradient, ctx.dim, ctx.length, ctx.group), None, None


def scatter(x: torch.Tensor, dim: int, group: RankGroup) -> torch.Tensor:
    """This rank's positions of a whole value."""
    return _Scatter.apply(x, dim, group)


def gather_whole(x: torch.Tensor, dim: int, length: int, group: RankGroup) -> torch.Tensor:
    """All positions, for readers that every rank runs alike."""
    return _GatherWhole.apply(x, dim, length, group)


def gather_sum(x: torch.Tensor, dim: int, length: int, group: RankGroup) -> torch.Tensor:
    """All positions, for readers of which each rank runs a part."""
    return _GatherSum.apply(x, dim, length, group)


def reduce_scatter(x: torch.Tensor, dim: int, group: RankGroup) -> torch.Tensor:
    """This rank's positions of a sum over ranks."""
    return _ReduceScatter.apply(x, dim, group)


def deals_out(node: Any) -> bool:
    """Is this node of the autograd graph that of a `scatter`?"""
    return isinstance(node, _Scatter._backward_cls)
