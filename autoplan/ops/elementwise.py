"""Elementwise ops: dims of all tensor arguments are unified by broadcasting. Ops that only query a tensor and touch
none of its dims; and how literals of a call affect its result.
"""

from __future__ import annotations

from typing import Literal

from autoplan.axes.events import Event
from autoplan.ops.records.answers import NEVER, Drawn, Linear, Shows, Supposed
from autoplan.ops.records.on_shards import NO_SIZES, SHAPE, Lengths, PieceCount, as_written
from autoplan.ops.records.record import (
    INDEPENDENT,
    LINEAR,
    LINEAR_FIRST,
    UNSPLIT,
    call_record,
    kept_whole,
    nothing,
    op,
    op_record,
    python_call,
    unknown,
)
from autoplan.ops.records.site import Answer, Site

# Ops by which Python code inside a torch call uses a number of positions that it counted.
COUNTING = frozenset({"add", "sub", "rsub", "mul", "div", "pow", "scalar_tensor", "full"})

_ARITHMETIC = """
floor_divide remainder fmod pow abs sign sgn signbit square sqrt rsqrt reciprocal
exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh asinh acosh atanh erfc erfinv
lgamma digamma floor ceil round trunc frac clamp clamp_min clamp_max maximum minimum fmax fmin lerp
hypot xlogy logaddexp logaddexp2 copysign nan_to_num heaviside special_expit angle complex polar conj _conj
_conj_physical resolve_conj resolve_neg sinc logit deg2rad rad2deg i0 float_power ldexp
"""
_ACTIVATIONS = """
relu relu6 sigmoid silu gelu elu selu celu leaky_relu hardswish hardtanh hardsigmoid mish softplus softsign tanhshrink
log_sigmoid log_sigmoid_forward hardshrink softshrink _prelu_kernel tanh exp erf threshold
"""
_LOGIC = """
eq logical_not logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not
bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ isnan isinf isneginf isposinf
isclose masked_fill
"""
_COMPARISONS = "ne gt lt ge le isfinite"  # comparisons that mostly hold
_WRITES = "fill zero"


@op(*_ARITHMETIC.split(), **INDEPENDENT)
@op(*_LOGIC.split(), *_WRITES.split(), **INDEPENDENT)
@op(*_COMPARISONS.split(), **INDEPENDENT, supposed=Supposed.TRUE)
@op("copy", **INDEPENDENT, overwrites=True)
@op("where", **INDEPENDENT, drawn=Drawn.CHOICE)
@op(*_ACTIVATIONS.split(), **INDEPENDENT, drawn=Drawn.ACTIVATION)
@op("add",
    sizes=NO_SIZES, reduces=nothing, linear=Linear.ADDS, random=NEVER, runs=as_written, drawn=Drawn.ADD)  # fmt: skip
@op("sub", "rsub",
    sizes=NO_SIZES, reduces=nothing, linear=Linear.SUBTRACTS, random=NEVER, runs=as_written,
    drawn=Drawn.ADD)  # fmt: skip
@op("addcmul", "addcdiv", **INDEPENDENT, drawn=Drawn.ADD)
@op("mul", **LINEAR, drawn=Drawn.MUL)
@op("div", **LINEAR_FIRST, drawn=Drawn.MUL)
@op("true_divide", **LINEAR_FIRST)
@op("neg", **LINEAR)
@op("real", "imag", **INDEPENDENT, shows=Shows.VIEWED)
def elementwise(site: Site) -> Answer:
    """Broadcast: dims are aligned at the end, sizes of 1 expand."""
    if not site.inputs or not site.broadcasts([site.shape(ref) for ref in site.inputs], site.out_shape):
        return None
    dims = site.broadcast([site.terms(ref) for ref in site.inputs], site.out_shape)
    if dims and site.op.name == "add":  # a linear layer may run as a product and a sum
        dims[-1] = site.from_weight(dims[-1])
    return [list(dims) for _ in site.outputs]


