"""Ops along a dim: sums and other reductions, norms, softmax, cumulative sums, sorting."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.axes.events import Event
from autoplan.axes.terms import ONE, find
from autoplan.ops.rules.elementwise import elementwise
from autoplan.ops.rules.site import Answer, Dims, Site, rule

__all__: list[str] = []

_REDUCTIONS = {
    "sum": Event.REDUCE_LIN, "mean": Event.REDUCE_LIN, "nansum": Event.REDUCE_LIN, "nanmean": Event.REDUCE_LIN,
    "max": Event.REDUCE_MAX, "min": Event.REDUCE_MAX, "amax": Event.REDUCE_MAX, "amin": Event.REDUCE_MAX,
    "aminmax": Event.REDUCE_MAX, "median": Event.REDUCE_MAX, "nanmedian": Event.REDUCE_MAX, "mode": Event.REDUCE_MAX,
    "argmax": Event.REDUCE_ARG, "argmin": Event.REDUCE_ARG,
    "any": Event.REDUCE_LOGIC, "all": Event.REDUCE_LOGIC, "_is_all_true": Event.REDUCE_LOGIC,
    "_is_any_true": Event.REDUCE_LOGIC, "equal": Event.REDUCE_LOGIC, "count_nonzero": Event.REDUCE_LIN,
    "var": Event.SPREAD, "std": Event.SPREAD, "var_mean": Event.REDUCE_VAR, "std_mean": Event.REDUCE_VAR,
    "norm": Event.LENGTH, "linalg_vector_norm": Event.LENGTH, "frobenius_norm": Event.LENGTH,
    "logsumexp": Event.REDUCE_LOGSUMEXP, "prod": Event.REDUCE_PROD,
}  # fmt: skip


@rule(*_REDUCTIONS)
def reduction(site: Site) -> Answer:
    name = site.op.name.rstrip("_")
    if site.op.overload == "other":  # max(a, b) works element by element
        return elementwise(site)
    dims = site.terms(site.inputs[0])
    gone = _reduced(site, name, len(dims))
    event = _REDUCTIONS[name]
    if event is Event.LENGTH and site.arg(1, "ord", 2) != 2:
        event = Event.REDUCE_NORM
    for position in gone:
        if event in (Event.REDUCE_LIN, Event.SPREAD, Event.LENGTH):
            site.contract(dims[position], event)
        else:
            site.mark(dims[position], event)
    if len(site.out_shape) == len(dims):
        rest = [ONE if position in gone else term for position, term in enumerate(dims)]
    else:
        rest = [term for position, term in enumerate(dims) if position not in gone]
    return [list(rest) for _ in site.outputs]


def _reduced(site: Site, name: str, rank: int) -> set[int]:
    """Positions that are reduced: the given ones, or all."""
    place = 2 if name in ("norm", "linalg_vector_norm") else 1
    given = site.arg(place, "dim")
    if isinstance(given, (list, tuple)) and given:
        chosen: Sequence[int] = given
    elif isinstance(given, int) and not isinstance(given, bool):
        chosen = [given]
    else:
        chosen = range(rank)
    return {position % max(1, rank) for position in chosen} if rank else set()


@rule("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div",
      "binary_cross_entropy_with_logits")  # fmt: skip
def loss(site: Site) -> Answer:
    """Elementwise between prediction and target, then averaged over everything unless asked not to."""
    shape = max((site.shape(ref) for ref in site.inputs), key=lambda shape: (len(shape), shape))
    if not site.broadcasts([site.shape(ref) for ref in site.inputs], shape):
        return None
    dims = site.broadcast([site.terms(ref) for ref in site.inputs], shape)
    if site.out_shape == shape:
        return [dims]
    for term in dims:
        site.contract(term, Event.REDUCE_LIN)
    return [[]]


@rule("_softmax", "softmax", "_log_softmax", "log_softmax", "_safe_softmax", "_masked_softmax")
def softmax(site: Site) -> Answer:
    return _along(site, Event.SOFTMAX)


@rule("cumsum", "cumprod", "logcumsumexp", "_logcumsumexp", "_cummax_helper", "_cummin_helper", "cummax", "cummin")
def cumulative(site: Site) -> Answer:
    return _along(site, Event.CUMSUM)


def _along(site: Site, event: Event) -> Answer:
    """Same dims; one of them is worked along."""
    dims = site.terms(site.inputs[0])
    if dims:
        site.mark(dims[site.arg(1, "dim", -1)], event)
    return [list(dims) for _ in site.outputs]


@rule("sort", "argsort", "msort")
def sort(site: Site) -> Answer:
    """A position in the result is a rank, no longer the position it was."""
    dims = site.terms(site.inputs[0])
    dim = 0 if site.op.name == "msort" else site.arg(1, "dim", -1)
    if dims:
        dims[dim] = site.replaced([dims[dim]], dims[dim].size, Event.SORT)
    return [list(dims) for _ in site.outputs]


@rule("topk", "kthvalue")
def topk(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    dim = site.arg(2, "dim", -1)
    if dims:
        site.mark(dims[dim], Event.TOPK)
    if site.op.name == "kthvalue":
        if len(site.out_shape) == len(dims):
            dims[dim] = ONE
        else:
            dims.pop(dim)
    elif dims and site.out_shape[dim] != dims[dim].size:
        dims[dim] = site.fresh(site.out_shape[dim], Event.TOPK)
    return [list(dims) for _ in site.outputs]


@rule("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm")
def layer_norm(site: Site) -> Answer:
    """Statistics over the last dims, then a scale and a shift of the same dims."""
    dims = site.terms(site.inputs[0])
    width = len(site.arg(1, "normalized_shape"))
    for term in dims[len(dims) - width :]:
        site.contract(term, Event.NORM)
    for parameter in site.inputs[1:3]:
        site.unify_equal_sizes(dims[len(dims) - width :], site.terms(parameter))
    statistics = dims[: len(dims) - width] + [ONE] * width
    return [[find(term) for term in dims], *(list(statistics) for _ in site.outputs[1:])]


@rule("native_group_norm")
def group_norm(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    groups = site.arg(6, "group")
    halves = site.algebra.split(dims[1], groups, dims[1].size // groups)
    if halves is None:
        return None
    for term in (halves[1], *dims[2:]):
        site.contract(term, Event.REDUCE_VAR)  # statistics that ranks do not exchange, unlike a layer norm's
    _scale(site, dims, [site.tensor(1, "weight"), site.tensor(2, "bias")])
    return [[find(term) for term in dims], *([find(dims[0]), find(halves[0])] for _ in site.outputs[1:])]


@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
      "_native_batch_norm_legit_functional", "_batch_norm_with_update", "cudnn_batch_norm", "batch_norm")  # fmt: skip
def batch_norm(site: Site) -> Answer:
    """Each channel for itself. In training the statistics run over everything else."""
    dims = site.terms(site.inputs[0])
    _scale(site, dims, [site.tensor(position) for position in range(1, 5)])
    if site.op.name != "_native_batch_norm_legit_no_training" and site.arg(5, "training") is True:
        for term in (dims[0], *dims[2:]):
            site.contract(term, Event.REDUCE_VAR)
    extras: list[Dims | None] = []
    for output in site.outputs[1:]:
        extras.append([find(dims[1])] if site.shape(output) == (dims[1].size,) else None)
    return [[find(term) for term in dims], *extras]


def _scale(site: Site, dims: Dims, parameters: Sequence[object]) -> None:
    """Per-channel parameters lie along the second dim."""
    for ref in site.inputs[1:]:
        if ref in parameters and site.shape(ref) == (dims[1].size,):
            site.unify(dims[1], site.terms(ref)[0])


@rule("_weight_norm_interface", "_weight_norm")
def weight_norm(site: Site) -> Answer:
    """A weight scaled to given lengths: one length per position of `dim`, over all other dims."""
    dims, lengths = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    kept = site.arg(2, "dim", 0) % len(dims)
    for position, term in enumerate(dims):
        if position != kept:
            site.contract(term, Event.NORM)
    site.unify_equal_sizes(dims, lengths)
    answers: list[Dims | None] = [[find(term) for term in dims]]
    return answers + [[find(term) for term in lengths] for _ in site.outputs[1:]]


@rule("bincount", "histc", "unique_consecutive", "_unique2", "unique_dim")
def counted(site: Site) -> Answer:
    """Values become positions; how many there are depends on the data."""
    dims = [term for term in site.terms(site.inputs[0]) if term.size > 1]
    return [[site.replaced(dims, size, Event.SORT) for size in site.shape(output)] for output in site.outputs]


@rule("multinomial")
def multinomial(site: Site) -> Answer:
    *batch, choices = site.terms(site.inputs[0])
    return [[*batch, site.replaced([choices], site.out_shape[-1], Event.SORT)]]
