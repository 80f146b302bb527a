"""Convolutions, pooling, interpolation: ops over space."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from autoplan.axes.events import Event
from autoplan.axes.terms import Term, find, is_data, leaf, product
from autoplan.ops.records.answers import NEVER, Drawn, Extent, Linear, Product, Reduction
from autoplan.ops.records.on_shards import Groups, Local, SplitOp
from autoplan.ops.records.record import UNSPLIT, op, python_call
from autoplan.ops.records.site import Answer, Site, told
from autoplan.values import Op
from autoplan.values.reasons import NotPlaced

# Convolutions: channels are groups of channels; a rank may have complete groups, or a part of the sum over channels.


def _channel_sum(at: SplitOp) -> Reduction | NotPlaced | None:
    """Return SUM for sharded channels within one group; several groups are sharded as a dim of their own."""
    groups = groups_of(at.op)
    if groups == 1:
        return Reduction.SUM if at.is_split(0, 1) else None
    if not transposed(at.op):
        return Reduction.SUM if at.is_split(1, 1) else None
    if _cut_inside(at, at.terms(1)[0], groups):
        return NotPlaced("inside-groups")
    return None


def _cut_inside(at: SplitOp, term: Term, groups: int) -> bool:
    """Return whether some rank would hold a part of a group."""
    layout, size, tp = at.shards.layout_of(term), term.size // groups, at.shards.tp
    if layout is None:
        return False
    rows_by_group = (Counter(row // size for row in layout.rows(rank, tp)) for rank in range(tp))
    return any(count != size for of_rank in rows_by_group for count in of_rank.values())


def transposed(op: Op) -> bool:
    return bool(told(op, 6, "transposed", False))


def groups_of(op: Op) -> int:
    return int(told(op, 8, "groups", 1))


def convolved(local: Local) -> Any:
    """Run a rank's groups, or its part of the sum over channels; the first rank alone adds the bias."""
    groups, turned = groups_of(local.op), transposed(local.op)
    if groups > 1 and turned:
        local.args[8] = max(1, groups * local.args[0].shape[1] // local.size(0, 1))
    elif groups > 1:
        local.args[8] = max(1, local.args[0].shape[1] // local.args[1].shape[1])
    if local.is_split(0, 1) if groups == 1 else not turned and local.is_split(1, 1):
        local.reducing = True
        if local.rank:
            local.args[2] = None
    return local.call()


def of_own_groups(args: Any, kwargs: Any, own: Sequence[int], rows: int) -> tuple[Any, Any]:
    """Return the arguments of a convolution of a full input, for a rank that has only its `own` of these rows of the
    weight: complete groups, one after the other."""
    groups = args[6] if len(args) > 6 else kwargs.get("groups", 1)
    if groups == 1:
        return args, kwargs
    x, weight, *others = args
    first, count = (number * groups // rows for number in (own[0], len(own)))
    x = x.narrow(1 - weight.dim(), first * weight.shape[1], count * weight.shape[1])
    return (x, weight, *others[:4]), {**kwargs, "groups": count}


def _under_kernel(op: Op, along: Extent) -> tuple[int, int] | None:
    """Return the positions under the kernel; None with strides."""
    stride, padding = (told(op, index, name) for index, name in ((3, "stride"), (4, "padding")))
    at = along.dim - 2
    if at < 0 or transposed(op) or stride[at % len(stride)] != 1:
        return None
    before: int = padding[at % len(padding)]
    return -before, along.length - along.result + before


@op("convolution", "_convolution", "convolution_overrideable",
    sizes=Groups(8), reduces=_channel_sum, linear=Linear.NO, random=NEVER, runs=convolved,
    product=Product(0, 1, bias=2, out=(0, 1), inner=1), drawn=Drawn.CONVOLUTION, reads=_under_kernel)  # fmt: skip
def convolution(site: Site) -> Answer:
    """Relate channels as groups x channels of a group, on both sides; groups pass through independently."""
    x, weight = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    turned, groups = transposed(site.op), groups_of(site.op)
    channels, rows = x[1], weight[0]
    incoming = site.algebra.split(channels, groups, channels.size // groups)
    grouped = site.algebra.split(rows, groups, rows.size // groups)
    if incoming is None or grouped is None:
        return None
    if groups > 1:
        site.unify(incoming[0], grouped[0])
        site.mark(incoming[0], Event.CONV_GROUP)
    inner = grouped[1] if turned else weight[1]
    site.unify(incoming[1], inner)
    site.contract(incoming[1], Event.CONTRACT_W)
    out = product([grouped[0], weight[1]]) if turned else find(rows)
    bias = site.tensor(2, "bias")
    if bias is not None:
        site.unify(out, site.terms(bias)[0])
    spatial = [slid(site, term, size) for term, size in zip(x[2:], site.out_shape[2:], strict=True)]
    for term in weight[2:]:
        site.mark(term, Event.CONV_K)
    return [[x[0], site.from_weight(find(out)), *spatial]]


def slid(site: Site, term: Term, size: int) -> Term:
    """Return the dim that results from sliding a window over a dim."""
    site.mark(term, Event.CONV_SP)
    if term.size == size:
        return term
    return leaf(size, data=True) if is_data(term) else site.fresh(size, Event.CONV_SP)


GROUPED = ("conv1d", "conv2d", "conv3d")
python_call(*GROUPED, becomes="convolution",
            sizes=Groups(6, weight=1))  # fmt: skip
python_call("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", becomes="convolution",
            sizes=Groups(6), product=Product(0, 1, bias=2, out=(1, 1), inner=0))  # fmt: skip


# Pooling, resizing and transforms over space or time: batch and channels pass, neighbours are mixed.


@op("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "adaptive_avg_pool1d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
    "adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa", **UNSPLIT)  # fmt: skip
def windows(site: Site) -> Answer:
    """Relate the spatial dims, the last ones: the name says how many there are."""
    dims = site.terms(site.inputs[0])
    count = next(int(digit) for digit in site.op.name if digit.isdigit())
    first = len(dims) - count
    if len(site.out_shape) != len(dims) or first < 0:
        return None
    answer = dims[:first] + [
        slid(site, term, size) for term, size in zip(dims[first:], site.out_shape[first:], strict=True)
    ]
    return [list(answer) for _ in site.outputs]


@op("im2col", **UNSPLIT)
def im2col(site: Site) -> Answer:
    """Relate B x C x H x W to B x C·kernel x positions."""
    dims = site.terms(site.inputs[0])
    if len(dims) != 4:
        return None
    kernel = site.out_shape[1] // dims[1].size
    inside = site.fresh(kernel, Event.CONV_K)
    places = site.replaced([term for term in dims[2:] if term.size > 1], site.out_shape[2], Event.CONV_SP)
    return [[dims[0], product([dims[1], inside]), places]]


@op("_fft_r2c", "_fft_c2c", "_fft_c2r", **UNSPLIT)
def fourier(site: Site) -> Answer:
    """Mark the transformed dims: every frequency depends on every position."""
    dims = site.terms(site.inputs[0])
    for position in site.arg(1, "dim"):
        size = site.out_shape[position]
        if size == dims[position].size:
            site.mark(dims[position], Event.OPAQUE)
        else:
            dims[position] = site.replaced([dims[position]], size, Event.OPAQUE)
    return [dims]


@op("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback", **UNSPLIT)
def grid_sample(site: Site) -> Answer:
    """Relate B x C x space to lookups at B x places x coordinates."""
    image, grid = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    site.unify(image[0], grid[0])
    for term in image[2:]:
        site.mark(term, Event.GATHER)
    site.mark(grid[-1], Event.SELECT)
    return [[image[0], image[1], *grid[1:-1]]]
