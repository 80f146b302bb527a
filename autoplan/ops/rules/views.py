"""Ops that show the same elements in another shape or order."""

from __future__ import annotations

from autoplan.axes.events import Event
from autoplan.axes.terms import ONE, Term, leaf, product
from autoplan.ops.rules.site import Answer, Site, rule

__all__: list[str] = []


@rule("view", "_unsafe_view", "reshape", "_reshape_alias", "_reshape_copy", "view_copy", "view_as", "reshape_as",
      "ravel", "flatten", "unflatten", "unsqueeze", "squeeze", "unsqueeze_copy", "squeeze_copy", view=True)  # fmt: skip
def reshape(site: Site) -> Answer:
    """Same elements in the same order: factors are distributed anew."""
    source = site.inputs[0]
    if site.op.name == "view" and site.op.overload == "dtype":
        return _reinterpret(site)
    return [site.reshape(site.terms(source), site.out_shape)]


def _reinterpret(site: Site) -> Answer:
    """Bits read as another type: only the last dim may change."""
    dims = site.terms(site.inputs[0])
    if site.shape(site.inputs[0]) != site.out_shape:
        dims[-1] = site.replaced(dims[-1:], site.out_shape[-1], Event.OPAQUE)
    return [dims]


@rule("t", "numpy_T", "mT", "adjoint", "matrix_H", view=True)
def transpose_last(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    if site.op.name == "numpy_T":
        return [dims[::-1]]
    return [[*dims[:-2], *dims[-2:][::-1]]]


@rule("transpose", "swapaxes", "swapdims", "transpose_copy", view=True)
def transpose(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    i, j = site.arg(1, "dim0"), site.arg(2, "dim1")
    if dims:
        dims[i], dims[j] = dims[j], dims[i]
    return [dims]


@rule("permute", "permute_copy", view=True)
def permute(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    return [[dims[i] for i in site.arg(1, "dims")]]


@rule("expand", "expand_copy", "expand_as", "broadcast_to", view=True)
def expand(site: Site) -> Answer:
    """Dims of 1 are repeated: how often is a new axis, along which all is equal."""
    dims = site.terms(site.inputs[0])
    shape = site.out_shape
    dims = [ONE] * (len(shape) - len(dims)) + dims
    return [[term if term.size == size else leaf(size) for term, size in zip(dims, shape, strict=True)]]


@rule("repeat", view=True)
def repeat(site: Site) -> Answer:
    """The whole is repeated: the repetition is the major factor."""
    dims = site.terms(site.inputs[0])
    times = site.arg(1, "repeats")
    dims = [ONE] * (len(times) - len(dims)) + dims
    return [[_repeated(term, n, outer=True) for term, n in zip(dims, times, strict=True)]]


@rule("repeat_interleave")
def repeat_interleave(site: Site) -> Answer:
    """Each element is repeated: the repetition is the minor factor. With a tensor of counts, positions are made."""
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


@rule("flip", "roll")
def rearranged(site: Site) -> Answer:
    """Positions along some dims trade places; with no dims given, along all."""
    dims = site.terms(site.inputs[0])
    where = site.arg(1, "dims") if site.op.name == "flip" else site.arg(2, "dims", ())
    event = Event.FLIP if site.op.name == "flip" else Event.ROLL
    for position in where or range(len(dims)):
        site.mark(dims[position], event)
    return [dims]


@rule("pixel_shuffle")
def pixel_shuffle(site: Site) -> Answer:
    """C·r·r x H x W becomes C x H·r x W·r."""
    *batch, channels, height, width = site.terms(site.inputs[0])
    r = site.arg(1, "upscale_factor")
    halves = site.algebra.split(channels, channels.size // (r * r), r * r)
    inner = halves and site.algebra.split(halves[1], r, r)
    if not halves or not inner:
        return None
    return [[*batch, halves[0], product([height, inner[0]]), product([width, inner[1]])]]


@rule("pixel_unshuffle")
def pixel_unshuffle(site: Site) -> Answer:
    """C x H·r x W·r becomes C·r·r x H x W."""
    *batch, channels, height, width = site.terms(site.inputs[0])
    r = site.arg(1, "downscale_factor")
    rows = site.algebra.split(height, height.size // r, r)
    columns = site.algebra.split(width, width.size // r, r)
    if not rows or not columns:
        return None
    return [[*batch, product([channels, rows[1], columns[1]]), rows[0], columns[0]]]
