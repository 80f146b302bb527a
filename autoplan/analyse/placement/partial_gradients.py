"""Move partial gradients upstream, and join those of several readers, so that each value needs one all-reduce."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from autoplan.analyse.placement.callflow import CallFlow, Crossing, HookPoints
from autoplan.analyse.shards import Shards
from autoplan.analyse.splits.special import thin_matrix
from autoplan.ops import call_record
from autoplan.ops.creation import fills
from autoplan.ops.records.answers import Reduction

# Partial gradients of replicated values, and how they move upstream until one hook can sum them.
#
# An edge value → call is partial when each rank computes only a part of that gradient. All partial edges of a value
# need one sum. When all gradient readers of a value are partial, the gradient can be pushed upstream through the call
# that made the value, merging with its siblings, until it sits on a parameter, a module output or a module input.

_NEARBY = 16  # calls that a partial gradient passes before it is merged with others
_ANY_NUMBER = 10**6
_MATRIX = 2  # dims of a parameter whose gradient is too large to sum instead of an activation's


class PartialGradients:
    """The partial edges of every value, and the ways to move them."""

    def __init__(
        self, shards: Shards, flow: CallFlow, hook_points: HookPoints, reductions: dict[int, Reduction]
    ) -> None:
        self.shards, self.flow, self.hook_points, self.reductions = shards, flow, hook_points, reductions
        self.trace = shards.trace
        self.partial: dict[int, set[int]] = defaultdict(set)  # value -> calls whose gradient for it is partial
        self.pushed: set[int] = set()
        self.uses = {v: flow.gradient_uses(v) for v in flow.uses}

    def cover(self, tensor: int) -> list[Crossing]:
        """Return module inputs behind which the readers of the value are exactly the partial ones."""
        return self.hook_points.before(tensor, self.partial[tensor], self.uses.get(tensor, set()))

    def call_passes(self, index: int) -> bool:
        """Return whether a partial gradient may be pushed from a call's outputs to its inputs."""
        call = self.trace.calls[index]
        outputs = self.flow.outputs[index]
        mixed = any(self.shards.is_mixed(t) for t in outputs)
        if call.module in self.flow.branching or fills(call.name):
            return False
        if index in self.reductions or call_record(call.name).assigns or any(t in self.flow.rewritten for t in outputs):
            return False
        if not mixed and any(self.shards.is_split(t) and not self.shards.is_mixed(t) for t in self.flow.inputs[index]):
            return False
        large = any(self._is_matrix(t) and not self.shards.is_split(t) for t in self.flow.inputs[index])
        return mixed or not large

    def _is_matrix(self, tensor: int) -> bool:
        info = self.trace.tensors[tensor]
        source = self.shards.axes.sources.get(tensor)
        weight = info.kind == "parameter" or (source is not None and self.trace.tensors[source].quantised)
        return weight and len(info.shape) >= _MATRIX

    def settled(self, tensor: int) -> bool:
        """Return whether no gradient flows back to the value that this placement would have to sum."""
        return tensor not in self.flow.carries or not self.shards.has_whole_part(tensor)

    def can_be_partial(self, tensor: int, after: int) -> bool:
        """Return whether every gradient of (the replicated part of) the value is partial, or can be made so."""
        return self._can_be_partial(tensor, after, {}, _ANY_NUMBER)

    def passes_soon(self, index: int, known: dict[int, bool]) -> bool:
        """Return whether a partial gradient comes up through this call from nearby. `known`: the answers so far."""
        return self._can_pass(index, known, _NEARBY)

    def _can_be_partial(self, tensor: int, after: int, known: dict[int, bool], steps: int) -> bool:
        uses = self.uses.get(tensor, set())
        if tensor in self.flow.final or not uses or any(u <= after for u in uses):
            return False
        return all(u in self.partial.get(tensor, ()) or self._can_pass(u, known, steps) for u in uses)

    def _can_pass(self, index: int, known: dict[int, bool], steps: int) -> bool:
        if index not in known:
            outputs = [t for t in self.flow.outputs[index] if not self.settled(t)]
            whole = [t for t in self.flow.outputs[index] if t in self.flow.carries]
            known[index] = steps > 0 and self.call_passes(index) and bool(whole) and all(
                self._can_be_partial(t, index, known, steps - 1) for t in outputs
            )  # fmt: skip
        return known[index]

    def push(self, index: int) -> None:
        """Move the partial gradients of a call's outputs to its inputs."""
        for tensor in self.flow.outputs[index]:
            if self.settled(tensor):
                continue
            for use in self.uses.get(tensor, set()):
                if use not in self.partial.get(tensor, set()):
                    self.push(use)
            self.partial.pop(tensor, None)
            self.pushed.add(tensor)
        for tensor in self.flow.inputs[index]:
            if tensor in self.flow.carries and self.shards.has_whole_part(tensor):
                self.partial[tensor].add(index)

    def push_inside(self) -> None:
        """Push partial gradients that no module boundary can sum, the latest first."""
        stuck: set[int] = set()
        while True:
            candidates = [
                (self.flow.producer[t], t)
                for t, calls in self.partial.items()
                if calls and t not in stuck and t in self.flow.producer and self.where(t) == "inside"
            ]
            if not candidates:
                return
            producer, tensor = max(candidates)
            outputs = [t for t in self.flow.outputs[producer] if not self.settled(t)]
            if self.call_passes(producer) and all(self.can_be_partial(t, producer) for t in outputs):
                self.push(producer)
            else:
                stuck.add(tensor)

    def where(self, tensor: int) -> str:
        """Return where a value's partial gradients can be summed: "parameter", "output", "input" or "inside"."""
        calls, uses = self.partial[tensor], self.uses.get(tensor, set())
        if any(self.trace.calls[use].module in self.flow.branching for use in uses):
            return "inside"
        complete = uses <= calls
        if self.trace.tensors[tensor].kind == "parameter":
            return "parameter" if complete else ("input" if self.cover(tensor) else "inside")
        cover = self.cover(tensor)
        if complete and tensor not in self.flow.final and self.hook_points.made_at(tensor):
            return "input" if len(cover) == 1 and self._is_handed_up(tensor) else "output"
        return "input" if cover else "inside"

    def _is_handed_up(self, tensor: int) -> bool:
        """Return whether a module returns the value that a submodule of it has made.

        Its callers may then read it directly: decoders return the hidden states that a head reads. A module that only
        returns its input (an Identity) has not made it.
        """
        made = self.flow.producer[tensor]
        return len({out.visit for out in self.flow.leaving.get(tensor, ()) if out.first <= made < out.last}) > 1


