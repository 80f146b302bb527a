"""Ops that take tensors apart and put them together: slices, splits, concatenations, stacks, padding."""

from __future__ import annotations

import sys
from typing import Any

from autoplan.axes.events import Event
from autoplan.axes.terms import ONE, Term, concatenation, is_data, leaf
from autoplan.ops.records.answers import NEVER, Along, Drawn, Extent, Linear, Reduction, Shows
from autoplan.ops.records.on_shards import NO_SIZES, Bounds, Lengths, Local, PieceCount, SplitOp, as_written
from autoplan.ops.records.record import INDEPENDENT, UNSPLIT, nothing, op, op_record, python_call
from autoplan.ops.records.site import Answer, Dims, Site, told
from autoplan.ops.views import moved_dims
from autoplan.values import Op


def bounds(size: int, start: int | None, stop: int | None) -> tuple[int, int]:
    """Return slice bounds as positions, the way Python reads them."""
    low, high, _ = slice(start, stop).indices(size)
    return low, max(low, high)


def _row(at: SplitOp) -> Reduction | None:
    """Return ROW for one row of a table whose rows are sharded: the rank that has it provides it."""
    return Reduction.ROW if at.is_split(0, at.told(1, "dim", 0)) else None


def row_of_its_rank(local: Local) -> Any:
    layout = local.layout(0, local.args[1])
    if layout is None:
        return local.call()
    local.reducing = True
    row = local.args[2] % local.size(0, local.args[1])
    rows = local.held(layout)
    local.args[2] = rows.index(row) if row in rows else 0
    return local.call() * float(row in rows)


def sliced(local: Local) -> Any:
    """Slice a shard: the bounds are global, so count the local positions below them."""
    dim = local.argument(1, "dim", 0)
    layout = local.layout(0, dim)
    step = local.argument(4, "step", 1)
    if layout is None or step != 1:
        return local.call()
    size, rows = local.size(0, dim), local.held(layout)
    low, high = bounds(size, local.argument(2, "start", None), local.argument(3, "end", None))
    return local.function(local.args[0], dim, sum(row < low for row in rows), sum(row < high for row in rows), 1)


def split_up(local: Local) -> Any:
    """Split a shard into the local lengths of the pieces."""
    dim = local.argument(2, "dim", 0)
    return local.args[0].split([local.shards.local_shape(out, local.rank)[dim] for out in local.outputs], dim)


def _without(op: Op, dims: list[Any], new: Any, after: int) -> list[Any]:
    gone = told(op, 1, "dim", 0) % len(dims)
    return [*dims[:gone], *dims[gone + 1 :]]


def joins(name: str) -> bool:
    """Return whether an op concatenates values, or stacks them along a new dim."""
    return op_record(name).dims in (cat, stack)


def slice_of(site: Site, term: Term, start: int | None, stop: int | None, step: int = 1) -> Term:
    """Return positions start, start + step, … of a term."""
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


def _from_start(op: Op, along: Extent) -> tuple[int, int] | None:
    """Return the start; None for a start that is counted from the end, or an end that is not."""
    if told(op, 1, "dim", 0) % along.dims != along.dim:
        return 0, 0
    start, stop = told(op, 2, "start") or 0, told(op, 3, "end")
    follows = stop is None or stop < 0 or stop == sys.maxsize or stop in along.lengths
    return (start, start) if start >= 0 and follows and told(op, 4, "step", 1) == 1 else None


def _behind_padding(op: Op, along: Extent) -> tuple[int, int] | None:
    """Return the place behind the padding, which has to be constant."""
    amounts, at = told(op, 1, "pad"), 2 * (along.dims - 1 - along.dim)
    before = amounts[at] if at < len(amounts) else 0
    return (-before, -before) if op.name == "constant_pad_nd" else None


@op("slice", "slice_copy",
    sizes=Bounds(1, 2, 3), reduces=nothing, linear=Linear.NO, random=NEVER, runs=sliced,
    shows=Shows.VIEWED, along=Along("picks"), drawn=Drawn.SPLIT, reads=_from_start)  # fmt: skip
@op("narrow", "narrow_copy",
    sizes=Bounds(1, 2, 3, length=True), reduces=nothing, linear=Linear.NO, random=NEVER,
    runs=as_written, shows=Shows.VIEWED, along=Along("picks"), drawn=Drawn.SPLIT)  # fmt: skip
