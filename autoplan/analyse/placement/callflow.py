"""The calls of a trace as a dataflow graph, the hook points of each value, and the communication placed so far."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from autoplan.ops import call_record, op_record
from autoplan.ops.records.answers import Reduction, Shows
from autoplan.values import Boundary, Call, ModuleVisit, Trace, refs, refs_with_paths
from autoplan.values.reasons import NotPlaced

# The trace as a graph of values between calls: producer, readers, and module boundaries that a value crosses.
#
# Module visits tell where hooks can sit: a value that leaves or enters a module can be changed there for all readers
# beyond. Only differentiable values matter; an in-place call produces its target again.

UNRETURNED = "logits of a loss"  # in the path of logits that are analysed as if the model returned them


class Crossing(NamedTuple):
    """A value that crosses a module's boundary: the visit, the path in its inputs or outputs, its range of calls."""

    visit: int
    module: str
    path: tuple[Any, ...]
    first: int
    last: int


class CallFlow:
    """Uses, producers and crossings of every value of a trace. Calls are identified by index.

    `branching` are modules whose Python reads the values of tensors: another run may branch differently. `unseen` are
    calls whose values others read without receiving them as arguments, with the tensors of their ops.
    """

    def __init__(self, trace: Trace, asking: Iterable[int] = (), blocks: Iterable[str] = ()) -> None:
        """`asking`: inputs that get a gradient, besides those that required one when recorded. `blocks`: modules with
        the sequence sharded between them, so that the gradients of their inputs stay whole."""
        self.trace = trace
        self.blocks = frozenset(blocks)
        self.inputs: list[list[int]] = []
        self.outputs: list[list[int]] = []
        self.producer: dict[int, int] = {}
        self.rewritten: set[int] = set()
        self.carries: set[int] = {i for i, t in enumerate(trace.tensors) if t.kind == "parameter" and t.differentiable}
        self.uses: dict[int, list[int]] = defaultdict(list)
        self.unseen = _unseen(trace)
        self.carries |= {t for v in trace.visits if v.parent is None and v.module for t in self._given(v)}
        self.carries |= {*trace.asking, *asking}
        for index, call in enumerate(trace.calls):
            self._add(index, call)
        self.leaving: dict[int, list[Crossing]] = defaultdict(list)
        self.entering: dict[int, list[Crossing]] = defaultdict(list)
        self.final: set[int] = set()
        self.branching = {op.module for op in trace.ops if op_record(op.name).tells}
        self._visits_of: dict[str, list[int]] = defaultdict(list)
        for index, visit in enumerate(trace.visits):
            self._visits_of[visit.module].append(index)
            for path, tensor in visit.outputs:
                self.leaving[tensor].append(Crossing(index, visit.module, path, *visit.calls))
                if visit.parent is None:
                    self.final.add(tensor)
            for path, tensor in visit.inputs:
                self.entering[tensor].append(Crossing(index, visit.module, path, *visit.calls))
        self.carries -= self._detached()

    def _add(self, index: int, call: Call) -> None:
        inputs = list(dict.fromkeys(call.reads))
        outputs = list(dict.fromkeys(call.results))
        if call_record(call.name).assigns:
            outputs = [call.args[0].id]
        self.inputs.append(inputs)
        self.outputs.append(outputs)
        if self.is_identity(index):
            return
        for tensor in inputs:
            self.uses[tensor].append(index)
        flows = index in self.unseen or any(t in self.carries for t in inputs)  # an unseen call may pass a gradient
        flows = flows and call.grad_enabled and not self._detaches(index)
        for tensor in outputs:
            if tensor in self.producer or tensor in inputs:
                self.rewritten.add(tensor)
            if tensor not in inputs:
                self.producer.setdefault(tensor, index)
            if flows and self.trace.tensors[tensor].differentiable:
                self.carries.add(tensor)

    def _detached(self) -> set[int]:
        """Return values that get no gradient, since all that is computed from them is detached in the end. A reshaped
        parameter that is never read counts as well: it was passed to a kernel that is not there."""
        detached: set[int] = set()
        for index in reversed(range(len(self.trace.calls))):
            if self._unread_shape(index):
                detached.update(self.outputs[index])
            for tensor in self.outputs[index]:
                uses = self.uses.get(tensor, [])
                within = bool(uses) and tensor not in self.final and tensor not in self.rewritten
                if within and all(self._detaches(use) or detached.issuperset(self.outputs[use]) for use in uses):
                    detached.add(tensor)
        return detached

    def _detaches(self, index: int) -> bool:
        return call_record(self.trace.calls[index].name).detaches

    def _unread_shape(self, index: int) -> bool:
        call = self.trace.calls[index]
        shows = call_record(call.name).shows
        if shows not in (Shows.RESHAPED, Shows.VIEWED) or len(self.inputs[index]) != 1:
            return False
        source, outputs = self.inputs[index][0], self.outputs[index]
        return self.trace.tensors[source].kind == "parameter" and not any(
            self.uses.get(tensor) or tensor in self.final or tensor in self.rewritten for tensor in outputs
        )

    def _given(self, part: ModuleVisit) -> set[int]:
        """Return the inputs of a submodule called by itself: in the full model, gradients flow on from there."""
        return {tensor for _, tensor in part.inputs if self.trace.tensors[tensor].differentiable}

    def gradient_uses(self, tensor: int) -> set[int]:
        """Return the calls that pass a gradient back to the value."""
        return {
            call
            for call in self.uses[tensor]
            if any(t in self.carries for t in self.outputs[call]) and self.trace.calls[call].grad_enabled
        }

    def runs_through(self, module: str, side: str, path: tuple[Any, ...]) -> dict[int, int]:
        """Return the visits of a module that have a tensor at this path, with the tensor."""
        tensors: dict[int, int] = {}
        for index in self._visits_of.get(module, []):
            visit = self.trace.visits[index]
            for place, tensor in visit.inputs if side == "input" else visit.outputs:
                if place == path:
                    tensors[index] = tensor
        return tensors

    def around(self, call: int) -> list[int]:
        """Return the runs of modules around a call, innermost first."""
        runs = [
            (v.calls[1] - v.calls[0], -i) for i, v in enumerate(self.trace.visits) if v.calls[0] <= call < v.calls[1]
        ]
        return [-number for _, number in sorted(runs)]

    def uneven(self, places: Iterable[tuple[Crossing, str]]) -> set[HookPoint]:
        """Return the points of these crossings that other runs of their modules have, too. A hook acts on every run."""
        visits: dict[HookPoint, set[int]] = defaultdict(set)
        for crossing, side in places:
            visits[crossing.module, side, crossing.path].add(crossing.visit)
        return {point for point, among in visits.items() if set(self.runs_through(*point)) != among}

    def tensor_at(self, crossing: Crossing, side: str) -> int:
        visit = self.trace.visits[crossing.visit]
        return dict(visit.inputs if side == "input" else visit.outputs)[crossing.path]

    def passes_gradients(self, index: int) -> bool:
        """Return whether a gradient flows back through this call."""
        return self.trace.calls[index].grad_enabled and any(t in self.carries for t in self.outputs[index])

    def with_gradients(self) -> set[int]:
        """Return the values that get a gradient from the model's outputs; others only decide something on the way. A
        value written in place counts as read: it may be a view of one that is."""
        gradients = (self.final | self.rewritten) & self.carries
        for index in reversed(range(len(self.trace.calls))):
            if self.passes_gradients(index) and not gradients.isdisjoint(self.outputs[index]):
                gradients.update(t for t in self.inputs[index] if t in self.carries)
        return gradients

    def near(self, tensors: set[int]) -> set[int]:
        """Return the values that are computed from these, or from which these are computed, in one call."""
        calls = {call for tensor in tensors for call in (*self.uses[tensor], self.producer.get(tensor, -1))} - {-1}
        return {tensor for call in calls for tensor in (*self.inputs[call], *self.outputs[call])} - tensors

    def passes_through(self, tensor: int, crossing: Crossing) -> bool:
        """Return whether the module returns the value as is: a hook at its input would act on later readers too."""
        return any(other.visit == crossing.visit for other in self.leaving.get(tensor, []))

    def is_identity(self, index: int) -> bool:
        """Return whether the call returned one of its inputs without running an op."""
        first, last = self.trace.calls[index].ops
        return first == last and bool(self.outputs[index]) and set(self.outputs[index]) <= set(self.inputs[index])

    def path_of(self, index: int, tensor: int) -> list[tuple[Any, ...]]:
        """Return the paths at which a value appears in a call's arguments."""
        call = self.trace.calls[index]
        paths = [("args", *p) for p, t in refs_with_paths(call.args) if t == tensor]
        return paths + [("kwargs", *p) for p, t in refs_with_paths(call.kwargs) if t == tensor]