# One sum for all readers of a value: partial gradients of several are added and all-reduced once.
#
# A block of experts reads one value several times: the routed experts and the shared one, which each see a part of
# its gradient, and the router, which is replicated. Reduced at each reader, all tokens are all-reduced twice.
# Partial gradients can be added first and reduced once, before all readers, if all else that flows back to the value
# is partial, too:
#
# - a reader whose own gradient is partial passes it up (a view, a norm), a thin matrix too (an adapter's first);
# - a reader that gives the full gradient on every rank gives 1/tp of it, at the input of the module that reads, also
#   where it and readers whose gradients are partial read one view of the value.

_SMALL = 4  # a value is small if the other has this many times more elements


@dataclass(frozen=True)
class _Merge:
    """The work of one value's readers: pass partial gradients up through these calls, divide full ones here."""

    tensor: int
    passing: tuple[int, ...]  # calls through which a partial gradient goes up to the value
    divided: tuple[int, ...]  # calls whose full gradient is divided by tp
    crossings: tuple[Crossing, ...]
    above: tuple[int, ...]  # calls through which the joined gradient goes further, until it can be summed
    others: tuple[int, ...]  # calls that pass the gradients of small values


def join_gradients(gradients: PartialGradients) -> list[Crossing]:
    """Merge partial gradients where several sums become one; return the inputs at which gradients are divided by tp."""
    crossings: list[Crossing] = []
    answers: dict[int, bool] = {}
    flow = gradients.flow
    order = sorted(gradients.uses, key=lambda tensor: -flow.producer.get(tensor, -1))  # the latest values first
    for tensor in order:
        views = list(_partial_views(tensor, gradients, answers))
        for partial_view in views:
            gradients.partial[partial_view.tensor] |= partial_view.readers
        answers = {} if views else answers
        merge = _merge(tensor, gradients, answers)
        if merge is None:
            for partial_view in views:
                gradients.partial[partial_view.tensor] -= partial_view.readers
            answers = {} if views else answers
            continue
        answers.clear()
        crossings += [crossing for view in views for crossing in view.crossings]
        for call in merge.passing:
            gradients.push(call)
        gradients.partial[tensor] |= set(merge.divided)
        for call in (*merge.above, *merge.others):
            gradients.push(call)
        crossings += merge.crossings
    return crossings


@dataclass(frozen=True)
class _PartialView:
    """A view of a value with those of its readers that must divide their gradient, at these inputs."""

    tensor: int
    readers: set[int]
    crossings: tuple[Crossing, ...]


def _partial_views(tensor: int, gradients: PartialGradients, known: dict[int, bool]) -> Iterator[_PartialView]:
    """Yield views of a value that are read both with a partial gradient and with a full one (by a router)."""
    flow, uses = gradients.flow, gradients.uses[tensor]
    if len(uses) < 2 or tensor not in flow.carries:
        return
    for use in sorted(uses - gradients.partial.get(tensor, set())):
        outputs = flow.outputs[use]
        if len(outputs) != 1 or gradients.passes_soon(use, known) or not gradients.call_passes(use):
            continue
        (view,) = outputs
        readers = gradients.uses.get(view, set())
        partial = {r for r in readers if r in gradients.partial.get(view, ()) or gradients.passes_soon(r, known)}
        if (
            not partial
            or partial == readers
            or view in flow.final | flow.rewritten
            or not gradients.shards.has_whole_part(view)
        ):
            continue
        crossings = gradients.hook_points.before(view, readers - partial, readers)
        if crossings and not any(gradients.trace.calls[r].module in flow.branching for r in readers):
            yield _PartialView(view, readers - partial, tuple(crossings))


