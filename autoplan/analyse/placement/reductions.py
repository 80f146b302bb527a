"""Which calls sum over a split axis, and how: at each of them ranks must talk.

A contraction over a split dimension leaves each rank with a part of the sum ("sum"), so does a mean ("mean"), a
lookup in a table whose rows are split ("embedding"; "row" when it is table[number]); a norm's statistic needs all of
the dimension ("norm"), and so do a variance ("spread") and a vector's length ("length"). A call whose product is
gathered by decision is "gather".
Anything else that reads across a split dimension is refused.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from autoplan.analyse.placement.fused_attention import FUSED_ATTENTION, argument, obstacle
from autoplan.analyse.shards import Shards, refs
from autoplan.axes.terms import Term
from autoplan.ops.rules.experts import BOX
from autoplan.values import Call, Op, Ref, Trace

__all__ = [
    "CONVOLUTIONS",
    "DIVIDING",
    "PRODUCTS",
    "TRANSPOSED",
    "gathered_dim",
    "lengths_in",
    "reduced_dims",
    "reduction_of",
    "row_bias_of",
    "scaled_dims",
]

PRODUCTS = ("linear", "matmul", "__matmul__", "mm")
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")  # calls whose channels are the dim before the spatial ones
TRANSPOSED = ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
_COMPOSITE = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd")
_MATRIX = frozenset({"mm", "bmm", "mv", "dot", "_grouped_mm"})
_BIASED = frozenset({"addmm", "baddbmm"})
_NORMS = frozenset({"native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"})
_SUMMABLE = {"sum": "sum", "mean": "mean", "var": "spread", "std": "spread", "linalg_vector_norm": "length"}
DIVIDING = ("normalize", "_weight_norm")  # calls that divide by the lengths that they take
_LENGTH_CALLS = ("norm", "linalg_norm", "linalg_vector_norm", *DIVIDING)
_LENGTH_OPS = ("linalg_vector_norm", "_weight_norm_interface")
_OTHER_REDUCTIONS = frozenset(
    [
        "max",
        "min",
        "amax",
        "amin",
        "var_mean",
        "std_mean",
        "argmax",
        "argmin",
        "any",
        "all",
        "logsumexp",
        "norm",
        "prod",
    ]
)


def reduction_of(call: Call, shards: Shards, gathered: frozenset[int]) -> str | None:
    """None, "sum", "mean", "norm", "spread", "length", "embedding", "row", "gather", "attention", "refused: why"."""
    found: str | None = None
    if call.name == FUSED_ATTENTION:
        why = obstacle(call, shards)
        return f"refused: {why}" if why else "attention"
    if call.name in _COMPOSITE:
        return f"refused: {call.name} is told its number of heads and cuts its packed weight by itself"
    for index in range(*call.ops):
        op = shards.trace.ops[index]
        if index in gathered and any(shards.is_split(t) for t in _tensors(op)):
            return "gather"
        here = _op_reduction(op, shards)
        if here:
            found = "norm" if call.name in _NORMS else here  # on some devices its ops are recorded one by one
    if found == "row" and call.name != "__getitem__":
        return "refused: a row of a split table that is taken otherwise than by table[number]"
    if found == "length" and call.name not in _LENGTH_CALLS:
        return f"refused: lengths over a split axis within {call.name}"
    if found in ("sum", "mean", "norm", "spread", "length") and _counts_twice(call, shards):
        return "refused: a sum over an axis that several ranks hold together"
    return found


def _counts_twice(call: Call, shards: Shards) -> bool:
    """Would a sum over all ranks count rows of one holder group several times?"""
    layouts = [found for t in refs((call.args, call.kwargs)) for found in shards.layouts(t) if found is not None]
    summed = [found for found in layouts if all(found.carried(shards.tp))]
    return bool(summed) and all(found.shared_rows(shards.tp) for found in summed)


def _tensors(op: Op) -> list[int]:
    return [item.id for item in op.args if isinstance(item, Ref)]


def _split(shards: Shards, tensor: Any, dim: int) -> bool:
    terms = shards.axes.of(tensor.id)
    return bool(terms) and shards.layout_of(terms[dim]) is not None


def _op_reduction(op: Op, shards: Shards) -> str | None:
    name = op.name
    if name in _MATRIX and op.args[0].id not in shards.axes.identities:
        return "sum" if _split(shards, op.args[0], -1) else None
    if name in _BIASED:
        return "sum" if _split(shards, op.args[1], -1) else None
    if name in ("convolution", "_convolution"):
        return _convolution(op, shards)
    if name in _NORMS:
        count = len(op.args[1])
        dims = range(-count, 0)
        return "norm" if any(_split(shards, op.args[0], d) for d in dims) else None
    if name == BOX:  # routed tokens get the sum over all experts; sorted ones stay apart by expert
        stack, _, routing, _ = op.args
        return "sum" if routing and _split(shards, stack[0], 0) else None
    if name == "embedding":
        return "embedding" if _split(shards, op.args[0], 0) else None
    if name == "select":
        return "row" if _split(shards, op.args[0], op.args[1]) else None
    if name == "_weight_norm_interface":
        return "length" if any(_split(shards, op.args[0], d) for d in scaled_dims(op, shards)) else None
    if name in _SUMMABLE or name in _OTHER_REDUCTIONS:
        if any(_split(shards, op.args[0], d) for d in reduced_dims(op, shards)):
            return _SUMMABLE.get(name) or f"refused: {name} over a split dimension"
        return None
    if name.startswith("_scaled_dot_product") and _split(shards, op.args[0], 3):
        return "refused: attention over a split head width"
    return None


def _convolution(op: Op, shards: Shards) -> str | None:
    groups = op.args[8]
    if groups == 1:
        return "sum" if _split(shards, op.args[0], 1) else None
    rows, columns = shards.axes.of(op.args[1].id)[:2]
    if not op.args[6]:
        return "sum" if shards.layout_of(columns) is not None else None
    if _cut_inside(shards, rows, groups):
        return "refused: a transposed convolution over channels inside its groups"
    return None


def _cut_inside(shards: Shards, term: Term, groups: int) -> bool:
    """Does some rank hold a part of a group?"""
    layout, size = shards.layout_of(term), term.size // groups
    if layout is None:
        return False
    held = (Counter(row // size for row in layout.rows(rank, shards.tp)) for rank in range(shards.tp))
    return any(count != size for of_rank in held for count in of_rank.values())


def reduced_dims(op: Op, shards: Shards) -> list[int]:
    """The dims that a sum, mean or variance runs over."""
    if not op.args or not isinstance(op.args[0], Ref):
        return []
    rank = len(shards.axes.of(op.args[0].id))
    position = 2 if op.name in ("linalg_vector_norm", "norm") else 1
    dims = op.args[position] if len(op.args) > position else op.kwargs.get("dim")
    if isinstance(dims, bool) or dims is None or dims == () or isinstance(dims, float):
        return list(range(rank))
    return [dims] if isinstance(dims, int) else [d for d in dims if isinstance(d, int)] if rank else []


def lengths_in(call: Call, trace: Trace) -> tuple[Op, int]:
    """The op within a call that takes lengths of vectors, and how many they are."""
    op = next(op for op in trace.ops[slice(*call.ops)] if op.name in _LENGTH_OPS)
    return op, prod(trace.tensors[list(refs(op.outputs))[-1]].shape)


def scaled_dims(op: Op, shards: Shards) -> list[int]:
    """The dims over which a weight norm takes lengths: all but one."""
    kept = op.args[2] if len(op.args) > 2 else op.kwargs.get("dim", 0)
    rank = len(shards.axes.of(op.args[0].id))
    return [dim for dim in range(rank) if dim != kept % rank]


def gathered_dim(call: Call, shards: Shards) -> tuple[str, int] | None:
    """Of a product that may be gathered: the layout of what its weight brings in, and in which dim, from the end, the
    result has it. None for a call that is no such product."""
    weight = call.args[1] if len(call.args) > 1 else call.kwargs.get("weight")
    if call.name not in (*PRODUCTS, *CONVOLUTIONS) or not isinstance(weight, Ref):
        return None
    dims = len(shards.trace.tensors[weight.id].shape)
    own = 0 if call.name == "linear" or call.name in CONVOLUTIONS else dims - 1
    return str(shards.layouts(weight.id)[own]), 1 - dims if call.name in CONVOLUTIONS else -1


def row_bias_of(call: Call, reduction: str | None) -> int | None:
    """The bias a call adds to a partial sum: each rank must add its share only."""
    if reduction == "attention":
        bias = argument(call, "out_proj_bias")
        return bias.id if isinstance(bias, Ref) else None
    if reduction != "sum":
        return None
    if call.name in ("linear", *CONVOLUTIONS, *TRANSPOSED):
        bias = call.args[2] if len(call.args) > 2 else call.kwargs.get("bias")
        return bias.id if isinstance(bias, Ref) else None
    if call.name in ("addmm", "baddbmm") and isinstance(call.args[0], Ref):
        return call.args[0].id
    return None
