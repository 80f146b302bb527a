"""Find the calls that reduce over a sharded axis, and choose the instruction that replaces each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from autoplan.analyse.infer import Shards
from autoplan.analyse.placement.inside_calls import axis_lost_in, why_no_partial_sum, why_sizes_differ
from autoplan.analyse.splits.model_ends import looked_up_in
from autoplan.ops import call_record, op_record
from autoplan.ops.attention import argument, mask_of_heads
from autoplan.ops.records.answers import Reduction
from autoplan.ops.records.on_shards import SplitOp
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
    Ref,
    RewriteCall,
    RowCall,
    SumCall,
    Symbolic,
    VarianceCall,
    refs,
)
from autoplan.values.not_placed import Unplaceable
from autoplan.values.reasons import NotPlaced

# `multi_head_attention_forward`: one call that projects, attends and projects back, given its number of heads.
#
# It slices a packed weight into three itself, so no rank could call it with a shard of the heads; but its computation
# is known, and a rank can do it on its own heads (`execute/hooks/reductions.py`). `obstacle` checks that a split is one
# by heads.

_APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_PACKED = ("in_proj_weight", "in_proj_bias")
_LEARNT = ("bias_k", "bias_v")  # a key and a value that belong to no position
_CUT = (*_PACKED, *_APART, *_LEARNT, "out_proj_weight")
_ABSENT = ("static_k", "static_v")


def obstacle(call: Call, shards: Shards) -> NotPlaced | None:
    """Return why ranks cannot run this call on their own heads; None if they can."""
    value = [name for name in _ABSENT if argument(call, name) not in (None, False, 0, 0.0)]
    if value:
        return NotPlaced("attention-argument", argument=value[0])
    if argument(call, "average_attn_weights", True) is False:
        return NotPlaced("weights-of-each-head")
    apart = argument(call, "use_separate_proj_weight", False)  # then the packed weight is a stand-in without rows
    named = [name for name in _CUT if name != ("in_proj_weight" if apart else "")]
    cut = {name: value.id for name in named if isinstance(value := argument(call, name), Ref)}
    others = {*call.reads, *call.results} - set(cut.values())
    if any(map(shards.is_split, others)):
        return NotPlaced("shards-given")
    width = shards.trace.tensors[cut["out_proj_weight"]].shape[1]
    heads = _number(argument(call, "num_heads"))
    for rank in range(shards.tp):
        own = _rows_of_rank(shards, cut["out_proj_weight"], 1, rank)
        packed = [part * width + row for part in range(3) for row in own]
        wanted = [(name, 0, packed) for name in _PACKED] + [(name, 0, own) for name in _APART]
        wanted += [(name, 2, own) for name in _LEARNT]
        alike = all(_rows_of_rank(shards, cut[name], dim, rank) == rows for name, dim, rows in wanted if name in cut)
        if not alike or not _whole(own, width // heads):
            return NotPlaced("cut-between-no-heads")
    return None


def _rows_of_rank(shards: Shards, tensor: int, dim: int, rank: int) -> list[int]:
    layout = shards.layouts(tensor)[dim]
    return list(layout.rows(rank, shards.tp)) if layout is not None else []


def _whole(rows: Sequence[int], width: int) -> bool:
    """Return whether the rows are those of complete heads."""
    chunks = [list(rows[i : i + width]) for i in range(0, len(rows), width)]
    return bool(rows) and all(
        chunk[0] % width == 0 and chunk == list(range(chunk[0], chunk[0] + width)) for chunk in chunks
    )


def _number(value: Any) -> int:
    return value.value if isinstance(value, Symbolic) else int(value)


# The calls that reduce over a split axis, each of which needs communication.
#
# The record of an op (`autoplan/ops`) says what it reduces over; a call is the sequence of its ops, unless its own
# record describes it. What else happens between its ops is examined by `inside_calls.py`. A call whose product is
# gathered by decision is a "gather". Anything else that reads across a split dimension is refused.

_SHARED = (Reduction.SUM, Reduction.MEAN, Reduction.NORM, Reduction.VARIANCE, Reduction.LENGTH)


def reduction_of(call: Call, shards: Shards, gathered: frozenset[int]) -> Reduction | NotPlaced | None:
    """Return how ranks reduce together for a call, if they need to."""
    record = call_record(call.name)
    if record.pays is Reduction.ATTENTION:
        why = obstacle(call, shards)
        return why or record.pays
    if isinstance(record.pays, NotPlaced):
        return record.pays
    kinds: dict[int, Reduction] = {}
    for index in range(*call.ops):
        op = shards.trace.ops[index]
        if (
            index in gathered
            and any(shards.is_split(item.id) for item in op.args if isinstance(item, Ref))
            and _brings_shares(call, shards)
        ):
            return Reduction.GATHER
        kind = op_record(op.name).reduces(SplitOp(shards, op))
        if kind is None and record.pays is None and axis_lost_in(op, shards):
            return NotPlaced("across", op=op.name)
        if kind is not None:
            kind = record.pays or kind
            if isinstance(kind, NotPlaced):
                return kind
            kinds[index] = kind
    return _together(call, kinds, shards)


def _brings_shares(call: Call, shards: Shards) -> bool:
    """Return whether the dim that a product to gather takes from its weight is split, not the one it sums over."""
    gathered = gathered_dim(call, shards)
    return gathered is None or gathered[0] != str(None)


def _together(call: Call, kinds: dict[int, Reduction], shards: Shards) -> Reduction | NotPlaced | None:
    """Return how ranks reduce for a call, given the reductions of its ops (by index)."""
    record, reduction = call_record(call.name), next(reversed(kinds.values()), None)
    why = why_no_partial_sum(call, shards, kinds, row_bias_of(call, reduction)) or why_sizes_differ(call, shards)
    if why:
        return why
    if reduction in _UNSETTLED and reduction not in (record.settles, record.pays):
        return NotPlaced(_UNSETTLED[reduction])
    if reduction in _SHARED and _counts_twice(call, shards):
        return NotPlaced("held-together")
    return reduction


# Reductions that replace a call entirely, so that the call's own record must allow them.
_UNSETTLED: dict[Reduction, Unplaceable] = {
    Reduction.ROW: "row-otherwise",
    Reduction.LENGTH: "length-inside",
    Reduction.NORM: "norm-inside",
    Reduction.VARIANCE: "variance-inside",
}


def _counts_twice(call: Call, shards: Shards) -> bool:
    """Return whether a sum over all ranks would count rows that a group of ranks shares several times."""
    layouts = [layout for t in call.reads for layout in shards.layouts(t) if layout is not None]
    summed = [layout for layout in layouts if layout.all_carried()]
    return bool(summed) and all(each.shared_rows(shards.tp) for each in summed)


def reducing_op(call: Call, kind: Reduction, shards: Shards) -> Op:
    """Return the op within a call for which ranks reduce in this way."""
    ops = (shards.trace.ops[index] for index in range(*call.ops))
    return next(op for op in ops if op_record(op.name).reduces(SplitOp(shards, op)) is kind)


def lengths_in(call: Call, shards: Shards) -> int:
    """Return how many vector lengths a call computes."""
    op = reducing_op(call, Reduction.LENGTH, shards)
    return prod(shards.trace.tensors[op.results[-1]].shape)


def gathered_dim(call: Call, shards: Shards) -> tuple[str, int] | None:
    """Return, for a product that may be gathered, the layout of the dim that its weight brings in, and the result's
    dim, from the end. None for a call that is no such product."""
    gathered = [shards.trace.ops[index] for index in range(*call.ops) if index in shards.axes.gathered]  # by decision
    table = next((t for op in gathered if (t := looked_up_in(op, shards.axes)) is not None), None)
    if table is not None:
        return str(shards.layouts(table)[1]), -1
    weight = call.args[1] if len(call.args) > 1 else call.kwargs.get("weight")
    product = call_record(call.name).product
    if product is None or product.out is None or not isinstance(weight, Ref):
        return None
    own, out = product.out
    dims = len(shards.trace.tensors[weight.id].shape)  # a dim from the front: the result has as many dims
    return str(shards.layouts(weight.id)[own]), out if out < 0 else out - dims


def row_bias_of(call: Call, reduction: str | NotPlaced | None) -> int | None:
    """Return the bias that a call adds to a partial sum: each rank must add its part only."""
    if reduction == Reduction.ATTENTION:
        bias = argument(call, "out_proj_bias")
        return bias.id if isinstance(bias, Ref) else None
    product = call_record(call.name).product
    if reduction != Reduction.SUM or product is None or product.bias is None:
        return None
    bias = call.args[product.bias] if len(call.args) > product.bias else call.kwargs.get("bias")
    return bias.id if isinstance(bias, Ref) else None


# The instruction for one call that must run differently on a rank, chosen by the kind of its reduction, or by what
# else it needs. This is the one place where a kind of reduction becomes a class of instructions.

Pieces = tuple[int, tuple[tuple[int, ...], ...]]  # along which dim, and how long on each rank


def call_instruction(
    call: Call, reduction: Reduction | None, pieces: Pieces | None, draws: bool, shards: Shards, **needs: Any
) -> CallRewrite:
    """Return the instruction for this call. `needs` are the fields that any call may have: arguments, copies, cuts."""
    site = CallSite(call.name, call.place)
    if reduction is not None:
        kind, details = _KINDS[reduction]
        return kind(call.module, site, **details(call, shards), **needs)
    if pieces is not None:
        return EqualPieces(call.module, site, dim=pieces[0], pieces=pieces[1], **needs)
    return (DrawOnShards if draws else RewriteCall)(call.module, site, **needs)


def _nothing(call: Call, shards: Shards) -> dict[str, Any]:
    return {}


def _heads(call: Call, shards: Shards) -> dict[str, Any]:
    """Return how the rows of the heads are sharded, where a mask has all heads."""
    if mask_of_heads(call, shards.trace) is None:
        return {}
    return {"layout": str(shards.layouts(argument(call, "out_proj_weight").id)[1])}


def _norm(call: Call, shards: Shards) -> dict[str, Any]:
    """Return the number of normalised elements and dims, and the number of statistics that the norm takes."""
    dims = len(call.args[1] if len(call.args) > 1 else call.kwargs["normalized_shape"])
    shape = shards.trace.tensors[next(refs(call.args))].shape
    return {"dims": dims, "count": prod(shape[len(shape) - dims :]), "statistics": call_record(call.name).statistics}


def _variance(call: Call, shards: Shards) -> dict[str, Any]:
    """Return the dims from the end, whether they stay as dims of 1, the correction to the count, and the number of
    positions on each rank."""
    op = reducing_op(call, Reduction.VARIANCE, shards)
    source, correction = op.args[0].id, op.kwargs.get("correction")
    shape = shards.trace.tensors[source].shape
    dims = _from_end(op, len(shape))
    counts = tuple(
        prod(n for dim, n in enumerate(shards.local_shape(source, rank)) if dim - len(shape) in dims)
        for rank in range(shards.tp)
    )
    keepdim = len(shards.trace.tensors[op.results[0]].shape) == len(shape)
    correction = 1 if correction is None else correction
    return {"dims": dims, "keepdim": keepdim, "correction": correction, "held": counts}


def _length(call: Call, shards: Shards) -> dict[str, Any]:
    """Return the dims from the end, whether they stay as dims of 1, and whether it divides by the lengths."""
    op = reducing_op(call, Reduction.LENGTH, shards)
    rank = len(shards.axes.of(op.args[0].id))
    keepdim = len(shards.trace.tensors[op.results[0]].shape) == rank
    return {"dims": _from_end(op, rank), "keepdim": keepdim, "divides": call_record(call.name).divides}


def _from_end(op: Op, rank: int) -> tuple[int, ...]:
    """Return the dims, counted from the end, over which an op takes a statistic."""
    over = op_record(op.name).over
    assert over is not None
    return tuple(sorted(dim % rank - rank for dim in over(op, rank)))


def _rows(call: Call, shards: Shards) -> dict[str, Any]:
    """Return how many rows the full table has."""
    return {"rows": next(shards.trace.tensors[a.id].shape[0] for a in call.args if shards.is_split(a.id))}


def _product(call: Call, shards: Shards) -> dict[str, Any]:
    product = gathered_dim(call, shards)
    assert product is not None, "other products are refused when reductions are placed"
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
    Reduction.ATTENTION: (AttentionCall, _heads),
}
