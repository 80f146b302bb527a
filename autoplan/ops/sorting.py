"""Ops after which a position is a rank or a value, no longer the position it was."""

from __future__ import annotations

from autoplan.axes.events import Event
from autoplan.axes.terms import ONE
from autoplan.ops.records.answers import NEVER, Drawn, Linear, Supposed
from autoplan.ops.records.on_shards import as_written
from autoplan.ops.records.record import kept_whole, op
from autoplan.ops.records.site import Answer, Site
from autoplan.ops.records.sizes import NO_SIZES


@op("sort",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written,
    drawn=Drawn.TOPK, supposed=Supposed.POSITIONS)  # fmt: skip
@op("argsort",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written,
    supposed=Supposed.POSITIONS)  # fmt: skip
@op("msort",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def sort(site: Site) -> Answer:
    """A position in the result is a rank, no longer the position it was."""
    dims = site.terms(site.inputs[0])
    dim = 0 if site.op.name == "msort" else site.arg(1, "dim", -1)
    if dims:
        dims[dim] = site.replaced([dims[dim]], dims[dim].size, Event.SORT)
    return [list(dims) for _ in site.outputs]


@op("topk",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written,
    drawn=Drawn.TOPK, supposed=Supposed.POSITIONS)  # fmt: skip
@op("kthvalue",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written,
    supposed=Supposed.POSITIONS)  # fmt: skip
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


@op("bincount", "histc", "unique_consecutive", "_unique2", "unique_dim",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def counted(site: Site) -> Answer:
    """Values become positions; how many there are depends on the data."""
    dims = [term for term in site.terms(site.inputs[0]) if term.size > 1]
    return [[site.replaced(dims, size, Event.SORT) for size in site.shape(output)] for output in site.outputs]