def _merge(tensor: int, gradients: PartialGradients, known: dict[int, bool]) -> _Merge | None:
    """Return how a value's partial gradients can be summed together; None where that is impossible or gains nothing."""
    flow, uses = gradients.flow, gradients.uses[tensor]
    if len(uses) < 2 or tensor not in flow.carries or tensor in flow.final | flow.rewritten:
        return None
    if gradients.trace.tensors[tensor].kind == "parameter" or gradients.shards.is_split(tensor):
        return None
    if any(gradients.trace.calls[use].module in flow.branching for use in uses):
        return None  # another run may read it elsewhere
    partial = uses & gradients.partial.get(tensor, set())
    others = {use: _leads_to(use, tensor, gradients) for use in uses - partial if gradients.passes_soon(use, known)}
    passing = {use for use, way in others.items() if way is not None}
    whole = uses - partial - passing
    if whole and all(_is_branch(use, gradients) for use in whole):
        passing, whole = passing | whole, set()
    summed = {value for use in passing for value in _passed(use, gradients)[1]} | ({tensor} if partial else set())
    if sum(_sums(value, gradients) for value in summed) < 2:
        return None
    crossings = gradients.hook_points.before(tensor, whole, uses) if whole else []
    above = _way_up(tensor, gradients)
    if (whole and not crossings) or above is None:
        return None
    more = tuple(dict.fromkeys(call for way in others.values() for call in way or ()))
    return _Merge(tensor, tuple(sorted(passing)), tuple(whole), tuple(crossings), above, more)


def _passed(call: int, gradients: PartialGradients) -> tuple[set[int], set[int]]:
    """Return the calls through which a partial gradient comes to and through this one, and the values summed now."""
    calls, values, waiting = set[int](), set[int](), [call]
    while waiting:
        index = waiting.pop()
        if index in calls:
            continue
        calls.add(index)
        for tensor in gradients.flow.outputs[index]:
            uses, partial = gradients.uses.get(tensor, set()), gradients.partial.get(tensor, set())
            waiting += uses - partial
            values |= {tensor} if uses & partial else set()
    return calls, values


def _leads_to(call: int, tensor: int, gradients: PartialGradients) -> tuple[int, ...] | None:
    """Return calls that must pass further gradients: the small values that multiply a partial gradient going up through
    this call (a router's scores) are summed by themselves. None if it reaches anything large besides the value."""
    flow, passing = gradients.flow, list[int]()
    calls, _ = _passed(call, gradients)
    inside = {output for index in calls for output in flow.outputs[index]} | {tensor}
    reached = {t for index in calls for t in flow.inputs[index] if t in flow.carries and t not in inside}
    for other in sorted(reached):
        if gradients.trace.tensors[other].kind == "parameter" or not gradients.shards.has_whole_part(other):
            continue
        way = _way_up(other, gradients) if gradients.uses[other] <= calls and other not in flow.final else None
        if way is None or prod(gradients.trace.tensors[other].shape) * _SMALL > prod(
            gradients.trace.tensors[tensor].shape
        ):
            return None
        passing += way
    return tuple(passing)


def _sums(tensor: int, gradients: PartialGradients) -> int:
    """Return how many sums a value needs as things are."""
    where = gradients.where(tensor)
    if where == "input":
        return len({crossing.visit for crossing in gradients.cover(tensor)})
    return len(gradients.partial[tensor]) if where == "inside" else 1


def _way_up(tensor: int, gradients: PartialGradients) -> tuple[int, ...] | None:
    """Return the calls upstream through which the gradient of all readers goes until one hook can sum it."""
    calls: list[int] = []
    while True:
        uses = gradients.uses[tensor]
        if gradients.hook_points.made_at(tensor) is not None:
            return tuple(calls)
        if len({crossing.visit for crossing in gradients.hook_points.before(tensor, uses, uses)}) == 1:
            return tuple(calls)
        made = gradients.flow.producer.get(tensor)
        if made is None or not gradients.call_passes(made) or len(gradients.flow.outputs[made]) != 1:
            return None
        sources = [
            t for t in gradients.flow.inputs[made] if t in gradients.flow.carries and gradients.shards.has_whole_part(t)
        ]
        if len(sources) != 1 or gradients.uses[sources[0]] != {made} or sources[0] in gradients.flow.final:
            return None
        calls.append(made)
        tensor = sources[0]


def _is_branch(index: int, gradients: PartialGradients) -> bool:
    """Return whether the call passes a value through a thin matrix to readers that are linear and all partial."""
    flow = gradients.flow
    if thin_matrix(index, flow, gradients.shards) is None:
        return False
    (output,) = flow.outputs[index]
    uses = gradients.uses.get(output, set())
    linear = all(call_record(gradients.trace.calls[use].name).is_layer for use in uses)
    return bool(uses) and linear and uses <= gradients.partial.get(output, set()) and output not in flow.final
