"""What of a stream is cut along the sequence while its boundaries are being found, and whether they hold together.

A value is cut where it comes from calls on shards, and whole behind every boundary that gathers it. Once no boundary is
missing, three things must be true: what has become whole by now is gathered once; a parameter is used on shards or on
the whole sequence, not on both; and every run of a module needs the same of its hooks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from autoplan.analyse.infer import Shards
from autoplan.analyse.placement.callflow import CallFlow, Crossing, HookPoint, Placement
from autoplan.analyse.sequence.changes import Refused, Restart, SequencePlacement
from autoplan.analyse.sequence.positions import Positions
from autoplan.analyse.sequence.windows import uneven_places
from autoplan.analyse.splits.integer_edits import evaluate
from autoplan.axes.terms import Term
from autoplan.common.patterns import is_under
from autoplan.ops.records.answers import Reduction
from autoplan.ops.reductions import sums_over
from autoplan.values import (
    AllReduce,
    AllReduceGradient,
    Boundary,
    Call,
    HookKind,
    LengthArgument,
    ModuleVisit,
    ScaleGradient,
    WithholdPartial,
    refs,
)
from autoplan.values.not_placed import WholeSequence


class CutStream:
    """The state of one stack's stream, and questions about it."""

    positions: Positions
    coupled: tuple[set[Term], set[Term]]  # the axes that ops couple, in the blocks and anywhere

    def __init__(
        self, shards: Shards, flow: CallFlow, placement: Placement, names: tuple[str, ...], context: bool = False,
        apart: bool = False, shares: bool = False, outside: bool = False,
        rescales: bool = False, gathered: Collection[HookKind] = (),
    ) -> None:  # fmt: skip
        self.shards, self.flow, self.placement, self.trace = shards, flow, placement, shards.trace
        self.names = set(names)
        self.starts: dict[Crossing, int] = {}  # where each run of the model enters its first block -> the value
        self.made_at: dict[Crossing, int] = {}  # where a module returns it, if others than the first block read it, too
        self.whole: set[str] = set()  # blocks that take in the whole sequence
        self.rescales = rescales  # does code with residuals see shards, rather than modules whose calls need lengths?
        self.outside = outside  # may the stream begin outside of the first block?
        self.result = SequencePlacement()
        self.closed: set[HookPoint] = set()  # where only some runs of a module would need what a hook does
        self.evened: set[HookPoint] = set()  # where that is done in all runs, if they have shards there
        self.scattering: set[int] = set()  # calls inside modules that sum, and keep own positions
        self.told_whole: set[int] = set()  # calls that could make a value for own positions, but make it for all
        self.told_unevenly = set[tuple[str, str, str]]()  # where not all repetitions need their own length
        self.context = context  # is every gradient outside of split regions a part of a sum? See context.py
        self.shares = shares  # may calls on shards read values without positions that others read, too?
        self.picking, self.rows, self.asking = set[int](), set[int](), set[int]()  # see picks.py
        self.gathered = gathered
        self.reduced = set[int]()  # sums over positions, and what is made of these: equal on all ranks
        self.apart, self.own_queries = apart, dict[int, set[int]]()  # what attention runs for own queries (windows.py)
        self.copies_out = self._in_every_run("output", placement.done_to(AllReduceGradient))
        self.copies_in = self._in_every_run("input", (b for b, kind in placement.inputs if kind is AllReduceGradient))
        self.needless, self.residual_inside = set[Boundary](), set[str]()
        if context and rescales:  # gradients of a residual that is added within are of own positions, too
            scaled = [b.module for b, kind in placement.inputs if kind is ScaleGradient]
            around = {b.module for b in self.copies_in if any(is_under(b.module, name) for name in scaled)}
            self.residual_inside = around
            self.copies_in, self.copies_out = (
                [b for b in copies if not any(is_under(name, b.module) for name in around)]
                for copies in (self.copies_in, self.copies_out)
            )
            for (b, kind), done in (*placement.inputs.items(), *placement.outputs.items()):
                within = kind in (AllReduceGradient, ScaleGradient) and any(is_under(name, b.module) for name in around)
                self.needless |= {done} if within else set()
        self.reduces = {*placement.done_to(AllReduce), *placement.done_to(WithholdPartial)}
        self.first_call = self.last_call = 0
        self.cut: set[int] = set()
        self.cut_from: dict[int, int] = {}  # the first call behind the module that returns it whole, and is cut there

    def _in_every_run(self, side: str, crossings: Iterable[Crossing]) -> list[Crossing]:
        """The same points in runs without gradients too: a copy does nothing there, but what it becomes gathers."""
        points = dict.fromkeys((crossing.module, crossing.path) for crossing in crossings)
        return [
            Crossing(number, module, path, *self.trace.visits[number].calls)
            for module, path in points
            for number in self.flow.runs_through(module, side, path)
        ]

    # ------------------------------------------------------------------ where the stream begins

    def entries_of(self, blocks: list[tuple[int, ModuleVisit]]) -> Iterator[tuple[Crossing, int, Term]]:
        """Yield where the stack is entered, perhaps repeatedly: the boundary, the stream's value, its sequence."""
        first = [(number, visit) for number, visit in blocks if visit.module == blocks[0][1].module]
        returned = {tensor for _, visit in blocks for _, tensor in visit.outputs}
        alike = {entry for _, v in blocks if v.module != blocks[0][1].module for entry in v.inputs}  # encoders' outputs
        entries = [entry for _, v in first for entry in v.inputs if entry not in alike]
        carrying = [entry for entry in entries if entry[1] in self.flow.carries]
        tensors = (
            entry for entry in entries if (info := self.trace.tensors[entry[1]]).kind == "input" and info.differentiable
        )
        entries = carrying or list(tensors)  # blocks may take in the model's own input
        path = next((p for p, t in entries if self._axis(t) is not None), None)
        for number, visit in first:
            tensor = dict(visit.inputs).get(path) if path is not None else None
            axis = None if tensor is None or tensor in returned else self._axis(tensor)
            if tensor is not None and axis is not None:
                yield Crossing(number, visit.module, path or (), *visit.calls), tensor, axis

    def around_all(self, start: Crossing, tensor: int) -> tuple[Crossing, Crossing | None]:
        """Return where a module takes in a stream that is read outside of its first block (a residual of it is added
        there), or else where a module returns it."""
        uses = {use for use in self.flow.uses[tensor] if use >= start.first}
        around = [c for c in self.flow.entering[tensor] if all(c.first <= use < c.last for use in uses)]
        if around:
            return min(around, key=lambda c: c.last - c.first), None
        made_by = [
            c for c in self.left_before(tensor, start.first) if c.module and min(self.flow.uses[tensor]) >= c.last
        ]
        return start, made_by[-1] if made_by else None

    def _axis(self, tensor: int) -> Term | None:
        return Positions.of(self.shards.axes.of(tensor), *self.coupled)

    # ------------------------------------------------------------------ what a value is for a call

    def is_cut(self, tensor: int, call: int, last: int | None = None) -> bool:
        """Return whether this call (or all until `last`, taken together) sees a shard of the value's positions."""
        last = call + 1 if last is None else last
        if not self.in_stream(tensor, call):
            return False
        if any(b.last <= call and self.in_stream(tensor, b.first) for b in self.leaving.get(tensor, ())):
            return False
        return not any(b.first <= call and last <= b.last for b in self.gathered_inputs.get(tensor, ()))

    def in_stream(self, tensor: int, call: int) -> bool:
        """Return whether the value is sharded when this call runs, unless a boundary made it whole."""
        if tensor in self.starts.values():  # what the first block takes in is whole outside it
            return any(t == tensor and start.first <= call < start.last for start, t in self.starts.items())
        return tensor in self.cut and call >= self.cut_from.get(tensor, 0)

    def index_crossings(self) -> None:
        """Crossings that make a value whole again, by value."""
        self.leaving: dict[int, list[Crossing]] = {}
        for crossing in (*self.copies_out, *(b for b, side in self.result.gathers if side == "output")):
            self.leaving.setdefault(self.flow.tensor_at(crossing, "output"), []).append(crossing)
        self.gathered_inputs: dict[int, list[Crossing]] = {}
        for crossing in (*self.copies_in, *(b for b, side in self.result.gathers if side == "input")):
            self.gathered_inputs.setdefault(self.flow.tensor_at(crossing, "input"), []).append(crossing)

    def entering(self, tensor: int, index: int) -> list[Crossing]:
        """Return where modules around a call take a value in, innermost first."""
        around = (b for b in self.flow.entering.get(tensor, []) if b.first <= index < b.last)
        return sorted(around, key=lambda b: b.last - b.first)

    def left_before(self, tensor: int, index: int) -> list[Crossing]:
        """Return where modules that made a value return it before a call, innermost first."""
        producer = self.flow.producer.get(tensor, -1)
        before = (b for b in self.flow.leaving.get(tensor, []) if b.first <= producer < b.last <= index)
        return sorted(before, key=lambda b: b.last - b.first)

    def local_size(self, tensor: int, dim: int, index: int) -> int:
        """Return the size of a dim for code at a call; a number that is not its size if it is shared out."""
        size = self.trace.tensors[tensor].shape[dim]
        shard = self.is_cut(tensor, index) and self.positions.has(self.shards.axes.of(tensor)[dim])
        return -size if shard else size  # any other number will do

    def sizes_follow(self, index: int) -> bool:
        """Return whether the sizes that Python passes shrink with the sharded inputs."""
        sizes = {size for tensor in self.flow.outputs[index] for size in self.trace.tensors[tensor].shape}
        return not any(
            item.value in sizes
            and evaluate(item.origin, lambda t, d: self.local_size(t, d, index), lambda _: None) == item.value
            for item in self.positions.lengths_passed(index)
        )

    def own_lengths(self, index: int) -> tuple[LengthArgument, ...] | None:
        """Return the lengths of the whole sequence that a call on shards is passed, if it can be passed its own."""
        if not self.context or self.trace.calls[index].source in self.told_unevenly:
            return None
        return self.positions.lengths_to_change(index, lambda t, d: self._is_told(t, d, index), own=True)

    def sums_positions(self, index: int, cut: list[int]) -> Reduction | None:
        """Return how a call in a module's code sums over all positions of a value on shards, to nothing that has any;
        None if it does not."""
        call = self.trace.calls[index]
        ops = [op for op in range(*call.ops) if self.positions.crossed_by(op)]
        if not (self.context and call.module and len(ops) == len(cut) == 1 and ops[0] == call.ops[1] - 1):
            return None
        op, (source,) = self.trace.ops[ops[0]], cut
        summed_dims = sums_over(op, len(self.trace.tensors[source].shape)) if [*refs(op.args)] == [source] else None
        apart = call.source in self.told_unevenly or any(map(self.positions.dims_of, self.flow.outputs[index]))
        if (
            summed_dims is None
            or apart
            or not {*self.positions.dims_of(source)} <= {*summed_dims[1]}
            or self._skippable(index)
        ):
            return None
        return summed_dims[0] if self.positions.plain_dim(source) is not None else None

    def _skippable(self, index: int) -> bool:
        """Return whether a rank might not reach a call: code before it asked how many of its own positions it picks."""
        calls, inputs = self.trace.calls, self.flow.inputs
        here = (a for a in self.asking if a < index and calls[a].module == calls[index].module)
        return any(calls[a].visit == calls[index].visit and not self.reduced.issuperset(inputs[a]) for a in here)

    def _is_told(self, tensor: int, dim: int, index: int) -> bool:
        """Return whether code at a call reads the length of the whole sequence off a dim."""
        return self.positions.has(self.shards.axes.of(tensor)[dim]) and self.local_size(tensor, dim, index) > 0

    def receives_local_length(self, index: int) -> bool:
        """Return whether a call on whole values gets a length that was read from a sharded one."""
        return any(
            evaluate(item.origin, lambda t, d: self.local_size(t, d, index), lambda _: 1)
            != evaluate(item.origin, lambda t, d: self.trace.tensors[t].shape[d], lambda _: 1)
            for item in self.positions.lengths_passed(index)
        )

    def made_of(self, tensor: int, reader: int) -> set[int] | None:
        """The parameters a value was made of for this reader alone; None when someone else reads it too."""
        if self.trace.tensors[tensor].kind == "parameter":
            return {tensor}
        producer = self.flow.producer.get(tensor)
        if producer is None or self.flow.gradient_uses(tensor) != {reader} or tensor in self.flow.final:
            return None
        parameters: set[int] = set()
        for source in self.flow.inputs[producer]:
            if source in self.flow.carries:
                sources = None if self.positions.dims_of(source) else self.made_of(source, producer)
                if sources is None:
                    return None
                parameters |= sources
        return parameters

    def scatter_sum(self, call: int) -> None:
        """Keep own positions of the sum that a call leaves amid a module's code, if it can be."""
        if self.placement.inside_reductions.get(call) is not Reduction.SUM or call < self.first_call:
            return
        inputs, (output, *more) = self.flow.inputs[call], self.flow.outputs[call]
        all_split = all(self.shards.is_split(tensor) for tensor in inputs if tensor in self.flow.carries)
        plain = self.positions.plain_dim(output) is not None and not self.positions.flattened(output)
        if all_split and plain and not more and call not in self.scattering:
            self.scattering.add(call)
            raise Restart

    def leaves_blocks_cut(self) -> bool:
        """Return whether what any block returns is a shard."""
        returned = ((t, v.calls[1]) for v in self.trace.visits if v.module in self.names for _, t in v.outputs)
        return any(self.is_cut(tensor, end) for tensor, end in returned)

    # ------------------------------------------------------------------ the end

    def finish(self) -> None:
        """Turn copies into gathers, gather what leaves the model, and check that parameters are used one way."""
        result = self.result
        result.undone |= self.needless
        result.summing |= self.residual_inside
        self._forget_needless()
        sides = [(b, "output") for b in self.copies_out] + [(b, "input") for b in self.copies_in]
        for crossing, side in sides:
            tensor = self.flow.tensor_at(crossing, side)
            whole = not self.in_stream(tensor, crossing.first) or self._whole_around(crossing, tensor)
            if whole or (crossing, side) in result.gathers:
                continue
            dim = self.positions.plain_dim(tensor)
            if dim is None:
                raise Refused(WholeSequence("merged-taken-in", crossing.module))
            result.gather_sums[(crossing, side)] = dim
        for index, visit in enumerate(self.trace.visits):
            if visit.parent is None and visit.calls[1] > self.first_call:
                for path, tensor in visit.outputs:
                    key = Crossing(index, visit.module, path, *visit.calls), "output"
                    if any(crossing.module for crossing in self.leaving.get(tensor, ())):
                        result.gathers.pop(key, None)
                    elif tensor in self.cut and not self.leaving.get(tensor):
                        dim = self.positions.plain_dim(tensor)
                        if dim is None:
                            raise Refused(WholeSequence("merged-returned"))
                        result.gathers[key] = dim
        for tensor in result.summed_parameters if not self.context else ():
            uses = self.flow.gradient_uses(tensor)
            by_whole = [u for u in uses if not self._reaches_shard(u)]
            if by_whole and tensor not in self.placement.summed_parameters:
                call = self.trace.calls[min(by_whole)]
                name = self.trace.tensors[tensor].names[0]
                raise Refused(WholeSequence("shared-parameter", call.module, call.name, parameter=name))
        own = {index: each for index, each in result.work.lengths.items() if each and each[0].own}
        if uneven := uneven_places(own, self.trace) | uneven_places(result.work.summed, self.trace):
            self.told_unevenly |= uneven
            raise Restart
        self._even_points()
        self._note_shards()

    def _note_shards(self) -> None:
        """Note what blocks return on shards: transformers collects it for callers that request hidden states."""
        returned: list[tuple[Crossing, str]] = []
        for number, visit in enumerate(self.trace.visits):
            behind = self.context and visit.parent is not None and visit.calls[0] >= self.last_call
            collected = visit.module in self.names or behind
            for path, tensor in visit.outputs if collected else ():
                inside = not (behind and tensor in self.flow.final) and self.positions.plain_dim(tensor) is not None
                if inside and self.is_cut(tensor, visit.calls[1]):
                    returned.append((Crossing(number, visit.module, path, *visit.calls), "output"))
        uneven = self.flow.uneven(returned)
        self.result.returned_shards.clear()
        for crossing, side in returned:
            if (crossing.module, side, crossing.path) not in uneven:
                tensor = self.flow.tensor_at(crossing, side)
                self.result.returned_shards[crossing] = self.positions.plain_dim(tensor) or 0
                if self.positions.flattened(tensor):
                    self.result.flattened.add(crossing)

    def _forget_needless(self) -> None:
        """Drop gathers of what is whole by now: a boundary that was added later made it so further out."""
        for crossing, side in list(self.result.gathers):
            tensor = self.flow.tensor_at(crossing, side)
            inner = side == "input" and self._whole_around(crossing, tensor)
            if inner or not (tensor in self.cut or self.in_stream(tensor, crossing.first)):
                del self.result.gathers[crossing, side]

    def _whole_around(self, crossing: Crossing, tensor: int) -> bool:
        """Return whether the value has already been made whole at this boundary."""
        gathered = [b for b, side in self.result.gathers if side == "output" and self.flow.tensor_at(b, side) == tensor]
        if any(b.last <= crossing.first for b in gathered):
            return True
        around = [b for b, side in self.result.gathers if side == "input" and self.flow.tensor_at(b, side) == tensor]
        return any(b.first <= crossing.first and crossing.last <= b.last and b.visit != crossing.visit for b in around)

    def _even_points(self) -> None:
        """A hook acts on every run of its module: all runs must need the same."""
        result = self.result
        keys = [*result.scatters, *result.gathers, *result.gather_sums]
        keys += ((b, "output") for b in result.reduce_scatters)
        for crossing, side in keys:
            if self.positions.flattened(self.flow.tensor_at(crossing, side)):
                result.flattened.add(crossing)
        uneven = self.flow.uneven(keys)
        if self._gather_in_all_runs(uneven):
            raise Restart
        fixed = {(b.module, "input", b.path) for b in self.starts}
        fixed |= {(b.module, "output", b.path) for b in self.made_at} | {
            (b.module, side, b.path)
            for b, side in (*result.gather_sums, *((b, "output") for b in result.reduce_scatters))
        }
        for point in sorted(uneven & fixed, key=str):
            call = self._maker(point, keys)
            if call is None:
                raise Refused(WholeSequence("runs-both-ways", point[0]))
            raise Refused(WholeSequence("made-whole-for", point[0], call.name, maker=call.module))
        if uneven:  # look for other boundaries
            self.closed |= uneven
            self.result = SequencePlacement()
            raise Restart

    def _gather_in_all_runs(self, uneven: set[HookPoint]) -> bool:
        """Gather at points where only some runs of a module need the whole (those that compute a loss) in the others,
        too, if they have shards there; return whether any was added."""
        added = False
        points = {(b.module, side, b.path) for b, side in self.result.gathers} & uneven - self.evened
        for module, side, path in sorted(points, key=str):
            self.evened.add((module, side, path))
            dims: dict[tuple[Crossing, str], int | None] = {}
            for number, tensor in self.flow.runs_through(module, side, path).items():
                at = Crossing(number, module, path, *self.trace.visits[number].calls)
                inside = (at.last - 1,) if side == "output" else (at.first, at.last)
                cut = (at, side) in self.result.gathers or self.is_cut(tensor, *inside)
                dims[at, side] = self.positions.plain_dim(tensor) if cut else None
            if None not in dims.values():
                self.result.gathers |= {key: dim for key, dim in dims.items() if dim is not None}
                added = True
        return added

    def _maker(self, point: HookPoint, keys: list[tuple[Crossing, str]]) -> Call | None:
        """Return the call that made a value that is whole where others are sharded."""
        sharded = {crossing.visit for crossing, side in keys if (crossing.module, side, crossing.path) == point}
        runs = self.flow.runs_through(*point)
        makers = (self.flow.producer.get(tensor, -1) for visit, tensor in runs.items() if visit not in sharded)
        return next((self.trace.calls[index] for index in makers if index >= 0), None)

    def _reaches_shard(self, call: int) -> bool:
        """Return whether what a call makes of a parameter is used on shards of the positions."""
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
