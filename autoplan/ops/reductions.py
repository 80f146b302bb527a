"""Reductions, sorting and top-k."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoplan.axes.events import Event
from autoplan.axes.terms import ONE
from autoplan.common.layout import Layout
from autoplan.ops.elementwise import elementwise
from autoplan.ops.records.answers import NEVER, Drawn, Linear, Reduction, Supposed
from autoplan.ops.records.on_shards import NO_SIZES, SHAPE, Local, SplitOp, as_written
from autoplan.ops.records.record import UNSPLIT, Decided, call_record, op, op_record, python_call
from autoplan.ops.records.site import Answer, Site, told
from autoplan.values import Op, refs
from autoplan.values.reasons import NotPlaced

# Ops along a dim: sums and other reductions, losses, softmax, cumulative sums.


def _reduced_dims(op: Op, rank: int) -> list[int]:
    """Return the dims of its first input that a reduction runs over: the given ones, or all."""
    place = 2 if op.name in ("norm", "linalg_vector_norm") else 1
    dims = told(op, place, "dim")
    if op.overload == "other" or not rank:  # max(a, b) works element by element
        return []
    if isinstance(dims, (list, tuple)) and dims:
        return [dim for dim in dims if isinstance(dim, int)]
    return [dims] if isinstance(dims, int) and not isinstance(dims, bool) else list(range(rank))


def sums_over(op: Op, rank: int) -> tuple[Reduction, list[int]] | None:
    """Return the dims of its first input that an op sums over, and whether it is a sum or a mean; None for others."""
    runs = op_record(op.name).runs
    how = Reduction.SUM if runs is part_of_a_sum else Reduction.MEAN if runs is part_of_a_mean else None
    return None if how is None else (how, [dim % rank for dim in _reduced_dims(op, rank)])


def _split_layouts(at: SplitOp) -> list[Layout]:
    """Return the layouts of the split dims that the op runs over."""
    dims = _reduced_dims(at.op, len(at.terms(0))) if at.op.args else []
    return [layout for dim in dims if (layout := at.layout(0, dim)) is not None]


def summed_over(how: Reduction) -> Callable[[SplitOp], Reduction | None]:
    """Return a rule that gives this reduction for an op over a split dim."""

    def reduces(at: SplitOp) -> Reduction | None:
        return how if _split_layouts(at) else None

    return reduces


def across(at: SplitOp) -> NotPlaced | None:
    """Refuse a split dim: results of shards cannot be combined into the result for the full dim."""
    return NotPlaced("across", op=at.op.name) if _split_layouts(at) else None


def averaged(at: SplitOp) -> NotPlaced | None:
    """Refuse split inputs of a loss that is averaged within the op."""
    not_averaged = len(at.shards.trace.tensors[at.op.results[0]].shape) > 0
    split = any(at.shards.is_split(tensor) for tensor in refs(at.op.args))
    return NotPlaced("averaged", op=at.op.name) if split and not not_averaged else None


def part_of_a_sum(local: Local) -> Any:
    local.reducing = bool(_split_layouts(local))
    return local.call()


def part_of_a_mean(local: Local) -> Any:
    """Return the local mean, weighted by the rank's share of the positions."""
    for layout in _split_layouts(local):
        local.reducing = True
        local.weight *= len(local.held(layout)) / layout.size
    return local.call()


def exchanged(local: Local) -> Any:
    """Return the recorded result over a split dim, for which ranks exchange statistics of their shards."""
    if not _split_layouts(local):
        return local.call()
    local.exchanged = True
    return list(local.recorded)


def whole_only(local: Local) -> Any:
    if _split_layouts(local):
        raise ValueError("it reads across a sharded dim")
    return local.call()


