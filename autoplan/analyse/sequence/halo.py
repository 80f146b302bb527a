"""Context parallelism: modules that read a few positions before each one, and nothing else of the sequence.

A token shift or a short causal convolution needs only the last few positions of the rank before (a halo), where a plan
would gather the sequence before it and cut it again behind it. So a run of a module is followed op by op: each record
that says where its results are made from moves a window along the sequence, every other op must treat positions apart.
What the window covers before a position is the halo. A window that reaches beyond a position, or that is not the same
for every position, is none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from functools import cache

from autoplan.analyse.placement.callflow import CallFlow, Crossing
from autoplan.analyse.sequence.stream import SequencePlacement, Stream
from autoplan.analyse.sequence.stream_state import HaloAt, coupling_ops, integers, sizes_of
from autoplan.axes.terms import Term, find, leaves
from autoplan.ops import call_record, op_record
from autoplan.ops.records.answers import Extent
from autoplan.ops.records.record import writes_in_place
from autoplan.values import Call, Op
from autoplan.values.trace import refs

__all__ = ["mixed", "take_halos"]


def mixed(stream: Stream, blocks: Collection[str]) -> set[Term]:
    """The split leaves of values whose positions some call in these blocks, of whatever stack, mixes, unless a module
    around it needs a halo only."""
    found: set[Term] = set()
    flow, windows = stream.flow, _Windows(stream)
    spans = {v.calls for v in stream.trace.visits if v.module in blocks and v.calls[0] >= stream.first_call}
    for index in sorted({index for span in spans for index in range(*span)}):
        values = [t for t in (*flow.inputs[index], *flow.outputs[index]) if stream.positions.dims_of(t)]
        given = [t for t in flow.inputs[index] if t in values]
        mixes = given and not flow.is_identity(index) and stream.mixes(index, given) is not None
        if mixes and not windows.cover(index, blocks):
            found |= {leaf for tensor in values for leaf in stream.shards.split_leaves(tensor)}
    return found


def take_halos(streams: Iterable[Stream], flow: CallFlow, cut: SequencePlacement) -> None:
    """Replace in `cut` what is gathered where a module takes it in, and cut again where it returns it."""
    points: dict[tuple[str, tuple[object, ...]], list[Crossing]] = {}
    for crossing, side in cut.gathers:
        if side == "input" and crossing.module:
            points.setdefault((crossing.module, crossing.path), []).append(crossing)
    for stream in streams:
        windows = _Windows(stream)
        for (module, path), crossings in points.items():
            visits = {crossing.visit for crossing in crossings}
            before = {windows.before(visit) for visit in visits}
            ends = [end for crossing in crossings for end in _cut_again(crossing, stream, cut)]
            everywhere = {(end.module, "output", end.path) for end in ends} | {(module, "input", path)}
            runs = [set(flow.runs_through(*point)) for point in everywhere]
            if len(before) == 1 and len(ends) == len(crossings) and all(len(run) == len(visits) for run in runs):
                _replace(crossings, ends, before.pop() or 0, stream, cut)


def _cut_again(crossing: Crossing, stream: Stream, cut: SequencePlacement) -> list[Crossing]:
    """Where what a run of a module returns is cut."""
    returned = {tensor for _, tensor in stream.trace.visits[crossing.visit].outputs}
    return [
        end
        for end, side in cut.own
        if side == "output"
        and crossing.first <= end.first
        and end.last <= crossing.last
        and stream.tensor_at(end, "output") in returned
    ]


def _replace(
    crossings: list[Crossing], ends: list[Crossing], before: int, stream: Stream, cut: SequencePlacement
) -> None:
    if not before:
        return
    for end in ends:
        del cut.scatters[end, "output"]
        cut.own.discard((end, "output"))
    for crossing in crossings:
        ((path, made),) = stream.trace.visits[crossing.visit].outputs
        dim = cut.gathers.pop((crossing, "input"))
        cut.partial_gathers.discard((crossing, "input"))
        cut.halos[crossing] = HaloAt(dim, before, path, stream.positions.plain_dim(made) or 0)
    gone = {crossing.module for crossing in crossings}
    cut.whole = [why for why in cut.whole if why.at not in gone]


Window = tuple[Term, int, int]  # the axis of positions, and the first and last position read, relative to each


class _Windows:
    """What modules read of the sequence."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.flow, self.trace, self.positions = stream, stream.flow, stream.trace, stream.positions
        self.axes, self.coupled = stream.shards.axes, coupling_ops(stream.shards.axes)
        self.read: dict[int, Window] = {}
        self.before = cache(self._before)

    def cover(self, call: int, blocks: Collection[str]) -> bool:
        """Does a module around a call, within a block, need a halo only?"""
        around = [i for i, v in enumerate(self.trace.visits) if v.calls[0] <= call < v.calls[1]]
        inside = (i for i in around if self.trace.visits[i].module not in blocks and self.trace.visits[i].parent)
        return any(self.before(number) for number in inside)

    def _before(self, number: int) -> int | None:
        """How many positions before its own a run of a module reads; None if it reads others, or something else."""
        visit = self.trace.visits[number]
        if len(visit.inputs) != 1 or len(visit.outputs) != 1:
            return None
        ((path, given),), ((_, made),) = visit.inputs, visit.outputs
        ends = [self.positions.plain_dim(tensor) for tensor in (given, made)]
        if None in ends or self.positions.flattened(given) or self.positions.flattened(made) or len(path) != 1:
            return None
        axis = find(self.axes.of(given)[ends[0] or 0])
        self.read = {given: (axis, 0, 0)}
        if not all(self._follow(self.trace.calls[index], index) for index in range(*visit.calls)):
            return None
        end, first, last = self.read.get(made, (axis, 0, 1))
        return -first if end is axis and last <= 0 else None

    def _follow(self, call: Call, index: int) -> bool:
        if self.flow.is_identity(index):
            return True
        told = [i for i in integers((call.args, call.kwargs)) if self.positions.depends_on_length(i)]
        if any(not sizes_of(item.origin) <= self.read.keys() for item in told):
            return False
        if call_record(call.name).random.has_rate(call.args, call.kwargs):  # ranks would draw other numbers for a halo
            return False
        computed = any(item.origin[0] != "size" for item in told)
        lengths = None if computed else frozenset(item.value for item in told)
        return all(self._step(op, self.trace.ops[op], lengths) for op in range(*call.ops))

    def _step(self, number: int, op: Op, lengths: frozenset[int] | None) -> bool:
        inputs, outputs = list(refs((op.args, op.kwargs))), list(refs(op.outputs))
        given = [tensor for tensor in inputs if tensor in self.read]
        others = [tensor for tensor in (*inputs, *outputs) if tensor not in self.read]
        if not given:
            return not any(self.positions.dims_of(tensor) for tensor in others)
        record, axes = op_record(op.name), {self.read[tensor][0] for tensor in given}
        strange = any(self.positions.dims_of(tensor) for tensor in inputs if tensor not in self.read)
        if strange or len(axes) > 1 or writes_in_place(op.name):
            return False
        (axis,) = axes
        first, last = min(self.read[t][1] for t in given), max(self.read[t][2] for t in given)
        if record.reads is not None:
            return lengths is not None and self._slide(op, given[0], outputs[0], lengths)
        picks = record.along is not None and record.along.what != "parts"
        if picks or self.coupled.get(number, set()) & _leaves(axis):
            return False
        self.read |= dict.fromkeys(outputs, (axis, first, last))
        return all(sum(_leaves(axis) <= _leaves(term) for term in self.axes.of(tensor)) == 1 for tensor in outputs)

    def _slide(self, op: Op, given: int, made: int, lengths: frozenset[int]) -> bool:
        axis, first, last = self.read[given]
        terms, dims = self.axes.of(made), [d for d, term in enumerate(self.axes.of(given)) if find(term) is axis]
        if len(dims) != 1 or len(terms) != len(self.axes.of(given)):
            return False
        length, result = (self.trace.tensors[tensor].shape[dims[0]] for tensor in (given, made))
        record = op_record(op.name)
        window = record.reads and record.reads(op, Extent(dims[0], len(terms), length, result, lengths))
        if window is None:
            return False
        self.read[made] = find(terms[dims[0]]), first + window[0], last + window[1]
        return True


def _leaves(term: Term) -> set[Term]:
    return {find(leaf) for leaf in leaves(term)}
