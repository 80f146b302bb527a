"""Code that picks positions by what they hold, works on those, and puts the results back in their places.

A loop over experts lists the tokens that chose each one (`torch.where`, a mask), runs the expert for these rows, and
adds what it returns at the same positions. A rank can do so with its own positions: each row is about one of them, and
nothing but the lists says which. What is counted over positions (tokens of an expert) may decide which rows are worked
on, but must not become part of any value. Sums, sorts and statistics over positions or rows are excluded here; the
trial proves the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from autoplan.analyse.placement.callflow import CallFlow
from autoplan.analyse.sequence.positions import LOCAL, Positions
from autoplan.analyse.shards import Shards
from autoplan.axes.events import Event
from autoplan.axes.terms import Term, find, leaves
from autoplan.common.patterns import is_under, like_modules
from autoplan.ops import call_record, op_record
from autoplan.ops.records.on_shards import Indexed
from autoplan.values import Call, HookKind, Ref, refs

_PICKED = frozenset({Event.INDEX, Event.SCATTER})
_COUNTED = frozenset({Event.REDUCE_LIN, Event.REDUCE_LOGIC, Event.SORT})


class Picks:
    """The calls that pick positions, work on rows or put them back (`calls`), and what they make of rows (`rows`).
    `gathered`: see Capabilities."""

    def __init__(self, shards: Shards, flow: CallFlow, positions: Positions, gathered: Collection[HookKind]) -> None:
        self.trace, self.axes, self.flow, self.positions = shards.trace, shards.axes, flow, positions
        self.rows, self.calls = set[int](), set[int]()
        self.asking = set[int]()  # calls that tell Python of rows or counts: ranks may branch differently behind
        self.counts: dict[int, set[int]] = {}  # what was counted -> the calls that count
        self.places: set[Term] = set()  # axes of rows
        self.events: dict[int, list[tuple[str, set[Term]]]] = {}
        for op, event, term in self.axes.marked_by:
            self.events.setdefault(op, []).append((event, {find(leaf) for leaf in leaves(term)}))
        alike = like_modules(self.trace.module_classes) if gathered else {}
        whole = {name for name, kind in alike.items() if any(is_under(at, kind) for at, s in gathered if s == "input")}
        spoilt = {index for index, call in enumerate(self.trace.calls) if call.module in whole}
        for index in range(len(self.trace.calls)):
            spoilt |= self._visit(index)
        self.calls -= spoilt

    def _visit(self, index: int) -> set[int]:
        """Note what a call makes; return the calls that count what it makes part of a value."""
        inputs, outputs = self.flow.inputs[index], self.flow.outputs[index]
        counting = set[int]().union(*(self.counts.get(t, set()) for t in inputs))
        of_positions, of_rows = [t for t in inputs if self.positions.dims_of(t)], [t for t in inputs if t in self.rows]
        told = any(op_record(self.trace.ops[op].name).tells for op in range(*self.trace.calls[index].ops))
        if told and (counting or of_positions or of_rows) and not any(map(self.positions.dims_of, outputs)):
            self.asking.add(index)
        if counting and not self._only_selects(index):
            among_positions = bool(of_positions or of_rows)
            if any(map(self._is_number, outputs)) or (among_positions and not self._are_ids(inputs)):
                return counting
            self.counts |= dict.fromkeys(() if among_positions else outputs, counting)
        crossed = self._marked(index, self.positions.sequences | self.places) - LOCAL
        if not of_rows and not (of_positions and crossed):
            return set()
        if crossed <= _COUNTED and not any(map(self._is_number, (*of_positions, *of_rows, *outputs))) and crossed:
            if not any(self.positions.dims_of(t) for t in outputs):
                self.calls.add(index)
                self.counts |= {t: counting | {index} for t in outputs}
        elif crossed <= _PICKED and self._by_rows(index):
            self.calls.add(index)
            self.rows.update(t for t in outputs if not self.positions.dims_of(t))
            made = {
                find(leaf) for t in self.rows.intersection(outputs) for term in self.axes.of(t) for leaf in leaves(term)
            }
            self.places |= {leaf for leaf in made if Event.INDEX in self._marked(index, {leaf})}
        return set()

    def _marked(self, index: int, along: Collection[Term]) -> set[str]:
        """Return the events that a call leaves on some axes."""
        marks = (mark for op in range(*self.trace.calls[index].ops) for mark in self.events.get(op, ()))
        return {event for event, axes in marks if not axes.isdisjoint(along)}

    def _is_number(self, tensor: int) -> bool:
        return self.trace.tensors[tensor].differentiable

    def _are_ids(self, tensors: Iterable[int]) -> bool:
        """Return whether all are integers, such as ids that are compared with one that occurs."""
        return not any(self._is_number(t) or self.trace.tensors[t].dtype == "bool" for t in tensors)

    def _only_selects(self, index: int) -> bool:
        """Return whether what was counted stands only where a call selects."""
        call = self.trace.calls[index]
        return isinstance(call_record(call.name).sizes, Indexed) and not any(
            t in self.counts for t in refs(call.args[0])
        )

    def _by_rows(self, index: int) -> bool:
        """Return whether positions are picked, or put back, by lists or masks of them and by nothing else, and no part
        of some rows is taken (the first ones of an expert)."""
        call = self.trace.calls[index]
        source, along = next(refs(call.args[:1]), None), call_record(call.name).along
        if along is not None and along.what == "scatters":
            return all(isinstance(ref, Ref) and ref.id in self.rows for ref in call.args[2:4])
        if source is None:
            return True
        dims, terms = self.positions.dims_of(source), self.axes.of(source)
        of_rows = {d for d, term in enumerate(terms) if not self.places.isdisjoint(map(find, leaves(term)))}
        if source in self.rows:  # an axis of one row, or of none, is no axis
            of_rows |= {dim for dim, size in enumerate(self.trace.tensors[source].shape) if size < 2}
        for dim, item in self._taken(call, source):
            listed = isinstance(item, Ref) and (item.id in self.rows or bool(self.positions.dims_of(item.id)))
            if dim in of_rows or (dim in dims and not listed):
                return False
        return True

    def _taken(self, call: Call, source: int) -> Iterator[tuple[int, object]]:
        """Yield the dims along which a call takes a part of a value, and by what."""
        record, shape = call_record(call.name), self.trace.tensors[source].shape
        if isinstance(record.sizes, Indexed):
            given = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
            items = [item for item in given if item is not None]
            many = [self._covered(item) for item in items]
            place = 0
            for number, item in enumerate(items):
                yield from ((dim, item) for dim in range(place, place + many[number]) if item != slice(None))
                place = len(shape) - sum(many[number + 1 :]) if item is Ellipsis else place + many[number]
        elif record.along is not None:
            given = call.args[record.along.dim : record.along.dim + 1] or (call.kwargs.get("dim", 0),)
            by = call.args[2] if record.along.what == "picks" and len(call.args) > 2 else None
            yield (given[0] % len(shape) if isinstance(given[0], int) else 0), by

    def _covered(self, item: object) -> int:
        """Return how many dims an index stands for."""
        info = self.trace.tensors[item.id] if isinstance(item, Ref) else None
        return len(info.shape) if info is not None and info.dtype in ("bool", "uint8") else int(item is not Ellipsis)