@op("detach", "detach_copy", **INDEPENDENT, shows=Shows.RESHAPED, detaches=True)
@op("alias", "alias_copy", **INDEPENDENT, shows=Shows.RESHAPED)
@op("_to_copy", **LINEAR, shows=Shows.COPIED, supposed=Supposed.FALSE)
@op("clone", "contiguous", "lift", "lift_fresh", "lift_fresh_copy", "to", "positive", "_pin_memory", "pin_memory",
    **LINEAR, shows=Shows.COPIED)  # fmt: skip
@op("type_as", **LINEAR_FIRST, shows=Shows.COPIED)
def same(site: Site) -> Answer:
    """Keep the dims: the same values, perhaps elsewhere or in another precision."""
    first = site.inputs[0]
    if site.shape(first) != site.out_shape:
        return None
    return [site.terms(first)]


@op("tril", "triu",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.WITHIN, random=NEVER, runs=as_written)  # fmt: skip
def triangle(site: Site) -> Answer:
    """Mark the last two dims: whether an element is kept depends on its position there."""
    dims = site.terms(site.inputs[0])
    for term in dims[-2:]:
        site.mark(term, Event.TRIANGLE)
    return [dims]


@op("bucketize", "searchsorted", **UNSPLIT)
def bucketize(site: Site) -> Answer:
    """Keep the dims of the elements, each of which is looked up in a sorted row of boundaries."""
    values, boundaries = (0, 1) if site.op.name == "bucketize" else (1, 0)
    table, looked_up = site.tensor(boundaries, "boundaries"), site.tensor(values, "self")
    if table is None or looked_up is None or len(site.shape(table)) != 1:
        return None
    site.mark(site.terms(table)[0], Event.INDEX)
    return [site.terms(looked_up)]


@op("view_as_complex", **UNSPLIT, shows=Shows.VIEWED)
def view_as_complex(site: Site) -> Answer:
    """Drop the last dim, the pair (real, imaginary)."""
    dims = site.terms(site.inputs[0])
    site.mark(dims[-1], Event.SELECT)
    return [dims[:-1]]


@op("view_as_real", "_view_as_real", **INDEPENDENT, shows=Shows.VIEWED)
def view_as_real(site: Site) -> Answer:
    """Append a last dim, the pair (real, imaginary)."""
    return [[*site.terms(site.inputs[0]), site.fresh(2, Event.STACK)]]


python_call("__add__", "__iadd__", "__radd__", becomes="add")
python_call("__sub__", "__isub__", "__rsub__", becomes="sub")
python_call("__mul__", "__imul__", "__rmul__", becomes="mul")
python_call("__truediv__", "__itruediv__", becomes="div")
python_call("__neg__", becomes="neg")
python_call("attr:data", sizes=NO_SIZES, linear=Linear.NO, random=NEVER, detaches=True)
python_call("type", "float", "half", "bfloat16", "double", becomes="_to_copy")


@op("_assert_tensor_metadata", "sym_size", "sym_numel", "sym_stride", "sym_storage_offset", **INDEPENDENT)
def asks(_: Site) -> Answer:
    """Return no tensors, and mark nothing."""
    return []


op("_local_scalar_dense", **INDEPENDENT, tells=True)(unknown)


def literals_say(
    name: str,
) -> Literal["nothing", "elementwise", "function", "numbers", "pieces", "rows", "sizes", "all"]:
    """Return which literals of a call affect its result on a shard. Elementwise ops behave alike for any number; rates
    are tried in both modes. "pieces": the first number is the number or the length of the pieces, and a dim may
    follow. "sizes": all, which are sizes. "rows": all, and none of them is a dim."""
    record = call_record(name)
    if record.sizes == SHAPE:
        return "sizes"
    if isinstance(record.sizes, Lengths) or (isinstance(record.sizes, PieceCount) and record.sizes.dim is None):
        return "pieces"
    if op_record(record.becomes or name).dims is elementwise:
        if record.linear is not Linear.NO:
            return "nothing"
        return "elementwise" if record.random.when == "never" else "function"
    if op_record(record.becomes or name).drawn is Drawn.LOOKUP:
        return "rows"
    return "numbers" if record.random.when == "rate" else "all"
