"""A parameter seen through views: which of its dims each dim of the viewed tensor is.

Linear layers read `weight.t()`, experts read `weight[choice]` or `weight.transpose(1, 2)`, attention reads chunks
of one packed weight. To say which dim of the parameter a matmul contracts, the dims are followed through such ops.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autoplan.ops import op_record
from autoplan.ops.records.answers import Shows
from autoplan.values import Op

__all__ = ["View", "as_lookup", "dequantised", "follow_view", "whole_view"]


@dataclass(frozen=True)
class View:
    """`dims[i]` is the parameter's dim that dim i of the viewed tensor runs over; None: none of them, or not known.

    `chosen`: the box whose values picked among the parameter's first dim (the chosen experts). `companions`: the scales
    and zero points that a quantised parameter was combined with.
    """

    parameter: int
    dims: tuple[int | None, ...]
    chosen: int | None = None
    companions: tuple[int, ...] = ()


def whole_view(parameter: int, rank: int) -> View:
    return View(parameter, tuple(range(rank)))


def dequantised(view: View, others: list[View], stored: tuple[int, ...], after: tuple[int, ...]) -> View:
    """A quantised parameter on its way to what it stands for: blocks come and go, in the end its dims are back."""
    companions = dict.fromkeys(
        (*view.companions, *(n for other in others for n in (other.parameter, *other.companions)))
    )
    companions.pop(view.parameter, None)
    back = len(after) == len(stored) and all(size % kept == 0 for size, kept in zip(after, stored, strict=True))
    dims: tuple[int | None, ...] = view.dims if len(view.dims) == len(after) else (None,) * len(after)
    if back and None in dims:
        dims = tuple(range(len(stored)))
    return replace(view, dims=dims, companions=tuple(companions))


def as_lookup(view: View, index_rank: int) -> View:
    """weight[index]: the first dim gives way to those of the index; it is still the first dim that they run over."""
    return replace(view, dims=(view.dims[:1] * index_rank) + view.dims[1:])


def follow_view(op: Op, view: View, before: tuple[int, ...], after: tuple[int, ...]) -> View:
    """The view after one more op that reads nothing but it (and constants)."""
    dims: list[int | None] = list(view.dims)
    known = op_record(op.name)
    if known.moves is not None:
        dims = known.moves(op, dims, None, len(after))
    elif len(before) != len(after) or (before != after and known.shows is Shows.RESHAPED):
        dims = _by_size(dims, before, after)
    return replace(view, dims=tuple(dims)) if len(dims) == len(after) else replace(view, dims=(None,) * len(after))


def _by_size(dims: list[int | None], before: tuple[int, ...], after: tuple[int, ...]) -> list[int | None]:
    """A reshape: dims that keep their size, in order, stay known."""
    result: list[int | None] = []
    position = 0
    for size in after:
        matching = next((i for i in range(position, len(before)) if before[i] == size and size > 1), None)
        result.append(dims[matching] if matching is not None else None)
        position = matching + 1 if matching is not None else position
    return result
