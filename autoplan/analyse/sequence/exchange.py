"""Context parallelism: what a mixer moves, where its projections can run on own positions.

Gathering the stream and multiplying by a rank's rows of a weight gives what multiplying own positions by the whole
weight and exchanging gives: each rank sends the other ranks' heads of its positions, and gets all positions of its own
heads. So a gather goes where all that reads the value are modules that treat each position by itself: what they make of
heads is exchanged, and what they make whole is handed on in the same way, or gathered where other code reads it. The
mixer's own code is told the whole length. A sum that such a module leaves is replaced by the exchange of its input.

Which form a boundary has is a matter of price, the numbers that a rank moves for each position. An exchange may
cost twice as much as a gather of the stream, since without it a rank holds the stream whole. Within a mixer, what
is narrower than all that is made of it (a latent) is gathered: that is less to hold, too.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from autoplan.analyse.placement.callflow import Crossing, HookPoint, Kind
from autoplan.analyse.sequence.changes import SequencePlacement
from autoplan.analyse.sequence.stream import Stream
from autoplan.analyse.sequence.windows import sizes_of
from autoplan.common.layout import Layout
from autoplan.common.patterns import like_modules
from autoplan.ops import call_record
from autoplan.ops.records.record import writes_in_place
from autoplan.values import AllReduce, AllReduceGradient, Boundary, HookKind, JoinPartial, SequenceName, WithholdPartial
from autoplan.values.trace import symbolics

MAY_MOVE = 2  # times what gathering and reduce-scattering the stream moves


def exchange(
    streams: list[Stream],
    cut: SequencePlacement,
    rewritten: Collection[str],
    gathered: Collection[HookKind] | None = None,
) -> None:
    """Replace gathers and sums in `cut`. `rewritten`: modules in whose code calls are changed. `gathered`: where
    gathers and sums stay; by default where they move less."""
    alike = like_modules(streams[0].trace.module_classes)
    for stream in streams:
        walk = _Exchanges(stream, cut, rewritten, gathered, alike)
        walk.begin()
        walk.enter()
        walk.leave()


@dataclass
class _Swap:
    """The replacement of one gather."""

    shown: dict[tuple[Crossing, str], int] = field(default_factory=dict)
    own: dict[Crossing, int] = field(default_factory=dict)  # inputs that are a rank's own positions
    pieces: dict[Crossing, tuple[int, int, str]] = field(default_factory=dict)  # dims of positions, of pieces, layout
    gathered: dict[Crossing, tuple[int, bool]] = field(default_factory=dict)  # and is the gradient partial?
    visits: set[int] = field(default_factory=set)  # that run on own positions


class _Refused(Exception):
    """It cannot be replaced."""


@dataclass
class _Exchanges:
    stream: Stream
    cut: SequencePlacement
    rewritten: Collection[str]
    gathered: Collection[HookKind] | None
    alike: dict[str, str]

    def __post_init__(self) -> None:
        stream = self.stream
        self.flow, self.placement, self.trace = stream.flow, stream.placement, stream.trace
        self.shards, self.positions = stream.shards, stream.positions

    # ------------------------------------------------------------------ where the stream begins

    def begin(self) -> None:
        """Make of own positions what the first block takes in, where a module looks it up by an index for each position
        and nothing else reads it."""
        swap = _Swap()
        starts = [key for key in self.cut.scatters if key[1] == "input" and key[0] in self.stream.starts]
        with suppress(_Refused):
            for crossing, _ in starts:
                self._make_own(self.stream.starts[crossing], swap)
            self._convert(swap)
            if starts:
                self._replace([], swap, self.cut.names[starts[0][0]])

    def _make_own(self, tensor: int, swap: _Swap) -> None:
        maker = self.flow.producer.get(tensor, -1)
        entered = [start for start, stream in self.stream.starts.items() if stream == tensor]
        if maker < 0 or any(not any(s.first <= use < s.last for s in entered) for use in self.flow.uses[tensor]):
            raise _Refused
        leaving = [c for c in self.flow.leaving[tensor] if c.module and c.first <= maker < c.last]
        for crossing in sorted(leaving, key=lambda c: c.first - c.last):
            visit = self.trace.visits[crossing.visit]
            sources = {t for _, t in visit.inputs if self.positions.dims_of(t)}
            looked_up = not any(self.trace.tensors[t].differentiable for t in sources)
            looked_up = looked_up and not any(self._counts_indices(index) for index in range(*visit.calls))
            single = len(sources) == len(visit.outputs) == 1
            if looked_up and single and self._by_position(crossing.visit, sources):
                (source,) = sources
                swap.own |= dict.fromkeys(self._entries(crossing.visit, source), self._plain(source))
                swap.shown[crossing, "output"] = self._plain(tensor)
                swap.visits.add(crossing.visit)
                return
        raise _Refused

    def _counts_indices(self, index: int) -> bool:
        """Return whether a call uses its indices for more than a lookup (it changes the table, or scales gradients by
        their count), which each rank would do for its own indices only."""
        call = self.trace.calls[index]
        written = any(writes_in_place(self.trace.ops[op].name) for op in range(*call.ops))
        return written or any(item is True for item in (*call.args, *call.kwargs.values()))

    # ------------------------------------------------------------------ gathers

    def enter(self) -> None:
        """Exchange what enters mixers instead of gathering it first."""
        points: dict[HookPoint, list[tuple[Crossing, str]]] = {}
        for crossing, side in (*self.cut.gathers, *self.cut.gather_sums):
            if crossing.module and self.positions.plain_dim(self.flow.tensor_at(crossing, side)) is not None:
                points.setdefault((crossing.module, side, crossing.path), []).append((crossing, side))
        for keys in points.values():
            swap = _Swap()
            with suppress(_Refused):
                gathers = 0
                for crossing, side in keys:
                    partial = (crossing, side) in self.cut.gather_sums or (crossing, side) in self.cut.partial_gathers
                    self._hand_on(self.flow.tensor_at(crossing, side), crossing, side, partial, swap)
                    gathers += (1 + partial) * self._width(self.flow.tensor_at(crossing, side))
                if self._stays(keys[0], MAY_MOVE * (gathers + self._summed(swap.visits)), self._moved(swap)):
                    continue
                self._convert(swap)
                self._replace(keys, swap, self.cut.names[keys[0][0]])

    def _replace(self, keys: list[tuple[Crossing, str]], swap: _Swap, name: SequenceName) -> None:
        cut = self.cut
        for key in keys:
            cut.gathers.pop(key, None)
            if cut.gather_sums.pop(key, None) is not None:
                cut.undone |= self._done_at(*key, AllReduceGradient)
            cut.partial_gathers.discard(key)
        gone = {crossing.module for crossing, _ in keys} - {crossing.module for crossing, _ in cut.gathers}
        cut.whole = [why for why in cut.whole if why.at not in gone]
        cut.shown |= swap.shown
        own = {(crossing, "input"): dim for crossing, dim in swap.own.items()}
        cut.scatters |= own
        cut.own |= own.keys()
        cut.exchanges |= {(crossing, "output"): piece for crossing, piece in swap.pieces.items()}
        for crossing, (dim, partial) in swap.gathered.items():
            cut.gathers[crossing, "output"] = dim
            cut.partial_gathers |= {(crossing, "output")} if partial else set()
        crossings = (*(c for c, _ in swap.shown), *swap.own, *swap.pieces, *swap.gathered)
        cut.names |= dict.fromkeys(crossings, name)

    def _hand_on(self, tensor: int, crossing: Crossing, side: str, partial: bool, swap: _Swap) -> None:
        """Show the value as whole to all that reads it behind a boundary, and follow what is made of it."""
        dim = self._plain(tensor)
        if tensor in self.flow.final or (crossing, side) in swap.shown:
            raise _Refused
        readers = set[int]()
        for use in self.flow.uses[tensor]:
            if not (crossing.first <= use < crossing.last if side == "input" else use >= crossing.last):
                continue
            reader = self._module_around(use, tensor, crossing, side)
            if self._is_changed_on_the_way(tensor, reader, crossing):
                raise _Refused
            readers.add(reader)
        inside = {crossing.visit} & readers if side == "input" else set[int]()
        if (side == "input" and not readers) or (inside and len(readers) > 1):
            raise _Refused
        if not inside:
            swap.shown[crossing, side] = dim
        for number in sorted(readers):
            visit = self.trace.visits[number]
            swap.own |= {} if inside else dict.fromkeys(self._entries(number, tensor), dim)
            if number in swap.visits:
                continue
            swap.visits.add(number)
            for path, output in visit.outputs:
                if output != tensor:
                    self._leave_module(output, Crossing(number, visit.module, path, *visit.calls), partial, swap)

    def _is_changed_on_the_way(self, tensor: int, reader: int, crossing: Crossing) -> bool:
        """Return whether a module around the reader does anything to what it takes in (it scales its gradient), which
        is for whole values and not for what is shown as one."""
        first, last = self.trace.visits[reader].calls
        around = [c for c in self.flow.entering.get(tensor, ()) if c.first <= first and last <= c.last]
        outer = [c for c in around if c.first <= crossing.first and crossing.last <= c.last]
        between = [c for c in around if c.visit != reader and c not in outer and crossing.first <= c.first]
        return any(c in between for c, _ in self.placement.inputs)

    def _leave_module(self, output: int, crossing: Crossing, partial: bool, swap: _Swap) -> None:
        """Place what a module made on own positions: exchanged, shown as whole, or gathered."""
        dim = self._plain(output)
        if self.shards.is_split(output):
            piece, layout = self._pieces(output, dim)
            swap.pieces[crossing] = dim, piece, layout
            return
        partial = partial or (crossing, AllReduceGradient) in self.placement.outputs
        tried = _Swap(**{name: copy.copy(value) for name, value in vars(swap).items()})
        with suppress(_Refused):
            self._hand_on(output, crossing, "output", partial, tried)
            gathered = self._width(output) * (1 + partial) + self._summed(tried.visits - swap.visits)
            if not self._stays((crossing, "output"), gathered, self._moved(tried) - self._moved(swap)):
                vars(swap).update(vars(tried))
                return
        swap.gathered[crossing] = dim, partial

    def _module_around(self, use: int, tensor: int, crossing: Crossing, side: str) -> int:
        """The outermost module around a call, behind a boundary, that makes all of it position by position."""
        best = None
        for around in self.flow.around(use):
            visit = self.trace.visits[around]
            within = crossing.first <= visit.calls[0] and visit.calls[1] <= crossing.last
            if (
                visit.module in self.stream.names
                or visit.parent is None
                or not (within if side == "input" else visit.calls[0] >= crossing.last)
            ):
                break
            if any(t == tensor for _, t in visit.inputs) and self._by_position(around, {tensor}):
                best = around
        if best is None:
            raise _Refused
        return best

    def _by_position(self, number: int, sources: set[int]) -> bool:
        """Return whether a module treats each of these positions by itself, and reads no other positions."""
        visit = self.trace.visits[number]
        inside = set(sources)
        if any(
            visit.calls[0] <= c.first and c.last <= visit.calls[1] for c, side in self.cut.scatters if side == "output"
        ):
            return False  # something inside of it is whole, and cut again
        for index in range(*visit.calls):
            inputs = self.flow.inputs[index]
            for tensor in inputs:
                kind, strange = self.trace.tensors[tensor].kind, tensor not in inside
                if not self.positions.dims_of(tensor):
                    strange = strange and kind != "parameter" and tensor in self.flow.carries
                    strange = strange or (kind == "buffer" and self.shards.is_split(tensor))
                if strange:
                    return False
            positioned = [t for t in inputs if self.positions.dims_of(t)]
            if not self.flow.is_identity(index) and positioned and self.stream.mixes(index, positioned) is not None:
                return False
            if any(not sizes_of(length) <= inside for length in self.positions.lengths_passed(index)):
                return False
            inside.update(self.flow.outputs[index])
        outputs = [t for _, t in visit.outputs]
        return bool(outputs) and all(self.positions.plain_dim(t) is not None and t in inside for t in outputs)

    def _plain(self, tensor: int) -> int:
        dim = self.positions.plain_dim(tensor)
        if dim is None or self.positions.flattened(tensor):
            raise _Refused
        return dim

    def _pieces(self, tensor: int, dim: int) -> tuple[int, str]:
        """The one dim along which a value lies in pieces on ranks, from the end, and how."""
        layouts = self.shards.layouts(tensor)
        split = [(d, layout) for d, layout in enumerate(layouts) if layout is not None]
        if len(split) != 1 or split[0][0] - len(layouts) == dim:
            raise _Refused
        return split[0][0] - len(layouts), str(split[0][1])

    def _stays(self, point: tuple[Crossing, str], gathered: int, exchanged: int) -> bool:
        """Return whether the stream is gathered, or a sum reduce-scattered, there. The numbers are what each moves."""
        if self.gathered is not None:
            return (self.alike[point[0].module], point[1]) in self.gathered
        return exchanged > gathered

    def _width(self, tensor: int) -> int:
        """The numbers that a rank holds for each position."""
        dim = self._plain(tensor)
        return prod(self.shards.local_shape(tensor, 0)) // self.trace.tensors[tensor].shape[dim]

    def _moved(self, swap: _Swap) -> int:
        """Numbers for each position, forward and backward; the gradient of a gather is moved only if it is partial."""
        ways = {**dict.fromkeys(swap.pieces, 2), **{at: 1 + partial for at, (_, partial) in swap.gathered.items()}}
        return sum(number * self._width(self.flow.tensor_at(at, "output")) for at, number in ways.items())

    def _summed(self, visits: set[int]) -> int:
        """Numbers for each position of gradients that are all-reduced in these runs of modules, unless exchanged."""
        spans = [self.trace.visits[number].calls for number in visits]
        sides = {"output": self.placement.outputs, "input": self.placement.inputs}
        summed = {(c, side) for side, place in sides.items() for c, kind in place if kind is AllReduceGradient}
        left = summed - {*self.cut.gather_sums} - self.cut.dropped
        inside = [key for key in left if any(first <= key[0].first and key[0].last <= last for first, last in spans)]
        return sum(2 * self._width(self.flow.tensor_at(*key)) for key in inside)

    # ------------------------------------------------------------------ sums

    def leave(self) -> None:
        """Exchange what enters the module that leaves a sum."""
        points: dict[HookPoint, list[Crossing]] = {}
        for crossing in self.cut.reduce_scatters:
            if self.positions.dims_of(self.flow.tensor_at(crossing, "output")):
                points.setdefault((crossing.module, "output", crossing.path), []).append(crossing)
        joining = [c for c, kind in self.placement.outputs if kind is JoinPartial]
        for crossings in sorted(points.values(), key=lambda them: any(c in joining for c in them)):
            swap = _Swap()
            with suppress(_Refused):
                for crossing in crossings:
                    self._give_back(crossing, swap)
                if any(c in joining for c in crossings) and self._withheld():
                    continue
                summed = sum(self._width(self.flow.tensor_at(c, "output")) for c in crossings)
                moved = sum(self._width(self.flow.tensor_at(entry, "input")) for entry in swap.pieces)
                if self._stays((crossings[0], "output"), MAY_MOVE * summed, moved):
                    continue
                self._convert(swap, "input")
                for crossing in crossings:
                    del self.cut.reduce_scatters[crossing]
                    self.cut.undone |= self._done_at(crossing, "output", AllReduce, WithholdPartial, JoinPartial)
                    for entry, piece in swap.pieces.items():
                        self.cut.exchanges[entry, "input"] = piece
                        self.cut.names[entry] = self.cut.names[crossing]

    def _withheld(self) -> bool:
        """Return whether a branch still withholds a partial sum."""
        withheld = (done for (_, kind), done in self.placement.outputs.items() if kind is WithholdPartial)
        return any(done not in self.cut.undone for done in withheld)

    def _give_back(self, crossing: Crossing, swap: _Swap) -> None:
        visit = self.trace.visits[crossing.visit]
        sources = {t for _, t in visit.inputs if self.positions.dims_of(t) and t in self.flow.carries}
        if len(sources) != 1 or len([t for _, t in visit.outputs if t in self.flow.carries]) != 1:
            raise _Refused
        (tensor,) = sources
        if visit.module in self.stream.names or not self._by_position(crossing.visit, sources):
            raise _Refused
        self._plain(self.flow.tensor_at(crossing, "output"))
        dim = self._plain(tensor)
        piece, layout = self._pieces(tensor, dim)
        if Layout.parse(layout).shared_rows(self.shards.tp):
            raise _Refused
        swap.visits.add(crossing.visit)
        swap.pieces |= dict.fromkeys(self._entries(crossing.visit, tensor), (dim, piece, layout))

    # ------------------------------------------------------------------ both

    @cached_property
    def _attributes(self) -> tuple[tuple[int, str], ...]:
        """The calls that are given integers of modules, and these modules."""
        arguments = enumerate((call.args, call.kwargs) for call in self.trace.calls)
        passed = ((index, item) for index, value in arguments for _, item in symbolics(value))
        return tuple((index, str(part[1])) for index, item in passed for part in item.parts("attr"))

    def _entries(self, number: int, tensor: int) -> list[Crossing]:
        """Return where a run of a module takes a value in, perhaps under several names."""
        return [crossing for crossing in self.flow.entering[tensor] if crossing.visit == number]

    def _done_at(self, crossing: Crossing, side: str, *kinds: Kind) -> set[Boundary]:
        place = self.placement.outputs if side == "output" else self.placement.inputs
        return {place[crossing, kind] for kind in kinds if (crossing, kind) in place}

    def _convert(self, swap: _Swap, pieces: str = "output") -> None:
        """The parameters of its modules are read whole from here on, and nothing is done at boundaries inside of them.
        `pieces`: the side on which these are."""
        keys = [*swap.shown, *((c, "input") for c in swap.own), *((c, "output") for c in swap.gathered)]
        if self.flow.uneven([*keys, *((c, pieces) for c in swap.pieces)]):
            raise _Refused
        visits = swap.visits
        calls = {index for number in visits for index in range(*self.trace.visits[number].calls)}
        modules = {self.trace.visits[number].module for number in visits}
        read = {t for index in calls for t in self.flow.inputs[index] if self.trace.tensors[t].kind == "parameter"}
        done_here = {
            done
            for place in (self.placement.outputs, self.placement.inputs)
            for (crossing, _), done in place.items()
            if any(_is_in(crossing.module, module) for module in modules)
        }
        if any(_is_in(name, module) for name in self.rewritten for module in modules):
            raise _Refused
        parts = self.placement.summed_parameters | self.placement.shared_parameters
        for tensor in read:  # rows that every rank holds have a part of their gradient on each, or it would count twice
            mixed = self.shards.is_split(tensor) and self.shards.is_mixed(tensor)
            if set(self.flow.uses[tensor]) - calls or (mixed and tensor not in parts):
                raise _Refused
        elsewhere = {name for index, name in self._attributes if index not in calls}
        if any(_is_in(name, module) for name in elsewhere for module in modules):
            raise _Refused
        inside = (self.trace.calls[index] for index in calls)
        self.cut.random |= {c.module for c in inside if call_record(c.name).random.has_rate(c.args, c.kwargs)}
        self.cut.whole_parameters |= read
        self.cut.whole_modules |= modules
        self.cut.undone |= done_here


def _is_in(name: str, module: str) -> bool:
    return name == module or name.startswith(f"{module}.")
