"""One stack's stream, followed through the calls in order: what is cut along the sequence, and at which boundaries.

The walk starts where the first block takes the stream in, in every run of the model that goes through the stack.
Whenever a call needs the whole sequence, or meets a value that is whole, a boundary is added and the walk begins again,
until nothing is left to add.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from autoplan.analyse.placement.callflow import Crossing
from autoplan.analyse.sequence.changes import Refused, Restart, SequencePlacement
from autoplan.analyse.sequence.positions import Picks, Positions, coupling_ops
from autoplan.analyse.sequence.stream_state import CutStream
from autoplan.analyse.sequence.windows import Windows, own_queries
from autoplan.ops import call_record
from autoplan.ops.records.answers import Reduction
from autoplan.values import PICKING, SequenceName
from autoplan.values.not_placed import WholeSequence, WholeWhy

__all__ = ["Stream"]

_ROUNDS = 200
Key = tuple[Crossing, str]  # a boundary and its side
_MAKERS = 8  # calls to go back in search of what can be cut


class Stream(CutStream):
    """Follows one stack's stream through the calls, in order."""

    # ------------------------------------------------------------------ where it starts

    def run(self) -> SequencePlacement | None:
        """The placement, if any run of the model goes through the stack with a sequence."""
        if not self.begin():
            return None
        try:
            for _ in range(_ROUNDS):
                with suppress(Restart):
                    return self._shared(self._walk())
        except Refused as refused:
            return SequencePlacement(refused=(refused.reason,))
        outputs = (".".join(map(str, path)) for module, _, path in self.closed if not module)
        reasons = [WholeSequence("returns-others", call=output) for output in outputs] or [WholeSequence("unsettled")]
        return SequencePlacement(refused=tuple(reasons[:1]))

    def begin(self) -> bool:
        """Find where runs of the model enter the stack with a sequence; False if none does."""
        visits = [(i, v) for i, v in enumerate(self.trace.visits) if v.module in self.names]
        calls = (call for _, v in visits for call in self.trace.calls[slice(*v.calls)])
        coupling, in_blocks = coupling_ops(self.shards), {op for call in calls for op in range(*call.ops)}
        self.coupled = set().union(*(coupling.get(op, set()) for op in in_blocks)), set().union(*coupling.values())
        sequences = []
        for root in (v for v in self.trace.visits if v.parent is None):
            inside = [(i, v) for i, v in visits if root.calls[0] <= v.calls[0] < root.calls[1]]
            for start, tensor, axis in self.entries_of(inside):
                around, made_by = self.around_all(start, tensor) if self.outside else (start, None)
                if made_by is not None:
                    self.made_at[made_by] = tensor
                else:
                    twins = (c for c in self.flow.entering[tensor] if c.visit == around.visit)
                    self.starts |= dict.fromkeys((around, *twins), tensor)
                sequences.append(axis)
        if not sequences:
            return False
        self.positions = Positions(self.shards, sequences, self.context)
        self.own_queries = own_queries(self.shards, self.flow, self.positions) if self.apart else {}
        self.windows = Windows(self.shards, self.flow, self.positions)
        if self.context and PICKING not in self.gathered:
            picks = Picks(self.shards, self.flow, self.positions, self.gathered)
            self.picking, self.rows, self.asking = picks.calls, picks.rows, picks.asking
        self.first_call = min((*(start.first for start in self.starts), *(maker.last for maker in self.made_at)))
        self.last_call = max(v.calls[1] for _, v in visits)
        return True

    # ------------------------------------------------------------------ the walk

    def _walk(self) -> SequencePlacement:
        self.cut: set[int] = set()
        self.index_crossings()
        result = self.result
        noted = (result.summed_parameters, result.random, result.attended, result.shared, self.reduced)
        for each in (*noted, *vars(result.work).values()):
            each.clear()
        entries = [((start, "input"), origin) for start, origin in self.starts.items()]
        for key, origin in (*entries, *(((made_by, "output"), origin) for made_by, origin in self.made_at.items())):
            dim = self.positions.plain_dim(origin)
            if dim is None:
                raise Refused(WholeSequence("merged-at-start"))
            if key[1] == "input" and key[0] in self.placement.partial_entries and not self.context:
                raise Refused(WholeSequence("summed-before", key[0].module))
            result.scatters[key] = dim
        at = self.flow.tensor_at
        left = sorted((b.last, at(b, "output")) for b, side in result.scatters if side == "output")
        self.cut_from = {tensor: last for last, tensor in reversed(left)}  # behind the innermost
        self.scattered_in = [(at(b, "input"), b) for b, side in result.scatters if side == "input"]
        self.cut |= {at(b, s) for b, s in result.scatters if s == "output" and b.last <= self.first_call}
        for index in range(self.first_call, len(self.trace.calls)):
            self._visit(index)
            self.cut |= self.cut_from.keys() & {*self.flow.outputs[index]}
        self.finish()
        return result

    def _shared(self, result: SequencePlacement) -> SequencePlacement:
        """Refuse a placement in which every block takes in the whole sequence: ranks would share no work."""
        taken = {crossing for crossing, side in result.gathers if side == "input" and crossing.module in self.names}
        self.whole = {crossing.module for crossing in taken if not any(self.windows.reach(crossing.visit) or ())}
        if self.names <= self.whole:
            reason = next(why for why in result.whole if why.at in self.whole)
            raise Refused(replace(reason, inside=True, at=None))
        return result

    def _visit(self, index: int) -> None:
        flow, inputs, outputs = self.flow, self.flow.inputs[index], self.flow.outputs[index]
        cut = [t for t in inputs if self._cut_here(t, index)]
        if not cut:
            self.reduced.update(outputs if not self.reduced.isdisjoint(inputs) else ())
            if not self.receives_local_length(index):
                self._cut_sums(index, outputs)
                return
            if index in self.told_whole or not self._is_position_independent(index):
                refusal = self._whole("told-shard", index)
                self._gather_around(index, refusal)
                lengths = self.positions.lengths_to_change(index, lambda t, d: self.local_size(t, d, index) < 0)
                if lengths is None:
                    raise Refused(refusal)
                self.result.work.lengths[index] = lengths
                self._cut_sums(index, outputs)
                return
            self._note_gradients(index, inputs, cut)
            self.cut.update(filter(self._has_positions, outputs))
            return
        if flow.is_identity(index):
            self._note_draws(index)  # a dropout, in a model that is evaluated
            return
        again = any(tensor in self.starts.values() for tensor in outputs)
        reason = self._whole("begins-again", index) if again else self._crosses(index, cut)
        if reason is not None:
            window = self.windows.around(index) if self.context else None
            if window is not None:  # a module of which a halo is made (parallel.py)
                self._run_whole(window, reason)
            for tensor in cut:
                self._make_whole(tensor, index, reason)
            return
        for tensor in inputs:
            if tensor not in cut and self._has_positions(tensor) and index not in self.own_queries:
                self._cut_partner(tensor, index, cut)
        if index in self.own_queries:
            self.result.attended[index] = SequenceName("")
        self._note_gradients(index, inputs, cut)
        self._note_draws(index)
        if (how := self.sums_positions(index, cut)) is not None:
            dim, flattened = self.positions.plain_dim(cut[0]) or 0, self.positions.flattened(cut[0])
            self.result.work.summed[index] = dim, SequenceName("", flattened), how is Reduction.MEAN
            self.reduced.update(outputs)
        if not self.sizes_follow(index):
            self.result.work.lengths[index] = self.own_lengths(index) or ()
        self.cut.update(filter(self._has_positions, outputs))

    def _note_draws(self, index: int) -> None:
        """Note draws for a piece of the sequence, which differ between ranks."""
        call = self.trace.calls[index]
        if call_record(call.name).random.has_rate(call.args, call.kwargs):
            self.result.random.add(call.module)

    def _has_positions(self, tensor: int) -> bool:
        return tensor in self.rows or bool(self.positions.dims_of(tensor))

    def _cut_here(self, tensor: int, index: int) -> bool:
        return bool(self._cut_at_input(tensor, index)) or self.is_cut(tensor, index)

    def _cut_at_input(self, tensor: int, index: int) -> list[Crossing]:
        """Return where modules around a call cut a value that they take in."""
        return [b for t, b in self.scattered_in if t == tensor and b.first <= index < b.last and b not in self.starts]

    def _cut_sums(self, index: int, outputs: list[int]) -> None:
        """A partial sum that leaves a region of the stack is scattered as it is summed."""
        if index in self.scattering:
            self.result.work.kept[index] = self.positions.plain_dim(outputs[0]) or 0, SequenceName("")
            self.cut.add(outputs[0])
        if index >= self.last_call or index in self.scattering:
            return
        for tensor in outputs:
            for crossing in self.flow.leaving.get(tensor, []):
                # Is the value what the module returns once this call is done, nothing being added in place later?
                here = crossing in self.reduces and crossing.first <= index < crossing.last
                if here and not any(tensor in self.flow.outputs[k] for k in range(index + 1, crossing.last)):
                    dim = self.positions.plain_dim(tensor)
                    if dim is not None and self._in_stack(crossing):
                        self.result.reduce_scatters[crossing] = dim
                        self.cut.add(tensor)

    def _in_stack(self, crossing: Crossing) -> bool:
        visit: int | None = crossing.visit
        while visit is not None and self.trace.visits[visit].module not in self.names:
            visit = self.trace.visits[visit].parent
        return visit is not None

    # ------------------------------------------------------------------ can a call run on a shard?

    def _whole(self, why: WholeWhy, index: int) -> WholeSequence:
        """A reason that is about a call."""
        call = self.trace.calls[index]
        return WholeSequence(why, call.module, call.name)

    def _crosses(self, index: int, cut: list[int]) -> WholeSequence | None:
        """Return why a call needs the whole sequence; None if it does not."""
        mixes = None if self.own_queries.get(index) == set(cut) else self.mixes(index, cut)
        if mixes is not None:
            return mixes
        if index in self.placement.reductions or any(self.shards.is_split(t) for t in self.flow.outputs[index]):
            return self._whole("enters-split", index)
        if not self.sizes_follow(index) and self.own_lengths(index) is None:
            return self._whole("told-length", index)
        return None

    def mixes(self, index: int, cut: list[int]) -> WholeSequence | None:
        """Return how a call treats positions other than independently; None if it does not."""
        call = self.trace.calls[index]
        if index in self.picking:
            return None
        if not self.rows.isdisjoint(cut):
            return self._whole("reads-across", index)
        if self.sums_positions(index, cut) is not None:
            return None
        for op in range(*call.ops):
            if self.positions.crossed_by(op):
                return WholeSequence("reads-across", call.module, self.trace.ops[op].name)
        along = call_record(call.name).along
        what = "" if along is None else along.what
        if what == "picks" and self.positions.picks(index, cut):
            return self._whole("picks", index)
        if what == "parts" and self._parts(index, cut):
            return self._whole("parts", index)
        if what == "scatters" and self._along(index, cut):  # several positions may be added together
            return self._whole("places", index)
        for tensor in (*self.flow.inputs[index], *self.flow.outputs[index]):
            if len(self.positions.dims_of(tensor)) > 1:
                return self._whole("two-positions", index)
        return None

    def _along(self, index: int, cut: list[int]) -> list[int]:
        """The cut values whose sequence is the dim that a call works along."""
        call, along = self.trace.calls[index], call_record(self.trace.calls[index].name).along
        place = 1 if along is None else along.dim
        dim = call.args[place] if len(call.args) > place else call.kwargs.get("dim", 0)
        if not isinstance(dim, int):
            return []
        return [t for t in cut if dim % len(self.trace.tensors[t].shape) in self.positions.dims_of(t)]

    def _parts(self, index: int, cut: list[int]) -> bool:
        """Return whether a sequence is split into pieces of several positions, or of one."""
        sizes = {self.trace.tensors[t].shape for t in self.flow.outputs[index]}
        return any(sizes != {self.trace.tensors[t].shape} for t in self._along(index, cut))

    def _is_position_independent(self, index: int) -> bool:
        """Return whether a call makes the same for every position from nothing that has positions."""
        inputs = self.flow.inputs[index]
        carrying = [t for t in inputs if t in self.flow.carries]
        return (
            call_record(self.trace.calls[index].name).alike
            and not any(self.positions.dims_of(t) for t in inputs)
            and all(t in self.reduced or self.made_of(t, index) is not None for t in carrying)
        )

    # ------------------------------------------------------------------ boundaries

    def _make_whole(self, tensor: int, index: int, reason: WholeSequence) -> None:
        """Gather a value for a call: at the module that takes it in, else where it is returned."""
        dim = self.positions.plain_dim(tensor)
        if dim is not None:
            entering = self.entering(tensor, index)
            for crossing in entering:
                handed_on = self.flow.passes_through(tensor, crossing)
                if crossing.module not in self.names and crossing not in self.starts and not handed_on:
                    twins = [b for b in entering if b.visit == crossing.visit]  # one value under several names
                    self._add(self.result.gathers, [(twin, "input") for twin in twins], dim, reason)
            for crossing in self._cut_at_input(tensor, index):  # cut for another call, and needed whole
                del self.result.scatters[crossing, "input"]
                self.closed.add((crossing.module, "input", crossing.path))
                raise Restart
            for number in self.flow.around(index) if self.context and tensor in self.flow.carries else ():
                visit = self.trace.visits[number]
                if visit.module in self.names and tensor in (taken for _, taken in visit.inputs):
                    self._run_whole(number, reason)
            for crossing in self.left_before(tensor, index):
                if tensor not in self.starts.values() and (crossing, "output") not in self.result.scatters:
                    self._add(self.result.gathers, [(crossing, "output")], dim, reason)
        self._gather_around(index, reason)
        maker = self.flow.producer.get(tensor)
        if maker is not None and not any(self._cut_here(t, maker) for t in self.flow.inputs[maker]):
            if maker not in self.told_whole:  # it is made of a local length alone, and could be given all of it
                self.told_whole.add(maker)
                raise Restart
        elif maker is not None and maker > self.first_call:
            for source in self.flow.inputs[maker]:
                if self._has_positions(source) and self._cut_here(source, maker):
                    self._make_whole(source, maker, reason)
        raise Refused(replace(reason, inside=True))

    def _run_whole(self, number: int, reason: WholeSequence) -> None:
        """Give the whole sequence to a module in all its runs, and cut again what a block returns."""
        module = self.trace.visits[number].module
        runs = [(i, visit) for i, visit in enumerate(self.trace.visits) if visit.module == module]
        ends = [(i, v, "output", o) for i, v in runs for o in v.outputs if module in self.names]
        for i, visit, side, (path, tensor) in (*ends, *((i, v, "input", o) for i, v in runs for o in v.inputs)):
            key, dim = (Crossing(i, module, path, *visit.calls), side), self.positions.plain_dim(tensor)
            if dim is not None and side == "output":
                self._add(self.result.scatters, [key], dim, None)
            elif dim is not None and self.is_cut(tensor, *visit.calls):
                self._add(self.result.gathers, [key], dim, reason)

    def _gather_around(self, index: int, reason: WholeSequence) -> None:
        """Give the whole sequence to the innermost module around a call that takes in a cut value."""
        if self.rescales:
            return
        around = [(i, v) for i, v in enumerate(self.trace.visits) if v.calls[0] <= index < v.calls[1]]
        undone = False
        for number, visit in sorted(around, key=lambda item: item[1].calls[1] - item[1].calls[0]):
            if visit.module in self.names or visit.parent is None:
                return
            taken = {tensor for _, tensor in visit.inputs}
            for crossing, side in tuple(self.result.scatters):  # what was cut for calls that get the whole now
                here = crossing.visit == number if side == "input" else crossing.last <= self.first_call
                if here and crossing not in self.starts and self.flow.tensor_at(crossing, side) in taken:
                    del self.result.scatters[crossing, side]
                    self.closed.add((crossing.module, side, crossing.path))
                    undone = True
            for _, tensor in visit.inputs:
                dim = self.positions.plain_dim(tensor)
                if dim is not None and self.is_cut(tensor, *visit.calls):
                    twins = [Crossing(number, visit.module, p, *visit.calls) for p, t in visit.inputs if t == tensor]
                    self._add(self.result.gathers, [(twin, "input") for twin in twins], dim, reason)
            if undone:
                raise Restart

    def _add(self, where: dict[Key, int], keys: list[Key], dim: int, reason: WholeSequence | None) -> None:
        if any(key in where or (key[0].module, key[1], key[0].path) in self.closed for key in keys):
            return
        where.update(dict.fromkeys(keys, dim))
        if reason is not None:
            self.result.whole.append(replace(reason, at=keys[0][0].module))
        raise Restart

    def _cut_partner(self, tensor: int, index: int, cut: list[int]) -> None:
        """A whole value meets a cut one: cut it too, or what it was made of, else make the other whole."""
        source, reader = tensor, index
        if tensor in self.starts.values():  # the first block reads shards of it, and this call all of it
            raise Refused(self._whole("meets-whole", index))
        if 0 in self.trace.tensors[tensor].shape:
            maker = self.flow.producer.get(tensor, -1)
            module = self.trace.calls[maker].module if maker >= 0 else ""
            raise Refused(replace(self._whole("meets-empty", index), maker=module))
        for _ in range(_MAKERS):
            self._cut_at_boundary(source, reader)
            reader = self.flow.producer.get(source, -1)
            self.scatter_sum(reader)
            sources = self.flow.inputs[reader] if reader >= self.first_call else []
            sources = [t for t in sources if self._has_positions(t)]
            if len(sources) != 1 or self.is_cut(sources[0], reader) or self._crosses(reader, sources):
                break
            source = sources[0]
        for value in cut:
            self._make_whole(value, index, self._whole("meets-whole", index))

    def _cut_at_boundary(self, tensor: int, index: int) -> None:
        """Cut a value where a module returns it or takes it in."""
        dim = self.positions.plain_dim(tensor)
        if dim is None:
            return
        gathered = tensor in self.cut and tensor not in self.cut_from
        for crossing in () if gathered else self.left_before(tensor, index):
            # the walk sees no readers in front of it, other than those in the module, which have the whole
            seen = not any(crossing.last <= use < self.first_call for use in self.flow.uses[tensor])
            if seen and (crossing, "output") not in self.result.gathers:
                self._add(self.result.scatters, [(crossing, "output")], dim, None)
        for crossing in self.entering(tensor, index):
            started = any(crossing.visit == start.visit for start in self.starts)
            if crossing.module not in self.names or started or self.context:
                self._add(self.result.scatters, [(crossing, "input")], dim, None)

    def _note_gradients(self, index: int, inputs: list[int], cut: list[int]) -> None:
        """Note what a call on shards reads besides positions: its gradient is partial on each rank."""
        for tensor in inputs:
            if tensor in cut or self.positions.dims_of(tensor) or tensor not in self.flow.carries:
                continue
            parameters = self.made_of(tensor, index)
            if parameters is None and (self.shares or tensor in self.reduced):
                self.result.shared.setdefault(tensor, set()).add(index)
            elif parameters is None:
                for value in cut:
                    self._make_whole(value, index, self._whole("shared-value", index))
            else:
                self.result.summed_parameters |= parameters
