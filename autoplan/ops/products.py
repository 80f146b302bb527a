"""Products: matmul and related ops, and linear algebra."""

from __future__ import annotations

from typing import Any

from autoplan.axes.events import Event
from autoplan.axes.terms import find
from autoplan.ops.records.answers import NEVER, Drawn, Linear, Product, Reduction
from autoplan.ops.records.on_shards import NO_SIZES, Local, SplitOp
from autoplan.ops.records.record import INDEPENDENT, UNSPLIT, Decided, op, op_record, python_call, unknown
from autoplan.ops.records.site import Answer, Dims, Site
from autoplan.values import Ref
from autoplan.values.reasons import NotPlaced

# Matrix products: the contracted dim, batch dims, and free dims.


def _operands(at: SplitOp) -> Product:
    product = op_record(at.op.name).product
    assert product is not None
    return product


def inner_sum(at: SplitOp) -> Reduction | None:
    """Return SUM for a product over a sharded dim: each rank has a part of the sum."""
    value = _operands(at).value
    return Reduction.SUM if at.is_split(value, -1) and not at.is_identity(value) else None


def _no_sum(at: SplitOp) -> NotPlaced | None:
    """Refuse a sharded inner dim: the op does more to the sum, so ranks could not add their parts before it."""
    return NotPlaced("across", op=at.op.name) if at.is_split(_operands(at).value, -1) else None


def multiplied(local: Local) -> Any:
    """Return a rank's part of the sum. A bias is added once, by the first rank."""
    operands = _operands(local)
    local.reducing = local.is_split(operands.value, -1) and not local.is_identity(operands.value)
    if local.reducing and local.rank and operands.bias == 0:
        local.kwargs["beta"] = 0
    elif local.reducing and local.rank and operands.bias is not None and len(local.args) > operands.bias:
        local.args[operands.bias] = None
    return local.call()


PRODUCT: Decided = {
    "sizes": NO_SIZES, "reduces": inner_sum, "linear": Linear.NO, "random": NEVER, "runs": multiplied}  # fmt: skip


@op("mm", "bmm", **PRODUCT, product=Product(0, 1, out=(-1, -1)), drawn=Drawn.CONTRACTION)
@op("_int_mm", "_scaled_mm", **PRODUCT, product=Product(0, 1), drawn=Drawn.CONTRACTION)
def matrix_product(site: Site) -> Answer:
    return [_product_of(site, site.inputs[0], site.inputs[1])]


@op("addmm", **PRODUCT, product=Product(1, 2, bias=0, out=(-1, -1)), drawn=Drawn.CONTRACTION)
@op("baddbmm", **PRODUCT, product=Product(1, 2, bias=0), drawn=Drawn.CONTRACTION)
@op("_addmm_activation",
    sizes=NO_SIZES, reduces=_no_sum, linear=Linear.NO, random=NEVER, runs=multiplied,
    product=Product(1, 2, bias=0), drawn=Drawn.CONTRACTION)  # fmt: skip
def matrix_product_with_bias(site: Site) -> Answer:
    bias, left, right = site.inputs[:3]
    return [_product_of(site, left, right, bias)]


def _product_of(site: Site, left: Ref, right: Ref, bias: Ref | None = None) -> Dims:
    """Relate (batch) x rows x inner to (batch) x inner x columns, plus a bias that broadcasts."""
    a, b = site.terms(left), site.terms(right)
    weighted = site.is_of_weights(left) or site.is_of_weights(right)
    site.unify(a[-1], b[-2])
    if left.id in site.state.identities:
        return [find(b[-2]), find(b[-1])]  # a product with the identity sums over nothing
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
    if site.is_of_weights(left):
        dims[-2] = site.from_weight(dims[-2])
    if site.is_of_weights(right):
        dims[-1] = site.from_weight(dims[-1])
    return [find(term) for term in dims]


@op("mv", **PRODUCT, product=Product(0, 1), drawn=Drawn.CONTRACTION)
@op("addmv",
    sizes=NO_SIZES, reduces=_no_sum, linear=Linear.NO, random=NEVER, runs=multiplied,
    product=Product(1, 2, bias=0), drawn=Drawn.CONTRACTION)  # fmt: skip
def matrix_vector(site: Site) -> Answer:
    matrix, vector = site.inputs[-2:]
    rows, inner = site.terms(matrix)
    weighted = site.is_of_weights(matrix) or site.is_of_weights(vector)
    site.unify(inner, site.terms(vector)[0])
    site.contract(inner, Event.CONTRACT_W if weighted else Event.CONTRACT_A)
    if len(site.inputs) == 3:
        site.broadcast([[rows], site.terms(site.inputs[0])], site.out_shape)
    return [[site.from_weight(rows) if site.is_of_weights(matrix) else rows]]


