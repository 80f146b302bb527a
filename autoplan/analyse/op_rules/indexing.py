"""Ops that look up or replace positions by tensors of integers or masks."""

from __future__ import annotations

from autoplan.analyse.events import Event
from autoplan.analyse.op_rules.pieces import slice_of
from autoplan.analyse.op_rules.site import Answer, Dims, Site, rule
from autoplan.analyse.terms import Term, find, is_data
from autoplan.values import Ref

__all__: list[str] = []


@rule("embedding")
def embedding(site: Site) -> Answer:
    """Rows of a table."""
    table, indices = site.inputs[:2]
    rows, width = site.terms(table)
    site.mark(rows, Event.EMBED_INDEX)
    return [[*site.terms(indices), site.from_weight(width)]]


@rule("index", "_unsafe_index", view=True)
def index(site: Site) -> Answer:
    source = site.inputs[0]
    dims = site.terms(source)
    indices = list(site.arg(1, "indices"))
    run = _constant_run(site, dims, indices)
    if run is not None:
        return [run]
    layout = _indexed(site, dims, indices, Event.INDEX_W if site.is_weight(source) else Event.INDEX)
    if layout is None:
        return None
    return [_result(site, *layout)]


@rule("index_put", "_index_put_impl", "_unsafe_index_put")
def index_put(site: Site) -> Answer:
    """x[indices] = values."""
    dims = site.terms(site.inputs[0])
    layout = _indexed(site, dims, list(site.arg(1, "indices")), Event.SCATTER)
    values = site.tensor(2, "values")
    if layout is None or values is None:
        return None
    shape = [term.size for term in _arranged(*layout)]
    given = site.terms(values)
    if not site.broadcasts([[term.size for term in given]], shape):
        return None
    site.broadcast([_arranged(*layout), given], shape)
    return [site.terms(site.inputs[0])]


def _constant_run(site: Site, dims: Dims, indices: list[Ref | None]) -> Dims | None:
    """One index tensor whose values are always the same consecutive positions: a slice."""
    where = [position for position, ref in enumerate(indices) if ref is not None]
    ref = indices[where[0]] if len(where) == 1 else None
    values = site.constant_values(ref) if ref is not None and len(site.shape(ref)) == 1 else None
    if ref is None or not values or "bool" in site.info(ref).dtype:
        return None
    size = dims[where[0]].size
    positions = [value % size for value in values]
    if positions != list(range(positions[0], positions[0] + len(positions))):
        return None
    dims = list(dims)
    dims[where[0]] = slice_of(site, dims[where[0]], positions[0], positions[0] + len(positions))
    return dims


_Layout = tuple[Dims, Dims, Dims]  # before the looked-up dims, what they become, after


def _arranged(before: Dims, middle: Dims, after: Dims) -> Dims:
    return [find(term) for term in (*before, *middle, *after)]


def _result(site: Site, before: Dims, middle: Dims, after: Dims) -> Dims:
    """Dims of the result. How many rows a mask keeps is known from the recorded shape only."""
    dims = _arranged(before, middle, after)
    return dims


def _indexed(site: Site, dims: Dims, indices: list[Ref | None], event: Event) -> _Layout | None:
    """Work out x[indices]: integer tensors meet by broadcasting, a mask stands for as many dims as it has."""
    rest: list[tuple[int, Term]] = []
    operands: list[Dims] = []
    places: list[int] = []
    position = 0
    for slot, ref in enumerate(indices):
        if ref is None:
            rest.append((slot, dims[position]))
            position += 1
            continue
        places.append(slot)
        if site.info(ref).dtype.endswith(("bool", "uint8")):
            covered = dims[position : position + len(site.shape(ref))]
            position += len(covered)
            kept = _mask_rows(site, covered, ref, event)
            if kept is None:
                return None
            operands.append([kept])
        else:
            site.mark(dims[position], event)
            position += 1
            operands.append(site.terms(ref))
    rest += [(len(indices) + k, term) for k, term in enumerate(dims[position:])]
    width = max(len(operand) for operand in operands)
    shape = [max((o[-k].size for o in operands if len(o) >= k), default=1) for k in range(width, 0, -1)]
    if any(o[-k].size == 0 for o in operands for k in range(1, len(o) + 1)):
        shape = [0 if any(len(o) >= k and o[-k].size == 0 for o in operands) else shape[width - k]
                 for k in range(width, 0, -1)]  # fmt: skip
    middle = site.broadcast(operands, shape)
    adjacent = places == list(range(places[0], places[-1] + 1))
    first = places[0] if adjacent else 0
    return [t for s, t in rest if s < first], middle, [t for s, t in rest if s >= first]


def _mask_rows(site: Site, covered: Dims, mask: Ref, event: Event) -> Term | None:
    """The positions a mask keeps. Their number is that of the first output dim, when there is an output to see it."""
    site.unify_equal_sizes(covered, site.terms(mask))
    for term in covered:
        site.mark(term, event)
    rest = 1
    shape = site.out_shape
    if event is Event.SCATTER:
        return None
    del rest
    kept = shape[0] if shape else 0
    return site.fresh(kept, event, data=all(is_data(term) for term in covered))