def _unseen(trace: Trace) -> dict[int, tuple[int, ...]]:
    """Return the calls whose values only the ops show: what `torch.vmap` runs passes around tensor wrappers."""
    calls = {op: index for index, call in enumerate(trace.calls) for op in range(*call.ops)}
    visible = [{*call.reads, *call.results} for call in trace.calls]
    makers: dict[int, int] = {}
    unseen: set[int] = set()
    for number, op in enumerate(trace.ops):
        reader = calls.get(number, -1)
        for tensor in op.reads:
            maker = makers.get(tensor, -1)
            if maker not in (-1, reader) and tensor not in visible[maker]:
                unseen |= {maker, reader} - {-1}
        for tensor in op.results:
            makers.setdefault(tensor, reader)
    return {
        index: tuple(t for op in trace.ops[slice(*trace.calls[index].ops)] for t in (*refs(op.args), *op.results))
        for index in unseen
    }


# Hook points of a value: the outputs of modules that return it, the inputs of modules that take it.
#
# A hook acts on every run of its module, so a hook point where only some runs need a sum is closed for all of them.

HookPoint: TypeAlias = tuple[str, str, tuple[object, ...]]  # module, "input" or "output", path


class HookPoints:
    """The open hook points of a trace."""

    def __init__(self, flow: CallFlow, closed: Collection[HookPoint]) -> None:
        self.flow, self.closed = flow, closed

    def is_open(self, crossing: Crossing, side: str) -> bool:
        return (crossing.module, side, crossing.path) not in self.closed

    def leaving(self, tensor: int, maker: int) -> Crossing | None:
        """Return the crossing at the innermost module that returns the value, once, before anything else reads it."""
        first_use = min((u for u in self.flow.uses[tensor] if u > maker), default=None)
        times = Counter(b.visit for b in self.flow.leaving.get(tensor, []))
        inside = [
            b for b in self.flow.leaving.get(tensor, [])
            if b.first <= maker < b.last and self.is_open(b, "output") and times[b.visit] == 1
        ]  # fmt: skip
        for crossing in sorted(inside, key=lambda b: (b.last - b.first, -b.visit)):
            if first_use is None or crossing.last <= first_use:
                return crossing
        return None

    def taking(self, tensor: int, maker: int) -> Crossing | None:
        """Return the crossing at the outermost module that takes the value and contains all its readers."""
        uses = [u for u in self.flow.uses[tensor] if u > maker]
        if not uses or tensor in self.flow.final or tensor in self.flow.rewritten:
            return None
        around = [
            b for b in self.flow.entering.get(tensor, [])
            if all(b.first <= u < b.last for u in uses) and self.is_open(b, "input")
        ]  # fmt: skip
        return min(around, key=lambda b: b.first - b.last, default=None)

    def before(self, tensor: int, calls: Collection[int], uses: Collection[int]) -> list[Crossing]:
        """Return module inputs behind which the readers of the value, out of all its `uses`, are exactly these calls. A
        value that enters under several names (as key and as value) is taken at each of them."""
        left, chosen = set(calls), []
        entering = self.flow.entering.get(tensor, [])
        for crossing in sorted(entering, key=lambda b: b.first - b.last):
            names = [b for b in entering if b.visit == crossing.visit]
            if any(not self.is_open(b, "input") or self.flow.passes_through(tensor, b) for b in names):
                continue
            inside = {u for u in uses if crossing.first <= u < crossing.last}
            if inside and inside <= set(calls) and inside & left and not inside - left:
                left -= inside
                chosen += names
        return [] if left else chosen


