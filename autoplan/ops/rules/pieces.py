"""Ops that take tensors apart and put them together: slices, splits, concatenations, stacks, padding."""

from __future__ import annotations

from autoplan.axes.events import Event
from autoplan.axes.terms import ONE, Term, concatenation, is_data, leaf
from autoplan.ops.rules.site import Answer, Dims, Site, rule

__all__: list[str] = []


def bounds(size: int, start: int | None, stop: int | None) -> tuple[int, int]:
    """Slice bounds as positions, the way Python reads them."""
    low, high, _ = slice(start, stop).indices(size)
    return low, max(low, high)


def slice_of(site: Site, term: Term, start: int | None, stop: int | None, step: int = 1) -> Term:
    """Positions start, start + step, … of a term."""
    low, high = bounds(term.size, start, stop)
    if step == 1:
        return site.algebra.cut(term, low, high)
    size = -(-(high - low) // step)
    whole = term.size % step == 0 and low < step and size == term.size // step
    halves = site.algebra.split(term, term.size // step, step) if whole else None
    if halves is None:
        return site.replaced([term], size, Event.STRIDED)
    site.mark(halves[1], Event.SELECT)
    return halves[0]


@rule("slice", "narrow", "slice_copy", "narrow_copy", view=True)
def slice_(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    dim, start, stop = site.arg(1, "dim", 0), site.arg(2, "start"), site.arg(3, "end")
    if site.op.name.startswith("narrow"):
        start = start + dims[dim].size if start < 0 else start
        stop = start + site.arg(3, "length")
    dims[dim] = slice_of(site, dims[dim], start, stop, site.arg(4, "step", 1))
    return [dims]


@rule("slice_scatter")
def slice_scatter(site: Site) -> Answer:
    """A copy of the first tensor with a slice replaced by the second."""
    dims, source = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    dim = site.arg(2, "dim", 0)
    inside = list(dims)
    inside[dim] = slice_of(site, dims[dim], site.arg(3, "start"), site.arg(4, "end"), site.arg(5, "step", 1))
    site.unify_equal_sizes(inside, source)
    return [site.terms(site.inputs[0])]


@rule("select", "select_copy", view=True)
def select(site: Site) -> Answer:
    """One position; a row of a table may also be looked up so."""
    dims, dim = site.terms(site.inputs[0]), site.arg(1, "dim", 0)
    row = dim == 0 and len(dims) == 2 and site.is_parameter(site.inputs[0])
    site.mark(dims.pop(dim), Event.EMBED_INDEX if row else Event.SELECT)
    return [dims]


@rule("select_scatter")
def select_scatter(site: Site) -> Answer:
    dims, source = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    rest = list(dims)
    site.mark(rest.pop(site.arg(2, "dim", 0)), Event.SELECT)
    site.unify_equal_sizes(rest, source)
    return [dims]


@rule("unbind", "unbind_copy", view=True)
def unbind(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    site.mark(dims.pop(site.arg(1, "dim", 0)), Event.SELECT)
    return [list(dims) for _ in site.outputs]


@rule("split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_split_with_sizes", "unsafe_chunk", "split_copy",
      "split_with_sizes_copy", "tensor_split", view=True)  # fmt: skip
def split(site: Site) -> Answer:
    """Consecutive pieces; their sizes are those of the outputs."""
    source = site.inputs[0]
    dim = site.arg(2, "dim", 0)
    answer: list[Dims | None] = []
    start = 0
    for output in site.outputs:
        dims = site.terms(source)
        size = site.shape(output)[dim]
        dims[dim] = site.algebra.cut(dims[dim], start, start + size)
        start += size
        answer.append(dims)
    return answer


@rule("glu")
def glu(site: Site) -> Answer:
    """Two halves meet in a product."""
    dims = site.terms(site.inputs[0])
    dim = site.arg(1, "dim", -1)
    half = dims[dim].size // 2
    first, second = site.algebra.cut(dims[dim], 0, half), site.algebra.cut(dims[dim], half, 2 * half)
    site.unify(first, second)
    dims[dim] = first
    return [dims]


@rule("cat", "concat", "concatenate")
def cat(site: Site) -> Answer:
    shape = site.out_shape
    dim = site.arg(1, "dim", 0) % len(shape)
    operands = [site.terms(ref) for ref in site.inputs if len(site.shape(ref)) == len(shape)]
    if not operands:
        return None
    for other in operands[1:]:
        site.unify_equal_sizes(operands[0], other, skip=dim)
    dims = operands[0]
    dims[dim] = joined(site, [operand[dim] for operand in operands])
    return [dims]


def joined(site: Site, parts: list[Term]) -> Term:
    """Parts in one row. Beside input data nothing keeps its place: the row is an axis of the input again."""
    parts = [part for part in parts if part.size]
    if len(parts) < 2 or not any(is_data(part) for part in parts):
        return concatenation(parts)
    for part in parts:
        if not is_data(part):
            site.mark(part, Event.JOINS_DATA)
    return leaf(sum(part.size for part in parts), data=True)


@rule("stack")
def stack(site: Site) -> Answer:
    operands = [site.terms(ref) for ref in site.inputs]
    for other in operands[1:]:
        site.unify_equal_sizes(operands[0], other)
    dims = operands[0]
    dims.insert(site.arg(1, "dim", 0) % len(site.out_shape), site.fresh(len(operands), Event.STACK))
    return [dims]


@rule("constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
      "replication_pad2d", "replication_pad3d")  # fmt: skip
def pad(site: Site) -> Answer:
    """Constants before and after: a concatenation with places that hold nothing of the model. Mirrors mix places."""
    dims = site.terms(site.inputs[0])
    amounts = list(site.arg(1, "pad"))
    constant = site.op.name in ("constant_pad_nd", "pad")
    for k in range(len(amounts) // 2):
        before, after = amounts[2 * k], amounts[2 * k + 1]
        if not before and not after:
            continue
        term = dims[-1 - k]
        size = site.out_shape[-1 - k]
        site.mark(term, Event.PAD)
        if is_data(term):
            dims[-1 - k] = leaf(size, data=True)
        elif not constant:
            dims[-1 - k] = site.fresh(size, Event.PAD)
        else:
            kept = site.algebra.cut(term, max(0, -before), term.size + min(0, after))
            edges = [site.fresh(max(0, amount), Event.PAD) for amount in (before, after)]
            dims[-1 - k] = concatenation([edges[0], kept, edges[1]])
    return [dims]


@rule("diagonal", "diagonal_copy", view=True)
def diagonal(site: Site) -> Answer:
    """Two dims run together: each position is taken by its number."""
    dims = site.terms(site.inputs[0])
    first, second = site.arg(2, "dim1", 0) % len(dims), site.arg(3, "dim2", 1) % len(dims)
    gone = [dims[first], dims[second]]
    rest = [term for position, term in enumerate(dims) if position not in (first, second)]
    return [[*rest, site.replaced(gone, site.out_shape[-1], Event.SELECT)]]


@rule("unfold", view=True)
def unfold(site: Site) -> Answer:
    """Windows along one dim: the dim counts windows, and a last dim counts positions inside one."""
    dims = site.terms(site.inputs[0])
    if not dims:
        return None
    dim, size, step = site.arg(1, "dimension"), site.arg(2, "size"), site.arg(3, "step")
    term = dims[dim]
    if size == step and term.size % size == 0:
        halves = site.algebra.split(term, term.size // size, size)
        if halves:
            dims[dim] = halves[0]
            return [[*dims, halves[1]]]
    windows = site.out_shape[dim % len(dims)]
    dims[dim] = site.replaced([term], windows, Event.STRIDED)
    return [[*dims, site.fresh(size, Event.STRIDED, data=is_data(term)) if size > 1 else ONE]]