def slice_(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    dim, start, stop = site.arg(1, "dim", 0), site.arg(2, "start"), site.arg(3, "end")
    if site.op.name.startswith("narrow"):
        start = start + dims[dim].size if start < 0 else start
        stop = start + site.arg(3, "length")
    dims[dim] = slice_of(site, dims[dim], start, stop, site.arg(4, "step", 1))
    return [dims]


@op("slice_scatter", **INDEPENDENT)
def slice_scatter(site: Site) -> Answer:
    """Return a copy of the first tensor with a slice replaced by the second."""
    dims, source = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    dim = site.arg(2, "dim", 0)
    inside = list(dims)
    inside[dim] = slice_of(site, dims[dim], site.arg(3, "start"), site.arg(4, "end"), site.arg(5, "step", 1))
    site.unify_equal_sizes(inside, source)
    return [site.terms(site.inputs[0])]


@op("select", "select_copy",
    sizes=NO_SIZES, reduces=_row, linear=Linear.NO, random=NEVER, runs=row_of_its_rank,
    shows=Shows.VIEWED, along=Along("picks"), drawn=Drawn.SPLIT, moves=_without)  # fmt: skip
def select(site: Site) -> Answer:
    """Drop a dim of which one position is selected; a row of a table may also be looked up this way."""
    dims, dim = site.terms(site.inputs[0]), site.arg(1, "dim", 0)
    row = dim == 0 and len(dims) == 2 and site.is_parameter(site.inputs[0])
    site.mark(dims[dim], Event.EMBED_INDEX if row else Event.SELECT)
    return [moved_dims(site)]


@op("select_scatter", **UNSPLIT)
def select_scatter(site: Site) -> Answer:
    dims, source = site.terms(site.inputs[0]), site.terms(site.inputs[1])
    rest = list(dims)
    site.mark(rest.pop(site.arg(2, "dim", 0)), Event.SELECT)
    site.unify_equal_sizes(rest, source)
    return [dims]


@op("unbind", "unbind_copy", **UNSPLIT, shows=Shows.VIEWED, along=Along("parts", 1), drawn=Drawn.SPLIT, moves=_without)
def unbind(site: Site) -> Answer:
    site.mark(site.terms(site.inputs[0])[site.arg(1, "dim", 0)], Event.SELECT)
    return [moved_dims(site) for _ in site.outputs]


@op("split", "split_with_sizes", "split_copy", "split_with_sizes_copy", "unsafe_split", "unsafe_split_with_sizes",
    sizes=Lengths(), reduces=nothing, linear=Linear.NO, random=NEVER, runs=split_up, shows=Shows.VIEWED,
    along=Along("parts", 2), drawn=Drawn.SPLIT)  # fmt: skip
@op("chunk", "unsafe_chunk",
    sizes=PieceCount(), reduces=nothing, linear=Linear.NO, random=NEVER, runs=split_up,
    shows=Shows.VIEWED, along=Along("parts", 2), drawn=Drawn.SPLIT)  # fmt: skip
@op("tensor_split",
    sizes=PieceCount(even=True), reduces=nothing, linear=Linear.NO, random=NEVER, runs=split_up,
    shows=Shows.VIEWED, along=Along("parts", 2), drawn=Drawn.SPLIT)  # fmt: skip
def split(site: Site) -> Answer:
    """Return the dims of consecutive pieces; their sizes are those of the outputs."""
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


@op("glu", **INDEPENDENT, drawn=Drawn.GATED)
def glu(site: Site) -> Answer:
    """Unify two halves, which are multiplied."""
    dims = site.terms(site.inputs[0])
    dim = site.arg(1, "dim", -1)
    half = dims[dim].size // 2
    first, second = site.algebra.cut(dims[dim], 0, half), site.algebra.cut(dims[dim], half, 2 * half)
    site.unify(first, second)
    dims[dim] = first
    return [dims]


@op("cat", "concat", "concatenate",
    sizes=NO_SIZES, reduces=nothing, linear=Linear.WITHIN, random=NEVER, runs=as_written, drawn=Drawn.CAT)  # fmt: skip
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
    """Return parts as a concatenation; if one is input data, as an axis of the input, without structure."""
    parts = [part for part in parts if part.size]
    if len(parts) < 2 or not any(is_data(part) for part in parts):
        return concatenation(parts)
    for part in parts:
        if not is_data(part):
            site.mark(part, Event.JOINS_DATA)
    return leaf(sum(part.size for part in parts), data=True)


@op("stack",
    sizes=NO_SIZES, reduces=nothing, linear=Linear.WITHIN, random=NEVER, runs=as_written, drawn=Drawn.CAT)  # fmt: skip
def stack(site: Site) -> Answer:
    operands = [site.terms(ref) for ref in site.inputs]
    for other in operands[1:]:
        site.unify_equal_sizes(operands[0], other)
    dims = operands[0]
    dims.insert(site.arg(1, "dim", 0) % len(site.out_shape), site.fresh(len(operands), Event.STACK))
    return [dims]


@op("constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "replication_pad1d",
    "replication_pad2d", "replication_pad3d", **UNSPLIT, reads=_behind_padding)  # fmt: skip
def pad(site: Site) -> Answer:
    """Concatenate padding before and after: constants belong to no axis of the model. Reflections mix positions."""
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
            middle = site.algebra.cut(term, max(0, -before), term.size + min(0, after))
            edges = [site.fresh(max(0, amount), Event.PAD) for amount in (before, after)]
            dims[-1 - k] = concatenation([edges[0], middle, edges[1]])
    return [dims]


@op("diagonal", "diagonal_copy", **UNSPLIT, shows=Shows.VIEWED)
def diagonal(site: Site) -> Answer:
    """Replace two dims by one: each position is selected by its index."""
    dims = site.terms(site.inputs[0])
    first, second = site.arg(2, "dim1", 0) % len(dims), site.arg(3, "dim2", 1) % len(dims)
    gone = [dims[first], dims[second]]
    rest = [term for position, term in enumerate(dims) if position not in (first, second)]
    return [[*rest, site.replaced(gone, site.out_shape[-1], Event.SELECT)]]


@op("unfold", **UNSPLIT, shows=Shows.VIEWED)
def unfold(site: Site) -> Answer:
    """Relate a dim to windows along it: the dim counts windows, and a last dim positions within one."""
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


# Values that are prepended or appended have the length of the rest.
python_call("diff", sizes=NO_SIZES, linear=Linear.NO, random=NEVER, follows="another")
python_call("vsplit", becomes="tensor_split", sizes=PieceCount(dim=0, even=True))
python_call("hsplit", becomes="tensor_split", sizes=PieceCount(dim=1, even=True))
python_call("dsplit", becomes="tensor_split", sizes=PieceCount(dim=2, even=True))
