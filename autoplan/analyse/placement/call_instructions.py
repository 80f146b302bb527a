"""Find the calls that reduce over a sharded axis, and choose the instruction that replaces each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from autoplan.analyse.placement.inside_calls import axis_lost_in, why_no_partial_sum, why_sizes_differ
from autoplan.analyse.shards import Shards
from autoplan.analyse.splits.model_ends import looked_up_in
from autoplan.ops import call_record, op_record
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

# `multi_head_attention_forward`: one call that projects, attends and projects back, told its number of heads.
#
# It cuts a packed weight into three by itself, so no rank could call it with a shard of the heads; but what it does is
# known, and a rank can do it on its own heads (`execute/calls/reductions.py`). This says whether a split is just
# that.

_ORDER = (
    *("query", "key", "value", "embed_dim_to_check", "num_heads", "in_proj_weight", "in_proj_bias", "bias_k", "bias_v"),
    *("add_zero_attn", "dropout_p", "out_proj_weight", "out_proj_bias", "training", "key_padding_mask"),
    *("need_weights", "attn_mask", "use_separate_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"),
    *("static_k", "static_v", "average_attn_weights", "is_causal"),
)
_APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_PACKED = ("in_proj_weight", "in_proj_bias")
_LEARNT = ("bias_k", "bias_v")  # a key and a value that belong to no position
_CUT = (*_PACKED, *_APART, *_LEARNT, "out_proj_weight")
_ABSENT = ("static_k", "static_v")


def argument(call: Call, name: str, default: Any = None) -> Any:
    place = _ORDER.index(name)
    return call.args[place] if len(call.args) > place else call.kwargs.get(name, default)


def obstacle(call: Call, shards: Shards) -> NotPlaced | None:
    """Why ranks cannot run this call on their heads; None where they can."""
    given = [name for name in _ABSENT if argument(call, name) not in (None, False, 0, 0.0)]
    if given:
        return NotPlaced("attention-argument", argument=given[0])
    mask = argument(call, "attn_mask")
    if isinstance(mask, Ref) and len(shards.trace.tensors[mask.id].shape) > 2:
        return NotPlaced("mask-of-each-head")
    if argument(call, "average_attn_weights", True) is False:
        return NotPlaced("weights-of-each-head")
    cut = {name: given.id for name in _CUT if isinstance(given := argument(call, name), Ref)}
    others = {ref for ref in refs((call.args, call.kwargs, call.outputs))} - set(cut.values())
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
    """Do the rows come in whole heads?"""
    chunks = [list(rows[i : i + width]) for i in range(0, len(rows), width)]
    return bool(rows) and all(
        chunk[0] % width == 0 and chunk == list(range(chunk[0], chunk[0] + width)) for chunk in chunks
    )


def _number(value: Any) -> int:
    return value.value if isinstance(value, Symbolic) else int(value)


# Which calls sum over a split axis, and how: at each of them ranks must talk.
#
# What an op sums over, its record says (`autoplan/ops`); a call is what its ops are, unless its own record says what it
# is as a whole. What else happens between its ops, `inside_calls.py` looks at. A call whose product is gathered by
# decision is a "gather". Anything that reads across a split dimension and that ranks cannot do together is refused.

_SHARED = (Reduction.SUM, Reduction.MEAN, Reduction.NORM, Reduction.VARIANCE, Reduction.LENGTH)


def reduction_of(call: Call, shards: Shards, gathered: frozenset[int]) -> Reduction | NotPlaced | None:
    """What ranks do together for a call, if anything."""
    known = call_record(call.name)
    if known.pays is Reduction.ATTENTION:
        why = obstacle(call, shards)
        return why or known.pays
    if isinstance(known.pays, NotPlaced):
        return known.pays
    kinds: dict[int, Reduction] = {}
    for index in range(*call.ops):
        op = shards.trace.ops[index]
        if index in gathered and _meets_shares(op, shards) and _brings_shares(call, shards):
            return Reduction.GATHER
        here = op_record(op.name).reduces(SplitOp(shards, op))
        if here is None and known.pays is None and axis_lost_in(op, shards):
            return NotPlaced("across", op=op.name)
        if here is not None:
            here = known.pays or here
            if isinstance(here, NotPlaced):
                return here
            kinds[index] = here
    return _together(call, kinds, shards)


def _meets_shares(op: Op, shards: Shards) -> bool:
    return any(shards.is_split(item.id) for item in op.args if isinstance(item, Ref))


def _brings_shares(call: Call, shards: Shards) -> bool:
    """Is the dim split that a product to gather brings in? What is split may be what it sums over instead."""
    found = gathered_dim(call, shards)
    return found is None or found[0] != str(None)


def _together(call: Call, kinds: dict[int, Reduction], shards: Shards) -> Reduction | NotPlaced | None:
    """What ranks do for a call as a whole, given what its ops (by index) want."""
    known, found = call_record(call.name), next(reversed(kinds.values()), None)
    why = why_no_partial_sum(call, shards, kinds, row_bias_of(call, found)) or why_sizes_differ(call, shards)
    if why:
        return why
    if found in _UNSETTLED and found not in (known.settles, known.pays):
        return NotPlaced(_UNSETTLED[found])
    if found in _SHARED and _counts_twice(call, shards):
        return NotPlaced("held-together")
    return found


# What is done in the place of a whole call, which must be known for it.
_UNSETTLED: dict[Reduction, Unplaceable] = {
    Reduction.ROW: "row-otherwise",
    Reduction.LENGTH: "length-inside",
    Reduction.NORM: "norm-inside",
    Reduction.VARIANCE: "variance-inside",
}


def _counts_twice(call: Call, shards: Shards) -> bool:
    """Would a sum over all ranks count rows of one holder group several times?"""
    layouts = [layout for t in refs((call.args, call.kwargs)) for layout in shards.layouts(t) if layout is not None]
    summed = [layout for layout in layouts if layout.all_carried()]
    return bool(summed) and all(found.shared_rows(shards.tp) for found in summed)


def reducing_op(call: Call, kind: Reduction, shards: Shards) -> Op:
    """The op within a call for which ranks do this together."""
    ops = (shards.trace.ops[index] for index in range(*call.ops))
    return next(op for op in ops if op_record(op.name).reduces(SplitOp(shards, op)) is kind)


def lengths_in(call: Call, shards: Shards) -> int:
    """How many lengths of vectors a call takes."""
    op = reducing_op(call, Reduction.LENGTH, shards)
    return prod(shards.trace.tensors[list(refs(op.outputs))[-1]].shape)


def gathered_dim(call: Call, shards: Shards) -> tuple[str, int] | None:
    """Of a product that may be gathered: the layout of what its weight brings in, and in which dim, from the end, the
    result has it. None for a call that is no such product."""
    table = next((t for op in _lookups(call, shards) if (t := looked_up_in(op, shards.axes)) is not None), None)
    if table is not None:
        return str(shards.layouts(table)[1]), -1
    weight = call.args[1] if len(call.args) > 1 else call.kwargs.get("weight")
    product = call_record(call.name).product
    if product is None or product.out is None or not isinstance(weight, Ref):
        return None
    own, out = product.out
    dims = len(shards.trace.tensors[weight.id].shape)  # where the result has it from the front, it has as many
    return str(shards.layouts(weight.id)[own]), out if out < 0 else out - dims


def _lookups(call: Call, shards: Shards) -> list[Op]:
    """The ops of a call whose columns are gathered by decision and that are no products."""
    return [shards.trace.ops[index] for index in range(*call.ops) if index in shards.axes.gathered]


def row_bias_of(call: Call, reduction: str | NotPlaced | None) -> int | None:
    """The bias a call adds to a partial sum: each rank must add its part only."""
    if reduction == Reduction.ATTENTION:
        bias = argument(call, "out_proj_bias")
        return bias.id if isinstance(bias, Ref) else None
    product = call_record(call.name).product
    if reduction != Reduction.SUM or product is None or product.bias is None:
        return None
    bias = call.args[product.bias] if len(call.args) > product.bias else call.kwargs.get("bias")
    return bias.id if isinstance(bias, Ref) else None


# The instruction for one call of the trace that must run otherwise on a rank: by the kind of its reduction, or what
# else it needs.
#
# This is the one place where a kind of reduction becomes an instruction's class.

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
