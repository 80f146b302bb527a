"""Code that picks positions by what they hold, works on those, and puts the results back in their places.

A loop over experts lists the tokens that chose each one (`torch.where`, a mask), runs the expert for these rows, and
adds what it returns at the same positions. A rank can do so with its own positions: each row is about one of them, and
nothing but the lists says which. What is counted over positions (tokens of an expert) may decide which rows are worked
on, but must not become part of any value. That all of it is so is proven by the trial; here what could not be is left
out: sums, sorts and statistics over positions or rows.
"""

from __future__ import annotations

from collections.abc import Collection

from autoplan.analyse.placement.callflow import CallFlow
from autoplan.analyse.sequence.positions import Positions
from autoplan.analyse.shards import Shards
from autoplan.axes.events import Event
from autoplan.axes.terms import Term, find, leaves
from autoplan.common.patterns import is_under, like_modules
from autoplan.ops import call_record
from autoplan.ops.records.on_shards import Indexed
from autoplan.values import HookKind, Ref, refs

_PICKED = frozenset({Event.INDEX, Event.SCATTER})
_COUNTED = frozenset({Event.REDUCE_LIN, Event.REDUCE_LOGIC, Event.SORT})


class Picks:
    """The calls that pick positions, work on rows or put them back (`calls`), and what they make of rows (`rows`).
    `gathered`: see Capabilities."""

    def __init__(self, shards: Shards, flow: CallFlow, positions: Positions, gathered: Collection[HookKind]) -> None:
        self.trace, self.axes, self.flow, self.positions = shards.trace, shards.axes, flow, positions
        self.rows, self.calls = set[int](), set[int]()
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
        of_positions = [t for t in inputs if self.positions.dims_of(t)]
        of_rows = [t for t in inputs if t in self.rows]
        if counting and not self._only_selects(index):
            if any(map(self._is_number, outputs)):
                return counting
            self.counts |= {t: counting for t in outputs if not self.positions.dims_of(t)}
        crossed = self._crossed(index)
        if not of_rows and not (of_positions and crossed):
            return set()
        if crossed <= _COUNTED and not any(map(self._is_number, (*of_positions, *of_rows, *outputs))) and crossed:
            if not any(self.positions.dims_of(t) for t in outputs):
                self.calls.add(index)
                self.counts |= {t: counting | {index} for t in outputs}
        elif crossed <= _PICKED and (not of_positions or not crossed or self._by_rows(index)):
            self.calls.add(index)
            made = [t for t in outputs if not self.positions.dims_of(t)]
            self.rows.update(made)
            if of_positions:
                self.places |= {find(leaf) for t in made for leaf in leaves(self.axes.of(t)[0])}
        return set()

    def _crossed(self, index: int) -> set[str]:
        """Return the events that a call leaves on positions or rows."""
        along = self.positions.sequences | self.places
        ops = range(*self.trace.calls[index].ops)
        return {event for op in ops for event, axes in self.events.get(op, ()) if not axes.isdisjoint(along)}

    def _is_number(self, tensor: int) -> bool:
        return self.trace.tensors[tensor].differentiable

    def _only_selects(self, index: int) -> bool:
        """Return whether what was counted stands only where a call selects."""
        call = self.trace.calls[index]
        return isinstance(call_record(call.name).sizes, Indexed) and not any(
            t in self.counts for t in refs(call.args[0])
        )

    def _by_rows(self, index: int) -> bool:
        """Return whether positions are picked, or put back, by lists or masks of them and by nothing else."""
        call = self.trace.calls[index]
        record = call_record(call.name)
        if isinstance(record.sizes, Indexed):
            return self._indexed_by_rows(call.args[0].id, call.args[1])
        if record.along is not None and record.along.what == "scatters":
            places, source = call.args[2], call.args[3] if len(call.args) > 3 else None
            return all(isinstance(ref, Ref) and ref.id in self.rows for ref in (places, source))
        return not any(self.positions.dims_of(t) for t in self.flow.outputs[index])  # a list is made

    def _indexed_by_rows(self, source: int, items: object) -> bool:
        dims, place = self.positions.dims_of(source), 0
        for item in items if isinstance(items, (tuple, list)) else (items,):
            if item is None:
                continue
            if item is Ellipsis:
                return False
            masks = isinstance(item, Ref) and self.trace.tensors[item.id].dtype in ("bool", "uint8")
            many = len(self.trace.tensors[item.id].shape) if masks and isinstance(item, Ref) else 1
            if not set(range(place, place + many)).isdisjoint(dims):
                listed = isinstance(item, Ref) and (item.id in self.rows or (masks and self.positions.dims_of(item.id)))
                if not listed and item != slice(None):
                    return False
            place += many
        return True
