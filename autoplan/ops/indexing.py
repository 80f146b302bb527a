"""Ops that look up or replace positions by tensors of integers or masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autoplan.axes.events import Event
from autoplan.axes.terms import Term, find, is_data
from autoplan.ops.pieces import slice_of
from autoplan.ops.records.answers import NEVER, Along, Drawn, Linear, Reduction, Shows
from autoplan.ops.records.on_shards import NO_SIZES, Indexed, Local, SplitOp, as_written
from autoplan.ops.records.record import UNSPLIT, call_record, kept_whole, op, op_record, python_call
from autoplan.ops.records.site import Answer, Dims, Site
from autoplan.ops.reductions import averaged
from autoplan.values import Op, Ref, refs

_IDS = ("int64", "int32")
_STRETCHING = ("expand", "_to_copy", "clone", "alias", "detach", "to")


def _lookup(at: SplitOp) -> Reduction | None:
    return Reduction.EMBEDDING if at.is_split(0, 0) else None


def looked_up(local: Local) -> Any:
    """Look up rows of a sharded table: each rank returns its own rows, and zeros for the others."""
    layout = local.layout(0, 0)
    if layout is None:
        return local.call()
    local.reducing = True
    table, ids = local.args[0], local.args[1].long()
    place = ids.new_full((local.size(0, 0),), -1)
    place[list(local.held(layout))] = ids.new_tensor(range(table.shape[0]))
    local_rows = place[ids]
    return table[local_rows.clamp(min=0)] * (local_rows >= 0).unsqueeze(-1).to(table.dtype)


@op("embedding",
    sizes=NO_SIZES, reduces=_lookup, linear=Linear.NO, random=NEVER, runs=looked_up, drawn=Drawn.LOOKUP)  # fmt: skip
def embedding(site: Site) -> Answer:
    """Return the dims of rows of a table."""
    table, indices = site.inputs[:2]
    rows, width = site.terms(table)
    site.mark(rows, Event.EMBED_INDEX)
    return [[*site.terms(indices), site.from_weight(width)]]


@op("_embedding_bag", "_embedding_bag_forward_only", **UNSPLIT)
def embedding_bag(site: Site) -> Answer:
    """Return the dims of the sum, mean or maximum of some rows of a table for each bag; the data select the rows."""
    table, *others = site.inputs
    rows, width = site.terms(table)
    site.mark(rows, Event.EMBED_INDEX)
    for term in (term for ref in others for term in site.terms(ref)):  # offsets count from the very first id
        site.mark(term, Event.INDEX)
    bags = site.terms(others[1])[0]
    if bags.size != site.out_shape[0]:  # the last offset may be an end
        bags = site.fresh(site.out_shape[0], data=True)
    return [[bags, site.from_weight(width)], *(None for _ in site.outputs[1:])]


def rows_by_ids(op: Op) -> tuple[int, int] | None:
    """Return the table and the ids of an op that takes rows of a table: an embedding, or table[ids]."""
    table, ids = (*op.args, None, None)[:2]
    if op_record(op.name).dims is index and isinstance(ids, (list, tuple)) and len(ids) == 1:
        ids = ids[0]
    elif not looks_up(op.name):
        return None
    return (table.id, ids.id) if isinstance(table, Ref) and isinstance(ids, Ref) else None


def looks_up(name: str) -> bool:
    """Return whether an op takes rows of a table, its first input, by ids, its second. (Python passes ids first.)"""
    return op_record(name).dims in (embedding, embedding_bag)


def takes_bags(name: str) -> bool:
    """Return whether the rows are reduced, bag by bag."""
    return op_record(name).dims is embedding_bag


@dataclass(frozen=True)
class _Lookup:
    """x[indices]: the dims before and after, and the dims that each index contributes; None for a mask, whose size is
    unknown."""

    before: Dims
    after: Dims
    operands: list[Dims | None]
    event: Event
    masked_data: bool

    def dims(self, site: Site, sizes: Sequence[int]) -> Dims:
        """Return the dims of x[indices], given the sizes of the looked-up part."""
        selected = [site.fresh(sizes[-1], self.event, data=self.masked_data)] if sizes else []
        middle = site.broadcast([selected if operand is None else operand for operand in self.operands], sizes)
        return [find(term) for term in (*self.before, *middle, *self.after)]


def _taken(at: SplitOp) -> Reduction | None:
    """Return ROW for table[ids] of a table whose rows are sharded: each rank provides the rows that it has."""
    return Reduction.ROW if rows_by_ids(at.op) is not None and at.is_split(0, 0) else None


def taken(local: Local) -> Any:
    if _taken(local) is None:
        return local.call()
    local.args[1] = local.args[1][0] % local.size(0, 0)
    return looked_up(local)


@op("index", "_unsafe_index",
    sizes=NO_SIZES, reduces=_taken, linear=Linear.NO, random=NEVER, runs=taken,
    shows=Shows.PICKED, drawn=Drawn.ROWS)  # fmt: skip
def index(site: Site) -> Answer:
    source = site.inputs[0]
    indices = list(site.arg(1, "indices"))
    run = _constant_run(site, site.terms(source), indices)
    if run is not None:
        return [run]
    event = Event.INDEX_W if site.is_weight(source) else Event.INDEX
    by_ids = len(indices) == 1 and len(site.shape(source)) == 2 and site.is_parameter(source)
    by_ids = by_ids and site.info(indices[0]).dtype in _IDS and bool(site.shape(indices[0]))
    lookup = _look_up(site, indices, Event.EMBED_INDEX if by_ids else event)
    shape = site.out_shape
    dims = lookup.dims(site, shape[len(lookup.before) : len(shape) - len(lookup.after)])
    return [[*dims[:-1], site.from_weight(dims[-1])] if by_ids else dims]


@op("index_put", "_index_put_impl", "_unsafe_index_put", **UNSPLIT, drawn=Drawn.SCATTER)
def index_put(site: Site) -> Answer:
    """Relate x[indices] = values: values broadcast to the shape of the lookup."""
    lookup = _look_up(site, list(site.arg(1, "indices")), Event.SCATTER)
    values = site.terms(site.inputs[-1])
    place = len(lookup.after) + 1
    selected = values[-place].size if len(values) >= place else 1
    sizes = _broadcast_sizes([[selected] if o is None else [term.size for term in o] for o in lookup.operands])
    dims = lookup.dims(site, sizes)
    shape = [term.size for term in dims]
    if not site.broadcasts([[term.size for term in values]], shape):
        return None
    site.broadcast([dims, values], shape)
    for term in dims[len(lookup.before) : len(dims) - len(lookup.after)]:
        site.mark(term, Event.SCATTER)
    return [site.terms(site.inputs[0])]


def _broadcast_sizes(shapes: Sequence[Sequence[int]]) -> list[int]:
    """Return the shape to which tensors of these shapes broadcast."""
    sizes: list[int] = []
    for place in range(max(map(len, shapes)), 0, -1):
        sizes_here = [shape[-place] for shape in shapes if len(shape) >= place]
        sizes.append(next((size for size in sizes_here if size != 1), 1))
    return sizes


def _constant_run(site: Site, dims: Dims, indices: Sequence[Ref | None]) -> Dims | None:
    """Return the dims of a lookup whose one index tensor always has the same consecutive positions: a slice."""
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


def _look_up(site: Site, indices: Sequence[Ref | None], event: Event) -> _Lookup:
    """Mark the looked-up dims. A mask covers as many dims as it has; separated index tensors put their dims first."""
    dims = site.terms(site.inputs[0])
    rest: list[tuple[int, Term]] = []
    operands: list[Dims | None] = []
    places: list[int] = []
    covered: Dims = []
    position = 0
    for place, ref in enumerate([*indices, *[None] * len(dims)]):
        if ref is None:
            rest += [(place, term) for term in dims[position : position + 1]]
            position += 1
            continue
        places.append(place)
        masked = site.info(ref).dtype in ("bool", "uint8")
        looked_up = dims[position : position + (len(site.shape(ref)) if masked else 1)]
        position += len(looked_up)
        for term in looked_up:
            site.mark(term, event)
        if masked:
            site.unify_equal_sizes(looked_up, site.terms(ref))
            covered += looked_up
        operands.append(None if masked else site.terms(ref))
    first = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    before, after = ([t for p, t in rest if p < first], [t for p, t in rest if p >= first])
    return _Lookup(before, after, operands, event, all(is_data(term) for term in covered if term.size > 1))


@op("masked_select", **UNSPLIT)
def masked_select(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    for term in site.terms(site.inputs[1]):
        site.mark(term, Event.INDEX)
    return [[site.replaced([term for term in dims if term.size > 1], site.out_shape[0], Event.INDEX)]]


@op("masked_scatter", **UNSPLIT)
def masked_scatter(site: Site) -> Answer:
    """Relate the source to the masked places that it fills in order; dims along which the mask is constant match."""
    target, mask, source = site.inputs[:3]
    dims = site.broadcast([site.terms(target), site.terms(mask)], site.out_shape)
    sources = site.terms(source)
    place = 1
    while dims and len(sources) > 1 and dims[-1].size == sources[-1].size and _is_even(site, mask, place):
        site.unify(dims.pop(), sources.pop())
        place += 1
    for term in (*dims, *sources):
        site.mark(term, Event.SCATTER)
    return [site.terms(target)]


def _is_even(site: Site, mask: Ref, place: int) -> bool:
    """Return whether the mask was expanded along this dim, the place-th from the end, and so is equal along it."""
    while place <= len(site.shape(mask)) and site.shape(mask)[-place] > 1:
        producer = next((op for op in site.state.trace.ops if mask.id in op.results), None)
        if producer is None or producer.name not in _STRETCHING:
            return False
        mask = Ref(next(refs(producer.args)))
    return True


@op("index_select", **UNSPLIT, shows=Shows.PICKED, along=Along("picks"), drawn=Drawn.ROWS)
def index_select(site: Site) -> Answer:
    source, positions = site.inputs[:2]
    dims = site.terms(source)
    dim = site.arg(1, "dim")
    if not dims:
        return [[]]
    site.mark(dims[dim], Event.INDEX_W if site.is_weight(source) else Event.INDEX)
    dims[dim] = site.terms(positions)[0] if site.shape(positions) else site.fresh(1)
    return [dims]


@op("gather", "take_along_dim",
    sizes=NO_SIZES, reduces=kept_whole, linear=Linear.WITHIN, random=NEVER, runs=as_written,
    drawn=Drawn.PICK)  # fmt: skip
def gather(site: Site) -> Answer:
    source, positions = site.inputs[:2]
    dims, chosen = site.terms(source), site.terms(positions)
    if not dims:
        return [chosen]
    dim = site.arg(1, "dim") % len(dims)
    site.unify_equal_sizes(dims, chosen, skip=dim)
    site.mark(dims[dim], Event.GATHER)
    return [site.terms(positions)]


@op("take", **UNSPLIT)
def take(site: Site) -> Answer:
    for term in site.terms(site.inputs[0]):
        site.mark(term, Event.GATHER)
    return [site.terms(site.inputs[1])]


@op("scatter", "scatter_add", "scatter_reduce", **UNSPLIT, along=Along("scatters"), drawn=Drawn.SCATTER)
def scatter(site: Site) -> Answer:
    """Relate x[..., positions, ...] = source, position by position."""
    dims = site.terms(site.inputs[0])
    dim = site.arg(1, "dim") % max(1, len(dims))
    operands = [site.terms(ref) for ref in site.inputs[1:]]
    for operand in operands:
        site.unify_equal_sizes(dims, operand, skip=dim)
    for term in (term for terms in (dims, *operands) for term in terms[dim : dim + 1]):
        site.mark(term, Event.SCATTER)
    if len(operands) == 2 and operands[0] and operands[0][dim].size == operands[1][dim].size:
        site.unify(operands[0][dim], operands[1][dim])
    return [site.terms(site.inputs[0])]


@op("index_add", **UNSPLIT, along=Along("scatters"), drawn=Drawn.SCATTER)
@op("index_copy", "index_reduce", **UNSPLIT, along=Along("scatters"))
@op("index_fill", **UNSPLIT)
def index_add(site: Site) -> Answer:
    """Relate x[..., positions, ...] += source, row by row."""
    dims = site.terms(site.inputs[0])
    dim = site.arg(1, "dim") % max(1, len(dims))
    positions, source = site.inputs[1], site.inputs[2] if len(site.inputs) > 2 else None
    for term in dims[dim : dim + 1]:
        site.mark(term, Event.SCATTER)
    sources = site.terms(source) if source is not None else []
    if len(sources) == len(dims) and sources:
        site.unify_equal_sizes(dims, sources, skip=dim)
        site.mark(sources[dim], Event.SCATTER)
        if site.shape(positions) and site.shape(positions)[0] == sources[dim].size:
            site.unify(site.terms(positions)[0], sources[dim])
    return [site.terms(site.inputs[0])]


@op("one_hot", **UNSPLIT)
def one_hot(site: Site) -> Answer:
    return [[*site.terms(site.inputs[0]), site.fresh(site.out_shape[-1], Event.SCATTER)]]


@op("nonzero", "argwhere", **UNSPLIT, tells=True)
def nonzero(site: Site) -> Answer:
    """Return positions as integers: one row per hit, one column per dim."""
    dims = site.terms(site.inputs[0])
    rows = site.replaced([term for term in dims if term.size > 1], site.out_shape[0], Event.INDEX)
    return [[rows, site.fresh(site.out_shape[1], Event.STACK)]]


@op("nonzero_numpy", **UNSPLIT, tells=True)
def nonzero_numpy(site: Site) -> Answer:
    dims = site.terms(site.inputs[0])
    rows = site.replaced([term for term in dims if term.size > 1], site.out_shape[0], Event.INDEX)
    return [[rows] for _ in site.outputs]


@op("nll_loss_forward", "nll_loss2d_forward", "nll_loss",
    sizes=NO_SIZES, reduces=averaged, linear=Linear.NO, random=NEVER, runs=as_written)  # fmt: skip
def nll_loss(site: Site) -> Answer:
    """Relate scores and target for the log-probability at the target's position, averaged."""
    scores, target = site.inputs[:2]
    dims = site.terms(scores)
    channel = 1 if len(dims) > 1 else 0
    site.mark(dims[channel], Event.GATHER)
    rest = [term for position, term in enumerate(dims) if position != channel]
    site.unify_equal_sizes(rest, site.terms(target))
    if not site.out_shape:
        for term in rest:
            site.contract(term, Event.REDUCE_LIN)
    return [rest if site.shape(output) else [] for output in site.outputs]


def takes_targets(name: str) -> bool:
    """Return whether a call is a loss whose second argument holds the index of the right score."""
    record = call_record(name)
    return record.loss_of_columns or op_record(record.becomes).dims is nll_loss


python_call("embedding_bag", becomes="_embedding_bag")
python_call("cross_entropy_loss", becomes="nll_loss")
# Only table[number] takes a row of a table: other calls that become a `select` have no place for its sum.
python_call("__getitem__", becomes="index", sizes=Indexed(), linear=Linear.EACH, shows=Shows.PICKED,
            along=Along("picks"), settles=Reduction.ROW)  # fmt: skip
python_call("__setitem__", becomes="index_put", sizes=Indexed(), assigns=True)
