"""Pooling, resizing and transforms over space or time: batch and channels pass, neighbours are mixed."""

from __future__ import annotations

from autoplan.axes.events import Event
from autoplan.axes.terms import product
from autoplan.ops.convolutions import slid
from autoplan.ops.records.answers import NEVER, Linear
from autoplan.ops.records.on_shards import as_written
from autoplan.ops.records.record import kept_whole, op
from autoplan.ops.records.site import Answer, Site
from autoplan.ops.records.sizes import NO_SIZES


@op("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", "max_pool2d", "max_pool3d", "max_pool2d_with_indices",
    "max_pool3d_with_indices", "adaptive_avg_pool1d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
    "adaptive_avg_pool2d", "adaptive_max_pool1d", "adaptive_max_pool2d", "upsample_nearest1d", "upsample_nearest2d",
    "upsample_nearest3d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d", "upsample_linear1d",
    "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d", "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def windows(site: Site) -> Answer:
    """The spatial dims are the last ones: as many as the name says."""
    dims = site.terms(site.inputs[0])
    count = next(int(digit) for digit in site.op.name if digit.isdigit())
    first = len(dims) - count
    if len(site.out_shape) != len(dims) or first < 0:
        return None
    answer = dims[:first] + [
        slid(site, term, size) for term, size in zip(dims[first:], site.out_shape[first:], strict=True)
    ]
    return [list(answer) for _ in site.outputs]


@op("im2col",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def im2col(site: Site) -> Answer:
    """B x C x H x W becomes B x C·kernel x positions."""
    dims = site.terms(site.inputs[0])
    if len(dims) != 4:
        return None
    kernel = site.out_shape[1] // dims[1].size
    inside = site.fresh(kernel, Event.CONV_K)
    places = site.replaced([term for term in dims[2:] if term.size > 1], site.out_shape[2], Event.CONV_SP)
    return [[dims[0], product([dims[1], inside]), places]]


@op("_fft_r2c", "_fft_c2c", "_fft_c2r",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def fourier(site: Site) -> Answer:
    """Every frequency depends on every position."""
    dims = site.terms(site.inputs[0])
    for position in site.arg(1, "dim"):
        size = site.out_shape[position]
        if size == dims[position].size:
            site.mark(dims[position], Event.OPAQUE)
        else:
            dims[position] = site.replaced([dims[position]], size, Event.OPAQUE)
    return [dims]


@op("grid_sampler_2d", "grid_sampler_3d", "_grid_sampler_2d_cpu_fallback",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def grid_sample(site: Site) -> Answer:
    """B x C x space looked up at B x places x coordinates."""
    image, grid = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    site.unify(image[0], grid[0])
    for term in image[2:]:
        site.mark(term, Event.GATHER)
    site.mark(grid[-1], Event.SELECT)
    return [[image[0], image[1], *grid[1:-1]]]