@rule("masked_select")
def masked_select(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    for term in site.terms(site.inputs[1]):
        site.mark(term, Event.INDEX)
    return [[site.replaced([term for term in dims if term.size > 1], site.out_shape[0], Event.INDEX)]]


@rule("masked_scatter")
def masked_scatter(site: Site) -> Answer:
    """Masked places are filled from the source in order; whole rows are taken to stay rows."""
    target, mask, source = site.inputs[:3]
    dims = site.broadcast([site.terms(target), site.terms(mask)], site.out_shape)
    given = site.terms(source)
    while dims and given and len(given) > 1 and dims[-1].size == given[-1].size:
        site.unify(dims.pop(), given.pop())
    for term in (*dims, *given):
        site.mark(term, Event.SCATTER)
    return [site.terms(target)]


@rule("index_select", view=True)
def index_select(site: Site) -> Answer:
    source, positions = site.inputs[:2]
    dims = site.terms(source)
    dim = site.arg(1, "dim")
    if not dims:
        return [[]]
    site.mark(dims[dim], Event.INDEX_W if site.is_weight(source) else Event.INDEX)
    dims[dim] = site.terms(positions)[0] if site.shape(positions) else site.fresh(1)
    return [dims]


@rule("gather", "take_along_dim")
def gather(site: Site) -> Answer:
    source, positions = site.inputs[:2]
    dims, chosen = site.terms(source), site.terms(positions)
    if not dims:
        return [chosen]
    dim = site.arg(1, "dim") % len(dims)
    site.unify_equal_sizes(dims, chosen, skip=dim)
    site.mark(dims[dim], Event.GATHER)
    return [site.terms(positions)]


@rule("take")
def take(site: Site) -> Answer:
    for term in site.terms(site.inputs[0]):
        site.mark(term, Event.GATHER)
    return [site.terms(site.inputs[1])]


@rule("scatter", "scatter_add", "scatter_reduce")
def scatter(site: Site) -> Answer:
    """x[..., positions, ...] = source, position by position."""
    dims = site.terms(site.inputs[0])
    dim = site.arg(1, "dim") % max(1, len(dims))
    operands = [site.terms(ref) for ref in site.inputs[1:]]
    for operand in operands:
        site.unify_equal_sizes(dims, operand, skip=dim)
    for term in dims[dim : dim + 1]:
        site.mark(term, Event.SCATTER)
    if len(operands) == 2 and operands[0] and operands[0][dim].size == operands[1][dim].size:
        site.unify(operands[0][dim], operands[1][dim])
    return [site.terms(site.inputs[0])]


@rule("index_add", "index_copy", "index_fill", "index_reduce")
def index_add(site: Site) -> Answer:
    """x[..., positions, ...] += source, row by row."""
    dims = site.terms(site.inputs[0])
    dim = site.arg(1, "dim") % max(1, len(dims))
    positions, source = site.inputs[1], site.inputs[2] if len(site.inputs) > 2 else None
    for term in dims[dim : dim + 1]:
        site.mark(term, Event.SCATTER)
    given = site.terms(source) if source is not None else []
    if len(given) == len(dims) and given:
        site.unify_equal_sizes(dims, given, skip=dim)
        if site.shape(positions) and site.shape(positions)[0] == given[dim].size:
            site.unify(site.terms(positions)[0], given[dim])
    return [site.terms(site.inputs[0])]


@rule("one_hot")
def one_hot(site: Site) -> Answer:
    return [[*site.terms(site.inputs[0]), site.fresh(site.out_shape[-1], Event.SCATTER)]]


@rule("nonzero", "argwhere")
def nonzero(site: Site) -> Answer:
    """Positions as integers: one row per hit, one column per dim."""
    dims = site.terms(site.inputs[0])
    rows = site.replaced([term for term in dims if term.size > 1], site.out_shape[0], Event.INDEX)
    return [[rows, site.fresh(site.out_shape[1], Event.STACK)]]


@rule("nonzero_numpy")
def nonzero_numpy(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    rows = site.replaced([term for term in dims if term.size > 1], site.out_shape[0], Event.INDEX)
    return [[rows] for _ in site.outputs]


@rule("nll_loss_forward", "nll_loss2d_forward", "nll_loss")
def nll_loss(site: Site) -> Answer:
    """The log-probability at the target's position, averaged."""
    scores, target = site.inputs[:2]
    dims = site.terms(scores)
    channel = 1 if len(dims) > 1 else 0
    site.mark(dims[channel], Event.GATHER)
    rest = [term for position, term in enumerate(dims) if position != channel]
    site.unify_equal_sizes(rest, site.terms(target))
    return [rest if site.shape(output) else [] for output in site.outputs]