_EVENTS = {
    "sum": Event.REDUCE_LIN, "mean": Event.REDUCE_LIN, "nansum": Event.REDUCE_LIN, "nanmean": Event.REDUCE_LIN,
    "max": Event.REDUCE_MAX, "min": Event.REDUCE_MAX, "amax": Event.REDUCE_MAX, "amin": Event.REDUCE_MAX,
    "aminmax": Event.REDUCE_MAX, "median": Event.REDUCE_MAX, "nanmedian": Event.REDUCE_MAX, "mode": Event.REDUCE_MAX,
    "argmax": Event.REDUCE_ARG, "argmin": Event.REDUCE_ARG,
    "any": Event.REDUCE_LOGIC, "all": Event.REDUCE_LOGIC, "_is_all_true": Event.REDUCE_LOGIC,
    "_is_any_true": Event.REDUCE_LOGIC, "equal": Event.REDUCE_LOGIC, "count_nonzero": Event.REDUCE_LIN,
    "var": Event.VARIANCE, "std": Event.VARIANCE, "var_mean": Event.VARIANCE, "std_mean": Event.VARIANCE,
    "norm": Event.LENGTH, "linalg_vector_norm": Event.LENGTH, "frobenius_norm": Event.LENGTH,
    "logsumexp": Event.REDUCE_LOGSUMEXP, "prod": Event.REDUCE_PROD,
}  # fmt: skip


ACROSS: Decided = {
    "sizes": NO_SIZES, "reduces": across, "linear": Linear.NO, "random": NEVER, "runs": whole_only}  # fmt: skip


@op("sum",
    sizes=NO_SIZES, reduces=summed_over(Reduction.SUM), linear=Linear.EACH, random=NEVER,
    runs=part_of_a_sum, drawn=Drawn.SUM, over=_reduced_dims)  # fmt: skip
@op("mean",
    sizes=NO_SIZES, reduces=summed_over(Reduction.MEAN), linear=Linear.WITHIN, random=NEVER,
    runs=part_of_a_mean, drawn=Drawn.STATISTIC, over=_reduced_dims)  # fmt: skip
@op("var", "std", "var_mean", "std_mean",
    sizes=NO_SIZES, reduces=summed_over(Reduction.VARIANCE), linear=Linear.NO, random=NEVER,
    runs=exchanged, drawn=Drawn.STATISTIC, over=_reduced_dims)  # fmt: skip
@op("linalg_vector_norm",
    sizes=NO_SIZES, reduces=summed_over(Reduction.LENGTH), linear=Linear.NO, random=NEVER,
    runs=exchanged, drawn=Drawn.STATISTIC, over=_reduced_dims)  # fmt: skip
@op("norm", **ACROSS, drawn=Drawn.STATISTIC, over=_reduced_dims)
@op("amax", **ACROSS, drawn=Drawn.SUM, over=_reduced_dims)
@op("argmax", **ACROSS, drawn=Drawn.TOPK, over=_reduced_dims, supposed=Supposed.POSITIONS)
@op("max", "min", "argmin", **ACROSS, over=_reduced_dims, supposed=Supposed.POSITIONS)
@op("amin", "aminmax", "median", "nanmedian", "mode", "any", "all", "_is_all_true", "_is_any_true", "equal",
    "count_nonzero", "nansum", "nanmean", "frobenius_norm", "logsumexp", "prod",
    **ACROSS, over=_reduced_dims)  # fmt: skip
def reduction(site: Site) -> Answer:
    name = site.op.name.rstrip("_")
    if site.op.overload == "other":  # max(a, b) works element by element
        return elementwise(site)
    dims = site.terms(site.inputs[0])
    gone = {position % len(dims) for position in _reduced_dims(site.op, len(dims))}
    event = _EVENTS[name]
    if event is Event.LENGTH and site.arg(1, "ord", 2) != 2:
        event = Event.REDUCE_NORM
    for position in gone:
        if event in (Event.REDUCE_LIN, Event.VARIANCE, Event.LENGTH):
            site.contract(dims[position], event)
        else:
            site.mark(dims[position], event)
    if len(site.out_shape) == len(dims):
        rest = [ONE if position in gone else term for position, term in enumerate(dims)]
    else:
        rest = [term for position, term in enumerate(dims) if position not in gone]
    return [list(rest) for _ in site.outputs]


