"""Modules that read a few positions before and after each one, and nothing else of the sequence.

A token shift or a short convolution needs only the last few positions of the rank before and the first few of the rank
after (a halo). So a run of a module is followed op by op: a record that says where results are made from moves a window
along the sequence, and every other op must treat positions apart. What the window covers around a position is the halo.
A window that is not the same for each position is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from autoplan.analyse.infer import Shards
from autoplan.analyse.placement.callflow import CallFlow
from autoplan.analyse.sequence.changes import Refused
from autoplan.analyse.sequence.positions import Positions, coupling_ops
from autoplan.axes.terms import Term, find, leaves
from autoplan.ops import call_record, op_record
from autoplan.ops.records.answers import Extent, Reduction
from autoplan.ops.records.record import writes_in_place
from autoplan.values import AttendAcross, Call, CallSite, Op, SequenceName, Symbolic, Trace, refs
from autoplan.values.not_placed import WholeSequence

Window = tuple[Term, int, int]  # the axis of positions, and the first and last position read, relative to each


class Windows:
    """What modules read of the sequence."""

    def __init__(self, shards: Shards, flow: CallFlow, positions: Positions) -> None:
        self.trace, self.axes, self.flow, self.positions = shards.trace, shards.axes, flow, positions
        self.coupled = coupling_ops(shards)
        self.read: dict[int, Window] = {}
        self.reach = cache(self._reach)

    def around(self, call: int) -> int | None:
        """Return the innermost run of a module around a call that needs a halo only."""
        around = (i for i in self.flow.around(call) if self.trace.visits[i].parent is not None)
        return next((i for i in around if any(self.reach(i) or ())), None)

    def _reach(self, number: int) -> tuple[int, int] | None:
        """Return how many positions before and after its own a run of a module reads; None if it reads others."""
        visit = self.trace.visits[number]
        inside = range(*visit.calls)
        read = [(path, tensor) for path, tensor in visit.inputs if any(use in inside for use in self.flow.uses[tensor])]
        if len(read) != 1 or len(visit.outputs) != 1:
            return None
        ((path, source),), ((_, result),) = read, visit.outputs
        ends = [self.positions.plain_dim(tensor) for tensor in (source, result)]
        if None in ends or self.positions.flattened(source) or self.positions.flattened(result) or len(path) != 1:
            return None
        axis = find(self.axes.of(source)[ends[0] or 0])
        self.read = {source: (axis, 0, 0)}
        if not all(self._follow(self.trace.calls[index], index) for index in range(*visit.calls)):
            return None
        end, first, last = self.read.get(result, (None, 0, 0))
        return (max(0, -first), max(0, last)) if end is axis else None

    def _follow(self, call: Call, index: int) -> bool:
        if self.flow.is_identity(index):
            return True
        lengths_passed = self.positions.lengths_passed(index)
        if any(not sizes_of(item) <= self.read.keys() for item in lengths_passed):
            return False
        if call_record(call.name).random.has_rate(call.args, call.kwargs):  # ranks would draw other numbers for a halo
            return False
        computed = any(item.origin[0] != "size" for item in lengths_passed)
        lengths = None if computed else frozenset(item.value for item in lengths_passed)
        return all(self._step(op, self.trace.ops[op], lengths) for op in range(*call.ops))

    def _step(self, number: int, op: Op, lengths: frozenset[int] | None) -> bool:
        inputs, outputs = list(refs((op.args, op.kwargs))), list(refs(op.outputs))
        sources = [tensor for tensor in inputs if tensor in self.read]
        others = [tensor for tensor in (*inputs, *outputs) if tensor not in self.read]
        if not sources:
            return not any(self.positions.dims_of(tensor) for tensor in others)
        record, axes = op_record(op.name), {self.read[tensor][0] for tensor in sources}
        strange = any(self.positions.dims_of(tensor) for tensor in inputs if tensor not in self.read)
        if strange or len(axes) > 1 or writes_in_place(op.name):
            return False
        (axis,) = axes
        first, last = min(self.read[t][1] for t in sources), max(self.read[t][2] for t in sources)
        if record.reads is not None:
            return lengths is not None and len(sources) == 1 and self._slide(op, sources[0], outputs[0], lengths)
        picks = record.along is not None and record.along.what != "parts"
        if picks or self.coupled.get(number, set()) & _leaves(axis):
            return False
        self.read |= dict.fromkeys(outputs, (axis, first, last))
        return all(sum(_leaves(axis) <= _leaves(term) for term in self.axes.of(tensor)) == 1 for tensor in outputs)

    def _slide(self, op: Op, source: int, output: int, lengths: frozenset[int]) -> bool:
        axis, first, last = self.read[source]
        terms, dims = self.axes.of(output), [d for d, term in enumerate(self.axes.of(source)) if find(term) is axis]
        if len(dims) != 1 or len(terms) != len(self.axes.of(source)):
            return False
        length, result = (self.trace.tensors[tensor].shape[dims[0]] for tensor in (source, output))
        record = op_record(op.name)
        window = record.reads and record.reads(op, Extent(dims[0], len(terms), length, result, lengths))
        if window is None:
            return False
        self.read[output] = find(terms[dims[0]]), first + window[0], last + window[1]
        return True


def _leaves(term: Term) -> set[Term]:
    return {find(leaf) for leaf in leaves(term)}


def sizes_of(length: Symbolic) -> set[object]:
    """Return the tensors that an integer was read off."""
    return {part[1] for part in length.parts("size", "numel")}


# Context parallelism where heads cannot be shared out: attention of a rank's own queries.
#
# A fused attention makes each position from one query, and from all keys and values. Where its heads are not sharded
# a rank computes own positions only: the call itself gets the keys and values of all ranks, and rows of its mask. All
# else in that module then treats positions apart.


def own_queries(shards: Shards, flow: CallFlow, positions: Positions) -> dict[int, set[int]]:
    """Return the calls that a rank can run for own queries, with these, their keys and values."""
    calls, tensors = enumerate(shards.trace.calls), shards.trace.tensors
    lengths_at: dict[int, tuple[list[int], int]] = {}
    for index, call in calls:
        first = list(refs(call.args[:3]))
        if call_record(call.name).causal is not None:
            lengths_at[index] = first, -2
        elif call_record(call.name).pays is Reduction.ATTENTION and first:  # torch's, with the batch second
            lengths_at[index] = first, -2 if len(tensors[first[0]].shape) == 2 else -3
    return {
        i: set(first) for i, (first, dim) in lengths_at.items() if _is_apart(i, first, dim, shards, flow, positions)
    }


def _is_apart(index: int, first: list[int], dim: int, shards: Shards, flow: CallFlow, positions: Positions) -> bool:
    """Return whether queries, keys and values are of the same positions, neither their heads are sharded nor a bias is
    learnt, and nothing reads the weights of its attention."""
    others = (t for t in set(flow.inputs[index]) - set(first) if t in flow.carries)
    weights = flow.outputs[index][1:]
    return (
        len(first) == 3
        and all(positions.plain_dim(tensor) == dim and not positions.flattened(tensor) for tensor in first)
        and len({find(shards.axes.of(tensor)[dim]) for tensor in first}) == 1
        and not any(shards.is_split(tensor) for tensor in first[:2])
        and all(shards.trace.tensors[t].kind == "parameter" and not shards.is_split(t) for t in others)
        and not any(flow.uses[tensor] or tensor in flow.final for tensor in weights)
    )


def attended(calls: dict[int, SequenceName], shards: Shards) -> tuple[AttendAcross, ...]:
    """Return the instructions for these calls."""
    calls_at = {index: shards.trace.calls[index] for index in calls}
    check_places(dict.fromkeys(calls), shards)
    return tuple(
        dict.fromkeys(
            AttendAcross(
                call.module,
                CallSite(call.name, call.place),
                calls[index],
                gathers=(1, 2) if call.args[1] != call.args[2] else (1,),
            )
            for index, call in calls_at.items()
        )
    )


def check_places(calls: Mapping[int, object], shards: Shards) -> None:
    """Raise Refused where other calls at the place of one of these have other needs."""
    for module, _, _ in sorted(uneven_places(calls, shards.trace)):
        raise Refused(WholeSequence("runs-both-ways", module))


def uneven_places(calls: Mapping[int, object], trace: Trace) -> set[tuple[str, str, str]]:
    """Return the places in code at which these calls have other needs than other calls there."""
    needs = {trace.calls[index].source: need for index, need in calls.items()}
    placed = ((call.source, calls.get(index)) for index, call in enumerate(trace.calls) if call.source in needs)
    return {source for source, need in placed if need != needs[source]}
