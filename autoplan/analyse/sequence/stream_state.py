"""What of a stream is cut along the sequence while its borders are being found, and whether they hold together.

A value is cut where it comes from calls on shares, and whole behind every border that gathers it. Once no border is
missing, three things must be true: what has become whole by now is gathered once; a parameter is used on shares or on
the whole sequence, not on both; and every run of a module needs the same of its hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from autoplan.analyse.placement.boundaries import Door
from autoplan.analyse.placement.callflow import Border, CallFlow
from autoplan.analyse.placement.placement import Placement
from autoplan.analyse.sequence.positions import Positions
from autoplan.analyse.shards import Shards
from autoplan.values import AllReduce, AllReduceGradient, SequenceName, WithholdPartial

__all__ = ["Again", "CutStream", "Refused", "SequencePlacement"]


@dataclass
class SequencePlacement:
    """What changes against plain tensor parallelism. Keys are borders; values the dim of the sequence, from the end."""

    scatters: dict[tuple[Border, str], int] = field(default_factory=dict)  # side "input" or "output"
    gathers: dict[tuple[Border, str], int] = field(default_factory=dict)  # whole readers: backward takes a share
    gather_sums: dict[tuple[Border, str], int] = field(default_factory=dict)  # replace an AllReduceGradient
    reduce_scatters: dict[Border, int] = field(default_factory=dict)  # replace an AllReduce
    shares: dict[Border, int] = field(default_factory=dict)  # blocks that return a share, which others may collect
    summed_parameters: set[int] = field(default_factory=set)
    random: set[str] = field(default_factory=set)
    names: dict[Border, SequenceName] = field(default_factory=dict)  # which sequence a border is about
    flattened: set[Border] = field(default_factory=set)
    whole: list[str] = field(default_factory=list)  # what runs on the whole sequence, and why
    reason: str = ""  # why there is no sequence parallelism

    def name_borders(self, name: str) -> None:
        """Say of every border which sequence it is about."""
        keys = [*self.scatters, *self.gathers, *self.gather_sums]
        borders = (*(b for b, _ in keys), *self.reduce_scatters, *self.shares)
        self.names = {border: SequenceName(name, border in self.flattened) for border in borders}

    @property
    def applies(self) -> bool:
        return not self.reason


class Refused(Exception):
    """No border can be found; the message says for what."""


class Again(Exception):
    """A border was added that changes what earlier calls see."""


class CutStream:
    """The state of one stack's stream, and questions about it."""

    positions: Positions

    def __init__(self, shards: Shards, flow: CallFlow, placement: Placement, names: tuple[str, ...]) -> None:
        self.shards, self.flow, self.placement, self.trace = shards, flow, placement, shards.trace
        self.names = set(names)
        self.starts: dict[Border, int] = {}  # where each run of the model enters its first block -> the value
        self.result = SequencePlacement()
        self.closed: set[Door] = set()  # where only some runs of a module would need what a hook does
        self.copies_out = self._in_every_run("output", placement.done_to(AllReduceGradient))
        self.copies_in = self._in_every_run("input", (b for b, kind in placement.inputs if kind is AllReduceGradient))
        self.reduces = {*placement.done_to(AllReduce), *placement.done_to(WithholdPartial)}
        self.first_call = self.last_call = 0
        self.cut: set[int] = set()

    def _in_every_run(self, side: str, borders: Iterable[Border]) -> list[Border]:
        """The same doors in runs without gradients, too: a copy does nothing there, but what it becomes gathers."""
        doors = dict.fromkeys((border.module, border.path) for border in borders)
        return [
            Border(number, module, path, *self.trace.visits[number].calls)
            for module, path in doors
            for number in self.flow.runs_through(module, side, path)
        ]

    # ------------------------------------------------------------------ what a value is for a call

    def is_cut(self, tensor: int, call: int, last: int | None = None) -> bool:
        """Does this call (or do all until `last`, taken together) see a share of the value's positions?"""
        last = call + 1 if last is None else last
        if not self.in_stream(tensor, call):
            return False
        if any(b.last <= call for b in self.leaving.get(tensor, ())):
            return False
        return not any(b.first <= call and last <= b.last for b in self.gathered_inputs.get(tensor, ()))

    def in_stream(self, tensor: int, call: int) -> bool:
        """Is the value cut when this call runs, unless a border made it whole?"""
        if tensor in self.starts.values():  # what the first block takes in is whole outside it
            return any(t == tensor and start.first <= call < start.last for start, t in self.starts.items())
        return tensor in self.cut

    def index_borders(self) -> None:
        """Borders that make a value whole again, by value."""
        self.leaving: dict[int, list[Border]] = {}
        for border in (*self.copies_out, *(b for b, side in self.result.gathers if side == "output")):
            self.leaving.setdefault(self.tensor_at(border, "output"), []).append(border)
        self.gathered_inputs: dict[int, list[Border]] = {}
        for border in (*self.copies_in, *(b for b, side in self.result.gathers if side == "input")):
            self.gathered_inputs.setdefault(self.tensor_at(border, "input"), []).append(border)

    def tensor_at(self, border: Border, side: str) -> int:
        visit = self.trace.visits[border.visit]
        return dict(visit.inputs if side == "input" else visit.outputs)[border.path]

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Turn copies into gathers, gather what leaves the model, and check that parameters are used one way."""
        result = self.result
        self._forget_needless()
        sides = [(b, "output") for b in self.copies_out] + [(b, "input") for b in self.copies_in]
        for border, side in sides:
            tensor = self.tensor_at(border, side)
            if (
                not self.in_stream(tensor, border.first)
                or (border, side) in result.gathers
                or self._whole_around(border, tensor)
            ):
                continue
            dim = self.positions.plain_dim(tensor)
            if dim is None:
                raise Refused(f"the sequence is merged with another dim where {border.module} takes it in")
            result.gather_sums[(border, side)] = dim
        for index, visit in enumerate(self.trace.visits):
            if visit.parent is None and visit.calls[1] > self.first_call:
                for path, tensor in visit.outputs:
                    if tensor in self.cut and not self.leaving.get(tensor):
                        dim = self.positions.plain_dim(tensor)
                        if dim is None:
                            raise Refused("what the model returns has its sequence merged with another dim")
                        result.gathers[(Border(index, visit.module, path, *visit.calls), "output")] = dim
        for tensor in result.summed_parameters:
            uses = self.flow.gradient_uses(tensor)
            whole = [u for u in uses if not self._reaches_share(u)]
            if whole and tensor not in self.placement.summed_parameters:
                call = self.trace.calls[min(whole)]
                name, place = self.trace.tensors[tensor].names[0], call.module or "the model"
                raise Refused(f"{call.name} in {place} uses {name} on the whole sequence, others use it on shares")
        self._even_doors()
        self._note_shares()

    def _note_shares(self) -> None:
        """What blocks return on shares: transformers collects it for callers that ask for hidden states."""
        self.result.shares.clear()
        doors: dict[Door, dict[int, Border]] = {}
        for number, visit in enumerate(self.trace.visits):
            for path, tensor in visit.outputs if visit.module in self.names else ():
                if self.positions.plain_dim(tensor) is not None and self.is_cut(tensor, visit.calls[1]):
                    border = Border(number, visit.module, path, *visit.calls)
                    doors.setdefault((visit.module, "output", path), {})[number] = border
        for door, borders in doors.items():
            if set(self.flow.runs_through(*door)) == set(borders):
                for border in borders.values():
                    tensor = self.tensor_at(border, "output")
                    self.result.shares[border] = self.positions.plain_dim(tensor) or 0
                    if self.positions.flattened(tensor):
                        self.result.flattened.add(border)

    def _forget_needless(self) -> None:
        """Drop gathers of what is whole by now: a border that was added later made it so further out."""
        for border, side in list(self.result.gathers):
            tensor = self.tensor_at(border, side)
            inner = side == "input" and self._whole_around(border, tensor)
            if inner or not (tensor in self.cut or self.in_stream(tensor, border.first)):
                del self.result.gathers[border, side]

    def _whole_around(self, border: Border, tensor: int) -> bool:
        """Has the value been made whole already where this border lies?"""
        gathered = [b for b, side in self.result.gathers if side == "output" and self.tensor_at(b, side) == tensor]
        if any(b.last <= border.first for b in gathered):
            return True
        around = [b for b, side in self.result.gathers if side == "input" and self.tensor_at(b, side) == tensor]
        return any(b.first <= border.first and border.last <= b.last and b.visit != border.visit for b in around)

    def _even_doors(self) -> None:
        """A hook acts on every run of its module: all runs must need the same."""
        result = self.result
        doors: dict[Door, set[int]] = {}
        keys = [
            *result.scatters,
            *result.gathers,
            *result.gather_sums,
            *((b, "output") for b in result.reduce_scatters),
        ]
        for border, side in keys:
            doors.setdefault((border.module, side, border.path), set()).add(border.visit)
            if self.positions.flattened(self.tensor_at(border, side)):
                result.flattened.add(border)
        uneven = {door for door, visits in doors.items() if set(self.flow.runs_through(*door)) != visits}
        fixed = {(b.module, "input", b.path) for b in self.starts} | {
            (b.module, side, b.path)
            for b, side in (*result.gather_sums, *((b, "output") for b in result.reduce_scatters))
        }
        for door in sorted(uneven & fixed, key=str):
            raise Refused(f"{door[0] or 'the model'} runs on shares and on the whole sequence{self._of(door, doors)}")
        if uneven:  # look for other borders
            self.closed |= uneven
            self.result = SequencePlacement()
            raise Again

    def _of(self, door: Door, doors: dict[Door, set[int]]) -> str:
        """What made the value that is whole where others are cut."""
        runs = self.flow.runs_through(*door)
        made = (self.flow.producer.get(tensor, -1) for visit, tensor in runs.items() if visit not in doors[door])
        call = next((self.trace.calls[index] for index in made if index >= 0), None)
        return "" if call is None else f", which {call.name} in {call.module or 'the model'} made"

    def _reaches_share(self, call: int) -> bool:
        """Is what a call makes of a parameter used on shares of the positions?"""
        seen, waiting = set[int](), [call]
        while waiting:
            index = waiting.pop()
            if index in seen:
                continue
            seen.add(index)
            positions = [t for t in self.flow.inputs[index] if self.positions.dims_of(t)]
            if not positions:
                outputs = [t for t in self.flow.outputs[index] if t in self.flow.carries]
                waiting += [use for t in outputs for use in self.flow.gradient_uses(t)]
            elif not any(self.is_cut(t, index) for t in positions):
                return False
        return True