@op("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "kl_div",
    "binary_cross_entropy_with_logits",
    sizes=NO_SIZES, reduces=averaged, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def loss(site: Site) -> Answer:
    """Relate prediction and target elementwise; the result is averaged over everything unless asked otherwise."""
    shape = max((site.shape(ref) for ref in site.inputs), key=lambda shape: (len(shape), shape))
    if not site.broadcasts([site.shape(ref) for ref in site.inputs], shape):
        return None
    dims = site.broadcast([site.terms(ref) for ref in site.inputs], shape)
    if site.out_shape == shape:
        return [dims]
    for term in dims:
        site.contract(term, Event.REDUCE_LIN)
    return [[]]


def compares(name: str) -> bool:
    """Return whether a call is a loss between a prediction and a target of its shape."""
    return op_record(call_record(name).becomes).dims is loss


@op("_softmax", "softmax", "_safe_softmax", **UNSPLIT, drawn=Drawn.SOFTMAX)
@op("_log_softmax", "log_softmax", "_masked_softmax", **UNSPLIT)
def softmax(site: Site) -> Answer:
    return _along(site, Event.SOFTMAX)


@op("cumsum", "cumprod", "logcumsumexp", **UNSPLIT, drawn=Drawn.CUMSUM)
@op("_logcumsumexp", "_cummax_helper", "_cummin_helper", "cummax", "cummin", **UNSPLIT)
def cumulative(site: Site) -> Answer:
    return _along(site, Event.CUMSUM)


def _along(site: Site, event: Event) -> Answer:
    """Keep all dims, and mark the one that is worked along."""
    dims = site.terms(site.inputs[0])
    if dims:
        site.mark(dims[site.arg(1, "dim", -1)], event)
    return [list(dims) for _ in site.outputs]


for _name in ("norm", "linalg_vector_norm"):
    python_call(_name, becomes=_name, settles=Reduction.LENGTH)
for _name in ("var", "std", "var_mean", "std_mean"):
    python_call(_name, becomes=_name, settles=Reduction.VARIANCE)
python_call("sum_to_size", becomes="sum", sizes=SHAPE, linear=Linear.NO)
python_call("linalg_norm", becomes="linalg_vector_norm", settles=Reduction.LENGTH)
python_call("normalize", becomes="linalg_vector_norm", settles=Reduction.LENGTH, divides=True)
python_call("cross_entropy", becomes="_log_softmax", loss_of_columns=True)


# Ops whose result is indexed by rank or by value, no longer by the original position.


@op("sort", **UNSPLIT, drawn=Drawn.TOPK, supposed=Supposed.POSITIONS)
@op("argsort", **UNSPLIT, supposed=Supposed.POSITIONS)
@op("msort", **UNSPLIT)
def sort(site: Site) -> Answer:
    """Replace the sorted dim: a position in the result is a rank, no longer the original position."""
    dims = site.terms(site.inputs[0])
    dim = 0 if site.op.name == "msort" else site.arg(1, "dim", -1)
    if dims:
        dims[dim] = site.replaced([dims[dim]], dims[dim].size, Event.SORT)
    return [list(dims) for _ in site.outputs]


@op("topk", **UNSPLIT, drawn=Drawn.TOPK, supposed=Supposed.POSITIONS)
@op("kthvalue", **UNSPLIT, supposed=Supposed.POSITIONS)
def topk(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    if not dims:
        return [[] for _ in site.outputs]
    dim = site.arg(2, "dim", -1)
    site.mark(dims[dim], Event.TOPK)
    if site.op.name == "kthvalue":
        if len(site.out_shape) == len(dims):
            dims[dim] = ONE
        else:
            dims.pop(dim)
    elif site.out_shape[dim] != dims[dim].size:
        dims[dim] = site.fresh(site.out_shape[dim], Event.TOPK)
    return [list(dims) for _ in site.outputs]


@op("bincount", "histc", "unique_consecutive", "_unique2", "unique_dim", **UNSPLIT)
def counted(site: Site) -> Answer:
    """Replace all dims: values become positions, and their number depends on the data."""
    dims = [term for term in site.terms(site.inputs[0]) if term.size > 1]
    return [[site.replaced(dims, size, Event.SORT) for size in site.shape(output)] for output in site.outputs]
