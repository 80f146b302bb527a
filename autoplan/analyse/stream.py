"""One stack's stream, followed through the calls in order: what is cut along the sequence, and at which borders.

The walk starts where the first block takes the stream in. Whenever a call needs the whole sequence, or meets a value
that is whole, a border is added and the walk begins again, until nothing is left to add.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoplan.analyse.callflow import Border, CallFlow
from autoplan.analyse.literals import evaluate
from autoplan.analyse.positions import Positions, integers
from autoplan.analyse.shards import Shards
from autoplan.analyse.sites import Placement
from autoplan.values import Symbolic

__all__ = ["SequencePlacement", "Stream"]

_ROUNDS = 200
_INDEXING = ("__getitem__", "narrow", "select", "index_select")
_RANDOM = ("dropout", "dropout_", "alpha_dropout")


@dataclass
class SequencePlacement:
    """What changes against plain tensor parallelism. Keys are borders; values the dim of the sequence, from the end."""

    scatters: dict[tuple[Border, str], int] = field(default_factory=dict)  # side "input" or "output"
    gathers: dict[tuple[Border, str], int] = field(default_factory=dict)  # whole readers: backward takes a share
    gather_sums: dict[tuple[Border, str], int] = field(default_factory=dict)  # replace a "copy"
    reduce_scatters: dict[Border, int] = field(default_factory=dict)  # replace a "reduce"
    summed_parameters: set[int] = field(default_factory=set)
    random: set[str] = field(default_factory=set)
    names: dict[Border, str] = field(default_factory=dict)  # which sequence a border is about; "*": batch × sequence
    flattened: set[Border] = field(default_factory=set)
    whole: list[str] = field(default_factory=list)  # what runs on the whole sequence, and why
    reason: str = ""  # why there is no sequence parallelism

    def name_borders(self, name: str) -> None:
        """Say of every border which sequence it is about."""
        keys = [*self.scatters, *self.gathers, *self.gather_sums]
        borders = (*(b for b, _ in keys), *self.reduce_scatters)
        self.names = {border: f"{name}*" if border in self.flattened else name for border in borders}

    @property
    def applies(self) -> bool:
        return not self.reason


class _Refused(Exception):
    """No border can be found; the message says for what."""


class _Again(Exception):
    """A border was added that changes what earlier calls see."""


class Stream:
    """Follows one stack's stream through the calls, in order."""

    def __init__(self, shards: Shards, flow: CallFlow, placement: Placement, names: tuple[str, ...]) -> None:
        self.shards, self.flow, self.placement, self.trace = shards, flow, placement, shards.trace
        self.names = set(names)
        self.result = SequencePlacement()
        self.copies_out = [b for (b, action) in placement.outputs if action == "copy"]
        self.copies_in = [b for (b, action) in placement.inputs if action == "copy"]
        self.reduces = {b for (b, action) in placement.outputs if action == "reduce"}

    # ------------------------------------------------------------------ where it starts

    def run(self) -> SequencePlacement | None:
        visits = [(i, v) for i, v in enumerate(self.trace.visits) if v.module in self.names]
        if not visits:
            return None
        index, first = visits[0]
        for path, tensor in first.inputs:
            terms = self.shards.axes.of(tensor)
            axis = Positions.of(terms)
            if tensor in self.flow.carries and axis is not None:
                self.positions = Positions(self.shards, axis)
                self.start = Border(index, first.module, path, *first.calls)
                self.origin = tensor
                self.last_call = max(v.calls[1] for _, v in visits)
                return self._settle()
        return None

    def _settle(self) -> SequencePlacement:
        try:
            for _ in range(_ROUNDS):
                try:
                    return self._walk()
                except _Again:
                    continue
        except _Refused as refused:
            return SequencePlacement(reason=str(refused))
        return SequencePlacement(reason="the borders of the stream did not settle")

    # ------------------------------------------------------------------ what a value is for a call

    def _is_cut(self, tensor: int, call: int) -> bool:
        """Does this call see a share of the value's positions?"""
        if not self._in_stream(tensor, call):
            return False
        if any(b.last <= call for b in self._leaving.get(tensor, ())):
            return False
        return not any(b.first <= call < b.last for b in self._gathered_inputs.get(tensor, ()))

    def _in_stream(self, tensor: int, call: int) -> bool:
        """Is the value cut when this call runs, unless a border made it whole?"""
        if tensor == self.origin:  # what the first block takes in is whole outside it
            return self.start.first <= call < self.start.last
        return tensor in self.cut

    def _index_borders(self) -> None:
        """Borders that make a value whole again, by value."""
        self._leaving: dict[int, list[Border]] = {}
        for border in (*self.copies_out, *(b for b, side in self.result.gathers if side == "output")):
            self._leaving.setdefault(self._tensor_at(border, "output"), []).append(border)
        self._gathered_inputs: dict[int, list[Border]] = {}
        for border in (*self.copies_in, *(b for b, side in self.result.gathers if side == "input")):
            self._gathered_inputs.setdefault(self._tensor_at(border, "input"), []).append(border)

    def _tensor_at(self, border: Border, side: str) -> int:
        visit = self.trace.visits[border.visit]
        return dict(visit.inputs if side == "input" else visit.outputs)[border.path]

    # ------------------------------------------------------------------ the walk

    def _walk(self) -> SequencePlacement:
        self.cut: set[int] = set()
        self._index_borders()
        result = self.result
        result.summed_parameters.clear()
        result.random.clear()
        start_dim = self.positions.plain_dim(self.origin)
        if start_dim is None:
            raise _Refused("the stream's sequence is merged with another dim where the first block begins")
        result.scatters[(self.start, "input")] = start_dim
        scattered_out = {self._tensor_at(b, "output") for b, side in result.scatters if side == "output"}
        scattered_in = [(self._tensor_at(b, "input"), b) for b, side in result.scatters if side == "input"]
        for index in range(self.start.first, len(self.trace.calls)):
            self._visit(index, scattered_in)
            for tensor in self.flow.outputs[index]:
                if tensor in scattered_out:
                    self.cut.add(tensor)
        self._finish()
        return result

    def _visit(self, index: int, scattered_in: list[tuple[int, Border]]) -> None:
        call, flow = self.trace.calls[index], self.flow
        inputs, outputs = flow.inputs[index], flow.outputs[index]
        cut = [t for t in inputs if self._cut_here(t, index, scattered_in)]
        if not cut:
            if self._told_a_share(index):
                reason = f"{call.name} in {call.module or 'the model'} is told the length of a share"
                self._gather_around(index, reason)
                raise _Refused(reason)
            self._cut_sums(index, outputs)
            return
        if flow.is_identity(index):
            return
        reason = self._crosses(index, cut)
        if reason:
            for tensor in cut:
                self._make_whole(tensor, index, reason)
            return
        for tensor in inputs:
            if tensor in cut or not self.positions.dims_of(tensor):
                continue
            self._cut_partner(tensor, index, cut)
        self._note_gradients(index, inputs, cut)
        if call.name in _RANDOM:
            self.result.random.add(call.module)
        self.cut.update(t for t in outputs if self.positions.dims_of(t))

    def _cut_here(self, tensor: int, index: int, scattered_in: list[tuple[int, Border]]) -> bool:
        if any(t == tensor and b.first <= index < b.last and b != self.start for t, b in scattered_in):
            return True
        return self._is_cut(tensor, index)

    def _cut_sums(self, index: int, outputs: list[int]) -> None:
        """A partial sum that leaves a region of the stack is scattered as it is summed."""
        if index >= self.last_call:
            return
        for tensor in outputs:
            for border in self.flow.leaving.get(tensor, []):
                if border in self.reduces and border.first <= index < border.last:
                    dim = self.positions.plain_dim(tensor)
                    if dim is not None and self._in_stack(border):
                        self.result.reduce_scatters[border] = dim
                        self.cut.add(tensor)

    def _in_stack(self, border: Border) -> bool:
        visit: int | None = border.visit
        while visit is not None:
            if self.trace.visits[visit].module in self.names:
                return True
            visit = self.trace.visits[visit].parent
        return False

    # ------------------------------------------------------------------ can a call run on a share?

    def _crosses(self, index: int, cut: list[int]) -> str:
        """Why a call needs the whole sequence, or an empty string."""
        call = self.trace.calls[index]
        for op in range(*call.ops):
            if self.positions.crossed_by(op):
                return f"{self.trace.ops[op].name} in {call.module or 'the model'} reads across the sequence"
        if call.name in _INDEXING and self.positions.picks(index, cut):
            return f"{call.name} in {call.module or 'the model'} picks positions"
        for tensor in (*self.flow.inputs[index], *self.flow.outputs[index]):
            if len(self.positions.dims_of(tensor)) > 1:
                return f"{call.name} in {call.module or 'the model'} meets two positions at once"
        if index in self.placement.reductions or any(self.shards.is_split(t) for t in self.flow.outputs[index]):
            return f"{call.name} in {call.module or 'the model'} enters a split region"
        if not self._sizes_follow(index, cut):
            return f"{call.name} in {call.module or 'the model'} is told the length of the sequence"
        return ""

    def _sizes_follow(self, index: int, cut: list[int]) -> bool:
        """Do the sizes that Python passes shrink by themselves when the cut inputs do?"""
        call = self.trace.calls[index]
        for tensor in self.flow.outputs[index]:
            shape = self.trace.tensors[tensor].shape
            for item in integers((call.args, call.kwargs)):
                if isinstance(item, Symbolic) and item.value in shape and self.positions.depends_on_length(item):
                    value = evaluate(item.origin, lambda t, d: self._local_size(t, d, index), lambda _: None)
                    if value == item.value:
                        return False
        return True

    def _told_a_share(self, index: int) -> bool:
        """Does a call on whole values get a length that was read from a cut one?"""
        call = self.trace.calls[index]
        return any(
            isinstance(item, Symbolic) and self.positions.depends_on_length(item)
            and evaluate(item.origin, lambda t, d: self._local_size(t, d, index), lambda _: 1)
            != evaluate(item.origin, lambda t, d: self.trace.tensors[t].shape[d], lambda _: 1)
            for item in integers((call.args, call.kwargs))
        )  # fmt: skip

    def _local_size(self, tensor: int, dim: int, index: int) -> int:
        size = self.trace.tensors[tensor].shape[dim]
        cut = self._is_cut(tensor, index)
        return (
            -size if cut and self.positions.has(self.shards.axes.of(tensor)[dim]) else size
        )  # any other number will do

    # ------------------------------------------------------------------ borders

    def _make_whole(self, tensor: int, index: int, reason: str) -> None:
        """Gather a value for a call: at the module that takes it in, else where it is returned."""
        dim = self.positions.plain_dim(tensor)
        if dim is not None:
            entering = [b for b in self.flow.entering.get(tensor, []) if b.first <= index < b.last]
            for border in sorted(entering, key=lambda b: b.last - b.first):
                handed_on = self.flow.passes_through(tensor, border)
                if border.module not in self.names and border != self.start and not handed_on:
                    self._add(self.result.gathers, (border, "input"), dim, reason)
            producer = self.flow.producer.get(tensor, -1)
            leaving = [b for b in self.flow.leaving.get(tensor, []) if b.first <= producer < b.last <= index]
            for border in sorted(leaving, key=lambda b: b.last - b.first):
                if tensor != self.origin:
                    self._add(self.result.gathers, (border, "output"), dim, reason)
        self._gather_around(index, reason)
        maker = self.flow.producer.get(tensor)
        if maker is not None and maker > self.start.first:
            for source in self.flow.inputs[maker]:
                if self.positions.dims_of(source) and self._is_cut(source, maker):
                    self._make_whole(source, maker, reason)
        raise _Refused(f"{reason}, and no module border lies before it")

    def _gather_around(self, index: int, reason: str) -> None:
        """Give the whole sequence to the innermost module around a call that takes in a cut value."""
        around = [(i, v) for i, v in enumerate(self.trace.visits) if v.calls[0] <= index < v.calls[1]]
        for number, visit in sorted(around, key=lambda item: item[1].calls[1] - item[1].calls[0]):
            if visit.module in self.names or visit.parent is None:
                return
            for path, tensor in visit.inputs:
                dim = self.positions.plain_dim(tensor)
                if dim is not None and self._is_cut(tensor, visit.calls[0]):
                    self._add(
                        self.result.gathers, (Border(number, visit.module, path, *visit.calls), "input"), dim, reason
                    )

    def _add(self, where: dict[tuple[Border, str], int], key: tuple[Border, str], dim: int, reason: str) -> None:
        if key in where:
            return
        where[key] = dim
        if reason:
            self.result.whole.append(f"{key[0].module}: {reason}")
        raise _Again

    def _cut_partner(self, tensor: int, index: int, cut: list[int]) -> None:
        """A whole value meets a cut one: cut it too, where a module returns it or takes it in."""
        call = self.trace.calls[index]
        if tensor in self._scattered():
            return
        dim = self.positions.plain_dim(tensor)
        producer = self.flow.producer.get(tensor, -1)
        if dim is not None:
            leaving = [b for b in self.flow.leaving.get(tensor, []) if b.first <= producer < b.last <= index]
            for border in sorted(leaving, key=lambda b: b.last - b.first):
                if self._all_after(border, tensor):
                    self._add(self.result.scatters, (border, "output"), dim, "")
            entering = [b for b in self.flow.entering.get(tensor, []) if b.first <= index < b.last]
            for border in sorted(entering, key=lambda b: b.last - b.first):
                if border.module not in self.names:
                    self._add(self.result.scatters, (border, "input"), dim, "")
        for value in cut:
            self._make_whole(value, index, f"{call.name} in {call.module or 'the model'} meets a whole value")

    def _scattered(self) -> set[int]:
        return {self._tensor_at(b, side) for b, side in self.result.scatters}

    def _all_after(self, border: Border, tensor: int) -> bool:
        return all(use >= border.last for use in self.flow.uses[tensor])

    def _note_gradients(self, index: int, inputs: list[int], cut: list[int]) -> None:
        """What a call on shares reads besides positions gets a part of its gradient on each rank."""
        for tensor in inputs:
            if tensor in cut or self.positions.dims_of(tensor) or tensor not in self.flow.carries:
                continue
            parameters = self._made_of(tensor, index)
            if parameters is None:
                call = self.trace.calls[index]
                for value in cut:
                    self._make_whole(value, index, f"{call.name} in {call.module} uses a value that others use whole")
            else:
                self.result.summed_parameters |= parameters

    def _made_of(self, tensor: int, reader: int) -> set[int] | None:
        """The parameters a value was made of for this reader alone; None when someone else reads it too."""
        if self.trace.tensors[tensor].kind == "parameter":
            return {tensor}
        producer = self.flow.producer.get(tensor)
        if producer is None or self.flow.gradient_uses(tensor) != {reader} or tensor in self.flow.final:
            return None
        found: set[int] = set()
        for source in self.flow.inputs[producer]:
            if source in self.flow.carries:
                made = None if self.positions.dims_of(source) else self._made_of(source, producer)
                if made is None:
                    return None
                found |= made
        return found

    # ------------------------------------------------------------------ the end

    def _finish(self) -> None:
        """Turn copies into gathers, gather what leaves the model, and check that parameters are used one way."""
        result = self.result
        sides = [(b, "output") for b in self.copies_out] + [(b, "input") for b in self.copies_in]
        for border, side in sides:
            tensor = self._tensor_at(border, side)
            inside = tensor in self.cut or (
                tensor == self.origin and self.start.first <= border.first < self.start.last
            )
            if not inside or (border, side) in result.gathers or self._whole_around(border, tensor):
                continue
            dim = self.positions.plain_dim(tensor)
            if dim is None:
                raise _Refused(f"the sequence is merged with another dim where {border.module} takes it in")
            result.gather_sums[(border, side)] = dim
        for index, visit in enumerate(self.trace.visits):
            if visit.parent is None and visit.calls[1] > self.start.first:
                for path, tensor in visit.outputs:
                    if tensor in self.cut and not self._leaving.get(tensor):
                        dim = self.positions.plain_dim(tensor)
                        if dim is None:
                            raise _Refused("what the model returns has its sequence merged with another dim")
                        result.gathers[(Border(index, visit.module, path, *visit.calls), "output")] = dim
        for tensor in result.summed_parameters:
            uses = self.flow.gradient_uses(tensor)
            whole = [u for u in uses if not self._reaches_share(u)]
            if whole and tensor not in self.placement.summed_parameters:
                raise _Refused(f"{self.trace.tensors[tensor].names[0]} is used on shares and on the whole sequence")
        self._even_doors()

    def _whole_around(self, border: Border, tensor: int) -> bool:
        """Has the value been made whole already where this border lies?"""
        gathered = [b for b, side in self.result.gathers if side == "output" and self._tensor_at(b, side) == tensor]
        if any(b.last <= border.first for b in gathered):
            return True
        around = [b for b, side in self.result.gathers if side == "input" and self._tensor_at(b, side) == tensor]
        return any(b.first <= border.first and border.last <= b.last and b != border for b in around)

    def _even_doors(self) -> None:
        """A hook acts on every run of its module: all runs must need the same."""
        result = self.result
        doors: dict[tuple[str, str, tuple[Any, ...]], set[int]] = {}
        keys = [
            *result.scatters,
            *result.gathers,
            *result.gather_sums,
            *((b, "output") for b in result.reduce_scatters),
        ]
        for border, side in keys:
            doors.setdefault((border.module, side, border.path), set()).add(border.visit)
            if self.positions.flattened(self._tensor_at(border, side)):
                result.flattened.add(border)
        for (module, side, path), visits in doors.items():
            if set(self.flow.runs_through(module, side, path)) != visits:
                raise _Refused(f"{module or 'the model'} runs on shares and on the whole sequence")

    def _reaches_share(self, call: int) -> bool:
        """Is what a call makes of a parameter used on shares of the positions?"""
        positions = [t for t in self.flow.inputs[call] if self.positions.dims_of(t)]
        if positions:
            return any(self._is_cut(t, call) for t in positions)
        outputs = [t for t in self.flow.outputs[call] if t in self.flow.carries]
        return all(self._reaches_share(use) for t in outputs for use in self.flow.gradient_uses(t))
