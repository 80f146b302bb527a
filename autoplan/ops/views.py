"""Ops that show the same elements in another shape or order."""

from __future__ import annotations

from typing import Any

from autoplan.axes.events import Event
from autoplan.axes.terms import ONE, Term, leaf, product
from autoplan.ops.records.answers import NEVER, Linear, Shows
from autoplan.ops.records.on_shards import NO_SIZES, SHAPE, Local, RepeatEach, Repeats, Unflattened, as_written
from autoplan.ops.records.record import (
    INDEPENDENT,
    LINEAR,
    LINEAR_FIRST,
    UNSPLIT,
    kept_whole,
    nothing,
    op,
    op_record,
    python_call,
    unknown,
    writes_in_place,
)
from autoplan.ops.records.site import Answer, Dims, Site, told
from autoplan.values import Op


def reshaped(local: Local) -> Any:
    """Reshape a shard: the shape passed is global, so use the local one."""
    if local.op.overload == "dtype":  # the same bits as another type
        return local.call()
    return local.args[0].reshape(local.shape)


def expanded(local: Local) -> Any:
    return local.args[0].expand(local.shape)


def _with_new(op: Op, dims: list[Any], new: Any, after: int) -> list[Any]:
    place = told(op, 1, "dim") % after
    return [*dims[:place], new, *dims[place:]]


def _swapped(op: Op, dims: list[Any], new: Any, after: int) -> list[Any]:
    dims, i, j = list(dims), told(op, 1, "dim0"), told(op, 2, "dim1")
    if dims:
        dims[i], dims[j] = dims[j], dims[i]
    return dims


def _stretched(op: Op, dims: list[Any], new: Any, after: int) -> list[Any]:
    return [new] * (after - len(dims)) + dims


def reshapes_in_place(name: str) -> bool:
    """Return whether an op reshapes a tensor itself, or reorders its dims, as einsum does."""
    record = op_record(name)
    return writes_in_place(name) and record.shows in (Shows.RESHAPED, Shows.VIEWED) and not record.detaches


def moved_dims(site: Site) -> Dims:
    """Return the dims of a view, by its record."""
    moves = op_record(site.op.name).moves
    assert moves is not None
    return moves(site.op, site.terms(site.inputs[0]), ONE, len(site.out_shape))


def stretches(name: str) -> bool:
    """Return whether an op expands dims of 1 to the shape that it is given."""
    return op_record(name).moves is _stretched


@op("view", "reshape", "_unsafe_view", "_reshape_alias", "view_copy", "_reshape_copy",
    sizes=SHAPE, reduces=nothing, linear=Linear.EACH, random=NEVER, runs=reshaped, shows=Shows.RESHAPED)  # fmt: skip
@op("squeeze", "flatten", "ravel", "squeeze_copy", **LINEAR, shows=Shows.RESHAPED)
@op("unsqueeze", "unsqueeze_copy", **LINEAR, shows=Shows.RESHAPED, moves=_with_new)
@op("view_as", "reshape_as", **LINEAR_FIRST, shows=Shows.RESHAPED)
@op("unflatten",
    sizes=Unflattened(), reduces=nothing, linear=Linear.EACH, random=NEVER, runs=reshaped,
    shows=Shows.RESHAPED)  # fmt: skip
def reshape(site: Site) -> Answer:
    """Redistribute the factors: the same elements in the same order."""
    source = site.inputs[0]
    if site.op.name == "view" and site.op.overload == "dtype":
        # Bits read as another type: only the last dim may change
        dims = site.terms(site.inputs[0])
        if site.shape(site.inputs[0]) != site.out_shape:
            dims[-1] = site.replaced(dims[-1:], site.out_shape[-1], Event.OPAQUE)
        return [dims]
    return [site.reshape(site.terms(source), site.out_shape)]


@op("t", "mT", "adjoint", "matrix_H",
    **LINEAR, shows=Shows.VIEWED, moves=lambda op, dims, new, after: [*dims[:-2], *dims[-2:][::-1]])  # fmt: skip
@op("numpy_T", **LINEAR, shows=Shows.VIEWED, moves=lambda op, dims, new, after: dims[::-1])
@op("transpose", "swapaxes", "swapdims", "transpose_copy", **LINEAR, shows=Shows.VIEWED, moves=_swapped)
@op("permute", "permute_copy",
    **LINEAR, shows=Shows.VIEWED,
    moves=lambda op, dims, new, after: [dims[i] for i in told(op, 1, "dims")])  # fmt: skip
