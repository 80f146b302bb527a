"""Sum parallel branches of a block that are added to each other by one all-reduce.

The problem: in a parallel block attention and feed-forward read the same value, and the block's own code adds both
outputs to the stream. Each ends in a partial sum, and no module returns their total, so no hook could reduce both at
once. But addition does not care where a part comes in: the first branch returns zeros instead of its part, the next one
adds the withheld part to its own and is all-reduced. Whatever the block adds between, and in whichever order, the
result is the same.

A sum is moved outwards to where its value has the shape in which it is added (experts return rows of tokens, the module
around them a batch). All this requires that only additions lie between each branch and the point where they meet, in
the code of one module, and that nothing else reads the values on the way. A dropout there would have drawn different
numbers for each branch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from autoplan.analyse.placement.callflow import CallFlow, Crossing
from autoplan.analyse.placement.delayed_sums import adds
from autoplan.ops import call_record
from autoplan.ops.records.answers import Shows
from autoplan.values import Call

_STEPS = 4
CrossingOut = Callable[[int, int], Crossing | None]


@dataclass(frozen=True)
class Pair:
    """Two branches that follow each other in the code of a block: where they are returned, and the block."""

    first: Crossing
    last: Crossing
    block: str

    @property
    def points(self) -> tuple[object, ...]:
        return self.first.module, self.first.path, self.last.module, self.last.path, self.block


def pairs_of_branches(
    flow: CallFlow, sums: Iterable[Crossing], leaving: CrossingOut
) -> tuple[tuple[Pair, ...], dict[Crossing, Crossing]]:
    """Return the sums at module outputs that can be joined with the next one, the same in every run of their modules,
    and the boundaries to which sums of these pairs must be moved."""
    arriving: dict[int, list[Crossing]] = defaultdict(list)
    moved = {crossing: _outwards(flow, crossing, leaving) for crossing in sums}
    for crossing in moved.values():
        for call in _additions(flow, crossing):
            arriving[call].append(crossing)
    by_first: dict[Crossing, Pair] = {}
    for call in sorted(arriving):
        for pair in _in_turn(flow.trace.calls[call], arriving[call]):
            by_first.setdefault(pair.first, pair)
    pairs = tuple(_even(flow, _apart(by_first.values())))
    used = {crossing for pair in pairs for crossing in (pair.first, pair.last)}
    return pairs, {old: new for old, new in moved.items() if new in used and old != new}


def _outwards(flow: CallFlow, crossing: Crossing, leaving: CrossingOut) -> Crossing:
    """Return where an enclosing module returns the value in another shape, produced by views only."""
    tensor, step = dict(flow.trace.visits[crossing.visit].outputs)[crossing.path], crossing.last - 1
    outermost = crossing
    for _ in range(_STEPS):
        uses = [use for use in flow.uses[tensor] if use > step]
        if len(uses) != 1 or not _reshapes(flow, uses[0]) or tensor in flow.final:
            break
        tensor, step = flow.outputs[uses[0]][0], uses[0]
        outermost = leaving(tensor, step) or outermost
    return outermost


def _reshapes(flow: CallFlow, index: int) -> bool:
    """Return whether the call only reshapes the value, also for gradients."""
    shows = call_record(flow.trace.calls[index].name).shows
    return shows is Shows.RESHAPED and len(flow.outputs[index]) == 1 and flow.passes_gradients(index)


def _in_turn(meeting: Call, crossings: list[Crossing]) -> Iterator[Pair]:
    """Yield each branch with the one that runs after it."""
    crossings = sorted(crossings, key=lambda crossing: crossing.last)
    for first, last in zip(crossings, crossings[1:], strict=False):
        if first.last <= last.first:
            yield Pair(first, last, meeting.module)


def _additions(flow: CallFlow, crossing: Crossing) -> list[int]:
    """Return the additions that a value goes through, as long as nothing else reads it or their results."""
    visit = flow.trace.visits[crossing.visit]
    tensor, made = dict(visit.outputs)[crossing.path], crossing.last - 1
    block: tuple[str, int] | None = None
    additions: list[int] = []
    for _ in range(_STEPS):
        uses = [use for use in flow.uses[tensor] if use > made]
        step = min(uses, default=None)
        if step is None or not _is_alone(flow, tensor, step, uses) or _is_dropped(flow, tensor, made, step):
            break
        call = flow.trace.calls[step]
        block = block or (call.module, call.visit)
        if not adds(call) or "alpha" in call.kwargs or block != (call.module, call.visit):
            break
        if call.module in flow.branching or step < crossing.last:
            break
        additions.append(step)
        shape = flow.trace.tensors[tensor].shape
        tensor, made = flow.outputs[step][0], step
        if flow.trace.tensors[tensor].shape != shape:
            break
    return additions


def _is_alone(flow: CallFlow, tensor: int, step: int, uses: list[int]) -> bool:
    """Return whether the call is the only reader of the value, or writes its result into it."""
    written = flow.outputs[step] == [tensor]
    if len(flow.outputs[step]) != 1 or (len(uses) > 1 and not written):
        return False
    later = any(crossing.last > step for crossing in flow.leaving.get(tensor, ()))
    return not later or written


def _is_dropped(flow: CallFlow, tensor: int, made: int, step: int) -> bool:
    """Return whether a dropout acts on the value before the call. In evaluation it returns the value unchanged."""
    return any(
        tensor in flow.inputs[index] and call_record(call.name).random.may_draw(call.args, call.kwargs)
        for index, call in enumerate(flow.trace.calls[made:step], made)
    )


def _apart(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Yield pairs that do not overlap: a block withholds one value at a time."""
    busy: dict[str, int] = {}
    for pair in sorted(pairs, key=lambda pair: pair.first.last):
        if pair.first.last >= busy.get(pair.block, 0):
            busy[pair.block] = pair.last.last
            yield pair


def _even(flow: CallFlow, pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Yield the pairs that occur in every run of both their modules: a hook acts on every run."""
    by_points: dict[tuple[object, ...], list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_points[pair.points].append(pair)
    for alike in by_points.values():
        one = alike[0]
        firsts = set(flow.runs_through(one.first.module, "output", one.first.path))
        lasts = set(flow.runs_through(one.last.module, "output", one.last.path))
        if {pair.first.visit for pair in alike} == firsts and {pair.last.visit for pair in alike} == lasts:
            yield from alike
