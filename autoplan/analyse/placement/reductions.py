"""Which calls sum over a split axis, and how: at each of them ranks must talk.

What an op sums over, its record says (`autoplan/ops`); a call is what its ops are, unless its own record says what it
is as a whole. What else happens between its ops, `inside_calls.py` looks at. A call whose product is gathered by
decision is a "gather". Anything that reads across a split dimension and that ranks cannot do together is refused.
"""

from __future__ import annotations

from math import prod

from autoplan.analyse.placement.fused_attention import argument, obstacle
from autoplan.analyse.placement.inside_calls import axis_lost_in, why_no_partial_sum, why_sizes_differ
from autoplan.analyse.shards import Shards
from autoplan.analyse.splits.tables import looked_up_in
from autoplan.ops import call_record, op_record
from autoplan.ops.records.answers import Reduction
from autoplan.ops.records.on_shards import SplitOp
from autoplan.values import Call, Op, Ref, refs
from autoplan.values.not_placed import Unplaceable
from autoplan.values.reasons import NotPlaced

__all__ = ["gathered_dim", "lengths_in", "reducing_op", "reduction_of", "row_bias_of"]

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
    layouts = [found for t in refs((call.args, call.kwargs)) for found in shards.layouts(t) if found is not None]
    summed = [found for found in layouts if found.all_carried()]
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
