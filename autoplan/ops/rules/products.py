"""Matrix products, convolutions and attention: what is summed over, what is a batch position, what passes through."""

from __future__ import annotations

from autoplan.axes.events import Event
from autoplan.axes.terms import Term, find, is_data, leaf, product
from autoplan.ops.rules.site import Answer, Dims, Site, rule
from autoplan.values import Ref

__all__: list[str] = []


@rule("mm", "bmm", "_int_mm", "_scaled_mm")
def matrix_product(site: Site) -> Answer:
    return [_product_of(site, site.inputs[0], site.inputs[1])]


@rule("addmm", "baddbmm", "_addmm_activation")
def matrix_product_with_bias(site: Site) -> Answer:
    bias, left, right = site.inputs[:3]
    return [_product_of(site, left, right, bias)]


def _product_of(site: Site, left: Ref, right: Ref, bias: Ref | None = None) -> Dims:
    """(batch) x rows x inner with (batch) x inner x columns, plus a bias that stretches."""
    a, b = site.terms(left), site.terms(right)
    weighted = site.is_weight(left) or site.is_weight(right)
    site.unify(a[-1], b[-2])
    if left.id in site.state.identities:
        return [find(b[-2]), find(b[-1])]  # nothing is summed over: what comes out is what went in
    site.contract(a[-1], Event.CONTRACT_W if weighted else Event.CONTRACT_A)
    if len(a) == 3:
        site.unify(a[0], b[0])
        site.mark(a[0], Event.BATCH_W if weighted else Event.BATCH_A)
    if not weighted:
        site.mark(a[-2], Event.FREE_A)
        site.mark(b[-1], Event.FREE_A)
    dims = [*a[:-2], a[-2], b[-1]]
    if bias is not None:
        site.broadcast([dims, site.terms(bias)], site.out_shape)
    if site.is_weight(left):
        dims[-2] = site.from_weight(dims[-2])
    if site.is_weight(right):
        dims[-1] = site.from_weight(dims[-1])
    return [find(term) for term in dims]


@rule("mv", "addmv")
def matrix_vector(site: Site) -> Answer:
    matrix, vector = site.inputs[-2:]
    rows, inner = site.terms(matrix)
    weighted = site.is_weight(matrix) or site.is_weight(vector)
    site.unify(inner, site.terms(vector)[0])
    site.contract(inner, Event.CONTRACT_W if weighted else Event.CONTRACT_A)
    if len(site.inputs) == 3:
        site.broadcast([[rows], site.terms(site.inputs[0])], site.out_shape)
    return [[site.from_weight(rows) if site.is_weight(matrix) else rows]]


@rule("dot", "vdot")
def dot(site: Site) -> Answer:
    left, right = site.inputs
    site.unify(site.terms(left)[0], site.terms(right)[0])
    weighted = site.is_weight(left) or site.is_weight(right)
    site.contract(site.terms(left)[0], Event.CONTRACT_W if weighted else Event.CONTRACT_A)
    return [[]]


@rule("outer", "ger")
def outer(site: Site) -> Answer:
    return [[site.terms(site.inputs[0])[0], site.terms(site.inputs[1])[0]]]


@rule("linear")
def linear(site: Site) -> Answer:
    """Not decomposed: features last, weight as out x in."""
    x, weight = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    site.unify(x[-1], weight[-1])
    site.contract(x[-1], Event.CONTRACT_W)
    columns = weight[:-1]
    if len(site.inputs) > 2:
        site.unify_equal_sizes(columns, site.terms(site.inputs[2]))
    return [[*x[:-1], *(site.from_weight(find(term)) for term in columns)]]


