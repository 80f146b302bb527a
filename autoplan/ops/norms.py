"""Norms: statistics over some dims, then a scale and a shift."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from autoplan.axes.events import Event
from autoplan.axes.terms import ONE, find
from autoplan.ops.records.answers import NEVER, Drawn, Linear, Reduction
from autoplan.ops.records.on_shards import NO_SIZES, Groups, Local, SplitOp
from autoplan.ops.records.record import UNSPLIT, kept_whole, op, python_call
from autoplan.ops.records.site import Answer, Dims, Site, told
from autoplan.values import Op

_SMALLEST = {"torch.float32": 2.0**-23, "torch.float64": 2.0**-52}  # the default epsilon


def _statistics(at: SplitOp) -> Reduction | None:
    """Return NORM over split dims: ranks exchange the statistics, and all else is local."""
    width = len(at.told(1, "normalized_shape"))
    return Reduction.NORM if any(at.is_split(0, dim) for dim in range(-width, 0)) else None


def normed(local: Local) -> Any:
    """Run a norm over a split dim with the recorded statistics, which ranks exchange; the rest is local."""
    if _statistics(local) is None:
        return local.call()
    local.exchanged = True
    with_mean = "layer_norm" in local.op.name
    x, weight, bias = local.args[0], local.argument(2, "weight", None), None
    recorded = (*(() if with_mean else (None,)), *local.recorded[1:])  # mean and scale
    mean, scale = recorded[:2] if len(local.recorded) > 1 else _exchanged(local, with_mean)
    if with_mean:
        x, bias = x - mean, local.argument(3, "bias", None)
    x = x * scale
    x = x if weight is None else x * weight
    return [x if bias is None else x + bias, *local.recorded[1:]]


def _exchanged(local: Local, with_mean: bool) -> tuple[Any, Any]:
    """Return the statistics over all ranks: in inference mode the norm is one op, which does not record them."""
    shape = local.told(1, "normalized_shape")
    dims, count = tuple(range(-len(shape), 0)), prod(local.size(0, dim) for dim in range(-len(shape), 0))
    values = local.on_ranks(0)
    mean = sum(x.sum(dims, keepdim=True) for x in values) / count if with_mean else 0.0
    squares = sum(((x - mean) ** 2).sum(dims, keepdim=True) for x in values) / count
    smallest = local.argument(4 if with_mean else 3, "eps", None)
    return mean, (squares + (_SMALLEST.get(str(values[0].dtype), 0.0) if smallest is None else smallest)) ** -0.5


def group_normed(local: Local) -> Any:
    """Run a group norm with the local numbers of groups and channels."""
    channels, full = local.args[0].shape[1], local.size(0, 1)
    local.args[4], local.args[6] = channels, local.args[6] * channels // full
    return local.call()


def _all_but_one(op: Op, rank: int) -> list[int]:
    """Return the dims over which a weight norm takes lengths."""
    dim_kept = told(op, 2, "dim", 0)
    return [dim for dim in range(rank) if dim != dim_kept % rank]


def _lengths(at: SplitOp) -> Reduction | None:
    dims = _all_but_one(at.op, len(at.terms(0)))
    return Reduction.LENGTH if any(at.is_split(0, dim) for dim in dims) else None


def scaled(local: Local) -> Any:
    """Run a weight norm over a split dim with the recorded lengths, which ranks exchange."""
    if _lengths(local) is None:
        return local.call()
    local.exchanged = True
    lengths = local.recorded[1]
    return [local.args[0] * (local.args[1] / lengths), lengths]


@op("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm",
    sizes=NO_SIZES, reduces=_statistics, linear=Linear.NO, random=NEVER, runs=normed, drawn=Drawn.NORM)  # fmt: skip
def layer_norm(site: Site) -> Answer:
    """Relate the last dims, over which statistics run, to a scale and a shift of the same dims."""
    dims = site.terms(site.inputs[0])
    width = len(site.arg(1, "normalized_shape"))
    for term in dims[len(dims) - width :]:
        site.contract(term, Event.NORM)
    for parameter in site.inputs[1:3]:
        site.unify_equal_sizes(dims[len(dims) - width :], site.terms(parameter))
    statistics = dims[: len(dims) - width] + [ONE] * width
    return [[find(term) for term in dims], *(list(statistics) for _ in site.outputs[1:])]


@op("native_group_norm",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=group_normed,
    drawn=Drawn.NORM)  # fmt: skip
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


@op("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training",
    "_native_batch_norm_legit_functional", "_batch_norm_with_update", "cudnn_batch_norm", "batch_norm",
    **UNSPLIT, drawn=Drawn.NORM)  # fmt: skip
def batch_norm(site: Site) -> Answer:
    """Relate channels, which are independent; in training the statistics run over everything else."""
    dims = site.terms(site.inputs[0])
    _scale(site, dims, [site.tensor(position) for position in range(1, 5)])
    for term in (dims[0], *dims[2:]):
        site.contract(term, Event.REDUCE_VAR)
    extras: list[Dims | None] = []
    for output in site.outputs[1:]:
        extras.append([find(dims[1])] if site.shape(output) == (dims[1].size,) else None)
    return [[find(term) for term in dims], *extras]


def _scale(site: Site, dims: Dims, parameters: Sequence[object]) -> None:
    """Unify per-channel parameters with the second dim."""
    for ref in site.inputs[1:]:
        if ref in parameters and site.shape(ref) == (dims[1].size,):
            site.unify(dims[1], site.terms(ref)[0])


@op("_weight_norm_interface", "_weight_norm",
    sizes=NO_SIZES, reduces=_lengths, linear=Linear.NO, random=NEVER, runs=scaled, over=_all_but_one)  # fmt: skip
def weight_norm(site: Site) -> Answer:
    """Relate a weight to the lengths it is scaled to: one per position of `dim`, over all other dims."""
    dims, lengths = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    kept_dim = site.arg(2, "dim", 0) % len(dims)
    for position, term in enumerate(dims):
        if position != kept_dim:
            site.contract(term, Event.NORM)
    site.unify_equal_sizes(dims, lengths)
    answers: list[Dims | None] = [[find(term) for term in dims]]
    return answers + [[find(term) for term in lengths] for _ in site.outputs[1:]]


# On some devices the ops of these are recorded one by one: together they are still a norm. Calls by the ops' own
# names also return the statistics, and have no implementation on shards.
for _name, _statistics_of_row in (("layer_norm", 2), ("rms_norm", 1)):
    python_call(_name, becomes=_name, pays=Reduction.NORM, statistics=_statistics_of_row)
python_call("group_norm", becomes="native_group_norm", sizes=Groups(1))
python_call("_weight_norm", becomes="_weight_norm", settles=Reduction.LENGTH, divides=True)