# The placement under construction: the work at module boundaries and in calls, and the refusals.

Kind: TypeAlias = type[Boundary]


@dataclass(frozen=True)
class Refusal:
    """A sum that no mechanism can place: the call's index, the reason, and the tensors whose split is to blame."""

    call: int
    why: NotPlaced
    tensors: tuple[int, ...]


@dataclass
class Placement:
    """All placed work by where it sits: crossings are module outputs and inputs, calls need the function mode."""

    outputs: dict[tuple[Crossing, Kind], Boundary] = field(default_factory=dict)  # work at modules' outputs
    inputs: dict[tuple[Crossing, Kind], Boundary] = field(default_factory=dict)  # and at their inputs
    summed_parameters: set[int] = field(default_factory=set)
    shared_parameters: set[int] = field(default_factory=set)
    divided_biases: set[int] = field(default_factory=set)
    blocks: set[str] = field(default_factory=set)  # whose branches are summed together
    embeddings: dict[int, Crossing] = field(default_factory=dict)
    inside_reductions: dict[int, Reduction] = field(default_factory=dict)
    inside_copies: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    reductions: dict[int, Reduction] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    partial_entries: set[Crossing] = field(default_factory=set)  # of blocks, where gradients are parts of a sum
    partial: set[int] = field(default_factory=set)  # values whose gradients are, down to the parameters that made them

    def at_output(self, crossing: Crossing, kind: Kind, **how: Any) -> None:
        """Add this kind of work at a module's output."""
        self.outputs[crossing, kind] = kind(crossing.module, "output", crossing.path, **how)

    def at_input(self, crossing: Crossing, kind: Kind) -> None:
        """Add this kind of work at a module's input."""
        self.inputs[crossing, kind] = kind(crossing.module, "input", crossing.path)

    def done_to(self, kind: Kind) -> list[Crossing]:
        """Return the module outputs that have this kind of work."""
        return [crossing for crossing, placed in self.outputs if placed is kind]