@rule("_grouped_mm", "_scaled_grouped_mm")
def grouped_product(site: Site) -> Answer:
    """Rows sorted by expert; each run of rows meets the weight of its own expert."""
    left, right = site.inputs[:2]
    x, weight = site.terms(left), site.terms(right)
    if len(x) != 2 or len(weight) != 3:
        return None
    site.unify(x[-1], weight[-2])
    site.contract(x[-1], Event.CONTRACT_W)
    site.mark(weight[0], Event.EXPERT_BATCH)
    for ref in site.inputs[2:]:
        if len(site.shape(ref)) == 1 and site.shape(ref)[0] == weight[0].size:
            site.unify(weight[0], site.terms(ref)[0])
    return [[x[0], site.from_weight(weight[-1])]]


@rule("convolution", "_convolution", "convolution_overrideable")
def convolution(site: Site) -> Answer:
    """Channels are groups x channels of a group, on both sides; groups pass through, each for itself."""
    x, weight = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    transposed, groups = site.arg(6, "transposed"), site.arg(8, "groups")
    channels, rows = x[1], weight[0]
    incoming = site.algebra.split(channels, groups, channels.size // groups)
    grouped = site.algebra.split(rows, groups, rows.size // groups)
    if incoming is None or grouped is None:
        return None
    if groups > 1:
        site.unify(incoming[0], grouped[0])
        site.mark(incoming[0], Event.CONV_GROUP)
    inner = grouped[1] if transposed else weight[1]
    site.unify(incoming[1], inner)
    site.contract(incoming[1], Event.CONTRACT_W)
    out = product([grouped[0], weight[1]]) if transposed else find(rows)
    bias = site.tensor(2, "bias")
    if bias is not None:
        site.unify(out, site.terms(bias)[0])
    spatial = [slid(site, term, size) for term, size in zip(x[2:], site.out_shape[2:], strict=True)]
    for term in weight[2:]:
        site.mark(term, Event.CONV_K)
    return [[x[0], site.from_weight(find(out)), *spatial]]


def slid(site: Site, term: Term, size: int) -> Term:
    """A dim over which a window slides."""
    site.mark(term, Event.CONV_SP)
    if term.size == size:
        return term
    return leaf(size, data=True) if is_data(term) else site.fresh(size, Event.CONV_SP)


@rule("_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
      "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
      "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math",
      "_scaled_dot_product_attention_math_for_mps", "scaled_dot_product_attention")  # fmt: skip
def attention(site: Site) -> Answer:
    """Batch x heads x positions x width. Fewer key heads than query heads: each serves a run of query heads."""
    q, k, v = (site.terms(ref) for ref in site.inputs[:3])
    if not len(q) == len(k) == len(v) == 4:
        return None
    for other in (k, v):
        site.unify(q[0], other[0])
    site.unify(k[1], v[1])
    site.unify(k[2], v[2])
    site.unify(q[3], k[3])
    heads, shared = q[1], k[1]
    runs = site.algebra.split(heads, shared.size, heads.size // shared.size) if shared.size else None
    if runs is None:
        return None
    site.unify(runs[0], shared)
    site.contract(q[3], Event.CONTRACT_A)
    site.contract(k[2], Event.CONTRACT_A)
    site.mark(k[2], Event.SOFTMAX)
    site.mark(q[2], Event.FREE_A)
    site.mark(v[3], Event.FREE_A)
    site.mark(heads, Event.BATCH_A)
    scores = [q[0], heads, q[2], k[2]]
    mask = site.tensor(3, "attn_mask") or site.tensor(3, "attn_bias") or site.op.kwargs.get("attn_mask")
    if isinstance(mask, Ref):
        site.broadcast([scores, site.terms(mask)], [term.size for term in scores])
    return [[find(term) for term in (q[0], heads, q[2], v[3])], *_attention_extras(site, scores)]


def _attention_extras(site: Site, scores: Dims) -> list[Dims | None]:
    """Besides the result: log-sums per query, weights, or the state of a random generator."""
    extras: list[Dims | None] = []
    for output in site.outputs[1:]:
        shape = site.shape(output)
        fits = len(shape) in (3, 4) and all(n == term.size for n, term in zip(shape, scores, strict=False))
        extras.append([find(term) for term in scores[: len(shape)]] if fits else None)
    return extras
