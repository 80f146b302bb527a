"""Linear algebra beyond products: solves, distances, cross products."""

from __future__ import annotations

from autoplan.axes.events import Event
from autoplan.axes.terms import find
from autoplan.ops.records.answers import NEVER, Drawn, Linear
from autoplan.ops.records.on_shards import as_written
from autoplan.ops.records.record import kept_whole, op, python_call
from autoplan.ops.records.site import Answer, Site
from autoplan.ops.records.sizes import NO_SIZES
from autoplan.values.reasons import NotPlaced


@op("linalg_solve_triangular",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written,
    drawn=Drawn.CUMSUM)  # fmt: skip
def solve(site: Site) -> Answer:
    """A x = B: rows of A and B are tied together along the square side."""
    if site.op.kwargs.get("left") is False:
        return None
    matrix, right = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    site.unify(matrix[-1], right[-2])
    site.unify(matrix[-2], right[-2])
    shape = site.out_shape
    batch = site.broadcast([matrix[:-2], right[:-2]], shape[:-2])
    site.mark(right[-2], Event.SOLVE)
    return [[find(term) for term in (*batch, right[-2], right[-1])]]


@op("linalg_inv_ex", "linalg_inv", "inverse", "linalg_cholesky_ex", "cholesky",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def square(site: Site) -> Answer:
    """A square matrix of the same dims; every element depends on all."""
    dims = site.terms(site.inputs[0])
    for term in dims[-2:]:
        site.mark(term, Event.SOLVE)
    return [list(dims), *(list(dims[:-2]) for _ in site.outputs[1:])]


@op("_cdist_forward", "cdist", "_euclidean_dist",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def distances(site: Site) -> Answer:
    """Every row of one against every row of the other."""
    left, right = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    site.unify(left[-1], right[-1])
    site.mark(left[-1], Event.REDUCE_NORM)
    batch = site.broadcast([left[:-2], right[:-2]], site.out_shape[:-2])
    return [[find(term) for term in (*batch, left[-2], right[-2])]]


@op("linalg_cross", "cross",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def cross(site: Site) -> Answer:
    dims = site.broadcast([site.terms(ref) for ref in site.inputs], site.out_shape)
    site.mark(dims[site.arg(2, "dim", -1)], Event.OPAQUE)
    return [dims]


# To the power of one it is a copy, whose ops do not say that rows and columns must be as many.
python_call("linalg_matrix_power", "matrix_power", sizes=NO_SIZES, linear=Linear.NO, random=NEVER,
            pays=NotPlaced("matrix-power"))  # fmt: skip
