"""The instruction for one call of the trace that must run otherwise on a rank: by the kind of its reduction, or what
else it needs.

This is the one place where a kind of reduction (reductions.py) becomes an instruction's class.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from autoplan.analyse.placement.reductions import gathered_dim, reducing_op
from autoplan.analyse.shards import Shards
from autoplan.ops import call_record, op_record
from autoplan.ops.records.answers import Reduction
from autoplan.values import (
    AttentionCall,
    Call,
    CallRewrite,
    CallSite,
    DrawOnShards,
    EmbeddingCall,
    EqualPieces,
    GatherCall,
    LengthCall,
    MeanCall,
    NormCall,
    Op,
    RewriteCall,
    RowCall,
    SumCall,
    VarianceCall,
    refs,
)

__all__ = ["call_instruction"]

Pieces = tuple[int, tuple[tuple[int, ...], ...]]  # along which dim, and how long on each rank


def call_instruction(
    call: Call, reduction: Reduction | None, pieces: Pieces | None, draws: bool, shards: Shards, **needs: Any
) -> CallRewrite:
    """What a rank does at this call. `needs` are the fields that any call may have: arguments, copies, cuts."""
    site = CallSite(call.name, call.place)
    if reduction is not None:
        kind, details = _KINDS[reduction]
        return kind(call.module, site, **details(call, shards), **needs)
    if pieces is not None:
        return EqualPieces(call.module, site, dim=pieces[0], pieces=pieces[1], **needs)
    return (DrawOnShards if draws else RewriteCall)(call.module, site, **needs)


def _nothing(call: Call, shards: Shards) -> dict[str, Any]:
    return {}


def _norm(call: Call, shards: Shards) -> dict[str, Any]:
    """Over how many numbers it runs, in how many dims, and how many statistics of them it takes."""
    dims = len(call.args[1] if len(call.args) > 1 else call.kwargs["normalized_shape"])
    shape = shards.trace.tensors[next(refs(call.args))].shape
    return {"dims": dims, "count": prod(shape[len(shape) - dims :]), "statistics": call_record(call.name).statistics}


def _variance(call: Call, shards: Shards) -> dict[str, Any]:
    """Its dims from the end, whether they stay as dims of 1, what is taken off the count, and how many positions each
    rank holds."""
    op = reducing_op(call, Reduction.VARIANCE, shards)
    source, correction = op.args[0].id, op.kwargs.get("correction")
    shape = shards.trace.tensors[source].shape
    dims = _from_end(op, len(shape))
    held = tuple(
        prod(n for dim, n in enumerate(shards.local_shape(source, rank)) if dim - len(shape) in dims)
        for rank in range(shards.tp)
    )
    kept = len(shards.trace.tensors[next(refs(op.outputs))].shape) == len(shape)
    correction = 1 if correction is None else correction
    return {"dims": dims, "keepdim": kept, "correction": correction, "held": held}


def _length(call: Call, shards: Shards) -> dict[str, Any]:
    """Its dims from the end, whether they stay as dims of 1, and whether it divides by the lengths."""
    op = reducing_op(call, Reduction.LENGTH, shards)
    rank = len(shards.axes.of(op.args[0].id))
    kept = len(shards.trace.tensors[next(refs(op.outputs))].shape) == rank
    return {"dims": _from_end(op, rank), "keepdim": kept, "divides": call_record(call.name).divides}


def _from_end(op: Op, rank: int) -> tuple[int, ...]:
    """The dims that an op takes a statistic over."""
    over = op_record(op.name).over
    assert over is not None
    return tuple(sorted(dim % rank - rank for dim in over(op, rank)))


def _rows(call: Call, shards: Shards) -> dict[str, Any]:
    """How many rows the table has on all ranks together."""
    return {"rows": next(shards.trace.tensors[a.id].shape[0] for a in call.args if shards.is_split(a.id))}


def _product(call: Call, shards: Shards) -> dict[str, Any]:
    product = gathered_dim(call, shards)
    assert product is not None, "other products are refused when sums are placed"
    return {"layout": product[0], "dim": product[1]}


_KINDS: dict[Reduction, tuple[type[CallRewrite], Callable[[Call, Shards], dict[str, Any]]]] = {
    Reduction.SUM: (SumCall, _nothing),
    Reduction.MEAN: (MeanCall, _nothing),
    Reduction.NORM: (NormCall, _norm),
    Reduction.VARIANCE: (VarianceCall, _variance),
    Reduction.LENGTH: (LengthCall, _length),
    Reduction.EMBEDDING: (EmbeddingCall, _rows),
    Reduction.ROW: (RowCall, _rows),
    Reduction.GATHER: (GatherCall, _product),
    Reduction.ATTENTION: (AttentionCall, _nothing),
}
