"""Ops that work on each element by itself: dims of all tensor arguments that meet are one."""

from __future__ import annotations

from autoplan.axes.events import Event
from autoplan.ops.rules.site import Answer, Site, rule

__all__: list[str] = []

_ARITHMETIC = """
add sub rsub mul div true_divide floor_divide remainder fmod pow neg abs sign sgn signbit square sqrt rsqrt reciprocal
exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erfinv
lgamma digamma floor ceil round trunc frac clamp clamp_min clamp_max maximum minimum fmax fmin lerp addcmul addcdiv
hypot xlogy logaddexp logaddexp2 copysign nan_to_num heaviside special_expit real imag angle complex polar conj _conj
_conj_physical resolve_conj resolve_neg sinc logit deg2rad rad2deg i0 float_power threshold ldexp
"""
_ACTIVATIONS = """
relu relu6 sigmoid silu gelu elu selu celu leaky_relu hardswish hardtanh hardsigmoid mish softplus softsign tanhshrink
log_sigmoid log_sigmoid_forward hardshrink softshrink _prelu_kernel
"""
_LOGIC = """
where eq ne gt lt ge le logical_not logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor bitwise_not
bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ isnan isinf isneginf isposinf
isfinite isclose masked_fill
"""
_FILLS = "fill zero copy"  # x[...] = y: y stretches to x
_RANDOM = "dropout native_dropout feature_dropout alpha_dropout bernoulli normal uniform exponential random rrelu"


@rule(*_ARITHMETIC.split(), *_ACTIVATIONS.split(), *_LOGIC.split(), *_FILLS.split())
def elementwise(site: Site) -> Answer:
    """Broadcasting: aligned at the end, sizes of 1 stretch."""
    if not site.inputs or not site.broadcasts([site.shape(ref) for ref in site.inputs], site.out_shape):
        return None
    dims = site.broadcast([site.terms(ref) for ref in site.inputs], site.out_shape)
    if dims and site.op.name == "add":  # a linear layer may be carried out as a product and a sum
        dims[-1] = site.from_weight(dims[-1])
    return [list(dims) for _ in site.outputs]


@rule("clone", "detach", "detach_copy", "alias", "alias_copy", "_to_copy", "contiguous", "lift", "lift_fresh",
      "lift_fresh_copy", "to", "type_as", "positive", "_pin_memory", "pin_memory", view=True)  # fmt: skip
def same(site: Site) -> Answer:
    """The same values, perhaps elsewhere or in another precision."""
    first = site.inputs[0]
    if site.shape(first) != site.out_shape:
        return None
    return [site.terms(first)]


@rule(*_RANDOM.split())
def random(site: Site) -> Answer:
    """Elementwise, with numbers drawn along every dim."""
    answer = elementwise(site)
    for term in answer[0] or [] if answer else []:
        site.mark(term, Event.RANDOM)
    return answer


@rule("tril", "triu")
def triangle(site: Site) -> Answer:
    """What is kept depends on the position in the last two dims."""
    dims = site.terms(site.inputs[0])
    for term in dims[-2:]:
        site.mark(term, Event.TRIANGLE)
    return [dims]


@rule("bucketize", "searchsorted")
def bucketize(site: Site) -> Answer:
    """Each element is looked up in a sorted row of boundaries."""
    values, boundaries = (0, 1) if site.op.name == "bucketize" else (1, 0)
    table, looked_up = site.tensor(boundaries, "boundaries"), site.tensor(values, "self")
    if table is None or looked_up is None or len(site.shape(table)) != 1:
        return None
    site.mark(site.terms(table)[0], Event.INDEX)
    return [site.terms(looked_up)]


@rule("view_as_complex", view=True)
def view_as_complex(site: Site) -> Answer:
    """The last dim is the pair (real, imaginary)."""
    dims = site.terms(site.inputs[0])
    site.mark(dims[-1], Event.SELECT)
    return [dims[:-1]]


@rule("view_as_real", "_view_as_real", view=True)
def view_as_real(site: Site) -> Answer:
    """A last dim appears: the pair (real, imaginary)."""
    return [[*site.terms(site.inputs[0]), site.fresh(2, Event.STACK)]]