def moved(site: Site) -> Answer:
    """Keep each dim, in another place."""
    return [moved_dims(site)]


@op("expand", "expand_copy", "broadcast_to",
    sizes=SHAPE, reduces=nothing, linear=Linear.EACH, random=NEVER, runs=expanded, shows=Shows.VIEWED,
    alike=True, moves=_stretched)  # fmt: skip
@op("expand_as", **LINEAR_FIRST, shows=Shows.VIEWED, moves=_stretched)
def expand(site: Site) -> Answer:
    """Repeat dims of 1: the repetitions are a new axis, along which all is equal."""
    dims, shape = moved_dims(site), site.out_shape
    return [[term if term.size == size else leaf(size) for term, size in zip(dims, shape, strict=True)]]


@op("repeat",
    sizes=Repeats(), reduces=nothing, linear=Linear.NO, random=NEVER, runs=as_written,
    shows=Shows.REPEATED)  # fmt: skip
def repeat(site: Site) -> Answer:
    """Repeat the dim as a unit: the repetition is the major factor."""
    dims = site.terms(site.inputs[0])
    times = site.arg(1, "repeats")
    dims = [ONE] * (len(times) - len(dims)) + dims
    return [[_repeated(term, n, outer=True) for term, n in zip(dims, times, strict=True)]]


@op("repeat_interleave",
    sizes=RepeatEach(), reduces=nothing, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def repeat_interleave(site: Site) -> Answer:
    """Repeat each element: the repetition is the minor factor. A tensor of counts yields positions instead."""
    times = site.arg(1, "repeats")
    if isinstance(times, int):
        dims = site.terms(site.inputs[0])
        dim = site.arg(2, "dim")
        if dim is None:
            dims, dim = [product(dims)], 0
        dims[dim] = _repeated(dims[dim], times, outer=False)
        return [dims]
    if len(site.inputs) == 1:
        site.mark(site.terms(site.inputs[0])[0], Event.INDEX)
        return [[site.fresh(site.out_shape[0], Event.CREATED, data=True)]]
    return None


def _repeated(term: Term, times: int, *, outer: bool) -> Term:
    if times == 0 or term.size == 0:
        return leaf(0)
    return product([leaf(times), term] if outer else [term, leaf(times)])


@op("flip", "roll",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.WITHIN, random=NEVER, runs=as_written)  # fmt: skip
def rearranged(site: Site) -> Answer:
    """Mark the dims along which positions are rearranged; with no dims given, all."""
    dims = site.terms(site.inputs[0])
    where = site.arg(1, "dims") if site.op.name == "flip" else site.arg(2, "dims", ())
    event = Event.FLIP if site.op.name == "flip" else Event.ROLL
    for position in where or range(len(dims)):
        site.mark(dims[position], event)
    return [dims]


@op("pixel_shuffle", **INDEPENDENT)
def pixel_shuffle(site: Site) -> Answer:
    """Relate C·r·r x H x W to C x H·r x W·r."""
    *batch, channels, height, width = site.terms(site.inputs[0])
    r = site.arg(1, "upscale_factor")
    halves = site.algebra.split(channels, channels.size // (r * r), r * r)
    inner = halves and site.algebra.split(halves[1], r, r)
    if not halves or not inner:
        return None
    for side in inner:  # the op takes one number for both sides
        site.mark(side, Event.STRIDED)
    return [[*batch, halves[0], product([height, inner[0]]), product([width, inner[1]])]]


@op("pixel_unshuffle", **INDEPENDENT)
def pixel_unshuffle(site: Site) -> Answer:
    """Relate C x H·r x W·r to C·r·r x H x W."""
    *batch, channels, height, width = site.terms(site.inputs[0])
    r = site.arg(1, "downscale_factor")
    rows = site.algebra.split(height, height.size // r, r)
    columns = site.algebra.split(width, width.size // r, r)
    if not rows or not columns:
        return None
    for side in (rows[1], columns[1]):
        site.mark(side, Event.STRIDED)
    return [[*batch, product([channels, rows[1], columns[1]]), rows[0], columns[0]]]


op("as_strided", **UNSPLIT, shows=Shows.VIEWED)(unknown)

python_call("movedim", "moveaxis", becomes="permute")
python_call("tile", becomes="repeat")
python_call("broadcast_tensors", "meshgrid", sizes=NO_SIZES, linear=Linear.NO, random=NEVER, follows="all")