@op("dot", "vdot", **PRODUCT, product=Product(0, 1), drawn=Drawn.CONTRACTION)
def dot(site: Site) -> Answer:
    left, right = site.inputs
    site.unify(site.terms(left)[0], site.terms(right)[0])
    weighted = site.is_of_weights(left) or site.is_of_weights(right)
    site.contract(site.terms(left)[0], Event.CONTRACT_W if weighted else Event.CONTRACT_A)
    return [[]]


@op("outer", "ger", **INDEPENDENT)
def outer(site: Site) -> Answer:
    return [[site.terms(site.inputs[0])[0], site.terms(site.inputs[1])[0]]]


@op("linear", **PRODUCT, product=Product(0, 1, bias=2, inner=-1), drawn=Drawn.CONTRACTION)
def linear(site: Site) -> Answer:
    """Relate features in the last dim to a weight of out x in, not decomposed."""
    x, weight = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    site.unify(x[-1], weight[-1])
    site.contract(x[-1], Event.CONTRACT_W)
    columns = weight[:-1]
    if len(site.inputs) > 2:
        site.unify_equal_sizes(columns, site.terms(site.inputs[2]))
    return [[*x[:-1], *(site.from_weight(find(term)) for term in columns)]]


@op("_grouped_mm", "_scaled_grouped_mm", **PRODUCT, product=Product(0, 1), drawn=Drawn.CONTRACTION)
def grouped_product(site: Site) -> Answer:
    """Relate rows sorted by expert to stacked weights: each run of rows is multiplied by its own expert's."""
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


op("addbmm",
   sizes=NO_SIZES, reduces=_no_sum, linear=Linear.NO, random=NEVER, runs=multiplied,
   product=Product(1, 2, bias=0), drawn=Drawn.CONTRACTION)(unknown)  # fmt: skip

# Only the products that models are written with are gathered: layers, and `x @ w`.
python_call("linear", becomes="linear", product=Product(0, 1, bias=2, out=(0, -1), inner=-1))
python_call("matmul", "__matmul__", becomes="mm")
python_call("bmm", becomes="bmm", product=Product(0, 1))
python_call("addmm", becomes="addmm", product=Product(1, 2, bias=0))


# Linear algebra beyond products: solves, distances, cross products.


@op("linalg_solve_triangular", **UNSPLIT, drawn=Drawn.CUMSUM)
def solve(site: Site) -> Answer:
    """Relate A and B in A x = B: their rows are tied together along the square side."""
    if site.op.kwargs.get("left") is False:
        return None
    matrix, right = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    site.unify(matrix[-1], right[-2])
    site.unify(matrix[-2], right[-2])
    shape = site.out_shape
    batch = site.broadcast([matrix[:-2], right[:-2]], shape[:-2])
    site.mark(right[-2], Event.SOLVE)
    return [[find(term) for term in (*batch, right[-2], right[-1])]]


@op("linalg_inv_ex", "linalg_inv", "inverse", "linalg_cholesky_ex", "cholesky", **UNSPLIT)
def square(site: Site) -> Answer:
    """Return a square matrix of the same dims; every element depends on all."""
    dims = site.terms(site.inputs[0])
    for term in dims[-2:]:
        site.mark(term, Event.SOLVE)
    return [list(dims), *(list(dims[:-2]) for _ in site.outputs[1:])]


@op("_cdist_forward", "cdist", "_euclidean_dist", **UNSPLIT)
def distances(site: Site) -> Answer:
    """Relate every row of one tensor to every row of the other."""
    left, right = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    site.unify(left[-1], right[-1])
    site.mark(left[-1], Event.REDUCE_NORM)
    batch = site.broadcast([left[:-2], right[:-2]], site.out_shape[:-2])
    return [[find(term) for term in (*batch, left[-2], right[-2])]]


@op("linalg_cross", "cross", **UNSPLIT)
def cross(site: Site) -> Answer:
    dims = site.broadcast([site.terms(ref) for ref in site.inputs], site.out_shape)
    site.mark(dims[site.arg(2, "dim", -1)], Event.OPAQUE)
    return [dims]


# The first power is a copy, whose ops do not show that the matrix must be square.
python_call("linalg_matrix_power", "matrix_power", sizes=NO_SIZES, linear=Linear.NO, random=NEVER,
            pays=NotPlaced("matrix-power"))  # fmt: skip
