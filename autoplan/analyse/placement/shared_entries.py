"""One sum for all entries of a value: where several readers owe parts of its gradient, they pay together.

A block of experts reads one value several times: the routed experts and the shared one, each of which sees a part of
its gradient, and the router, which every rank runs alike. Paid at each entry that is a sum of all tokens twice. Partial
gradients can be added first and summed once, before all readers, if what else flows back to the value is a part, too:

- a reader whose own result owes a sum passes the debt up (a view, a norm), a thin matrix too (an adapter's first);
- a reader that gives the whole gradient on every rank gives 1/tp of it, at the input of the module that reads, also
  where it and readers that owe parts share a view of the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from autoplan.analyse.placement.callflow import Crossing
from autoplan.analyse.placement.partial_gradients import Debts
from autoplan.analyse.splits.low_rank import thin_matrix

__all__ = ["merge_entries"]

_SMALL = 4  # a value is small beside another that has so many times more elements


@dataclass(frozen=True)
class _Merge:
    """What one value's readers must do: pass debts up through these calls, give parts at these inputs."""

    tensor: int
    passing: tuple[int, ...]  # calls through which a debt goes up to the value
    shares: tuple[int, ...]  # calls whose whole gradient becomes a share
    crossings: tuple[Crossing, ...]
    above: tuple[int, ...]  # calls through which the joint debt goes further, until it can be paid
    beside: tuple[int, ...]  # and those through which what it leaves on small values goes


def merge_entries(debts: Debts) -> list[Crossing]:
    """Merge debts wherever several sums become one; returns the inputs at which gradients are divided by tp."""
    found: list[Crossing] = []
    known: dict[int, bool] = {}
    flow = debts.flow
    order = sorted(debts.uses, key=lambda tensor: -flow.producer.get(tensor, -1))  # the latest values first
    for tensor in order:
        lent = list(_lent(tensor, debts, known))
        for one in lent:
            debts.partial[one.tensor] |= one.readers
        known = {} if lent else known
        merge = _merge(tensor, debts, known)
        if merge is None:
            for one in lent:
                debts.partial[one.tensor] -= one.readers
            known = {} if lent else known
            continue
        known.clear()
        found += [crossing for one in lent for crossing in one.crossings]
        for call in merge.passing:
            debts.push(call)
        debts.partial[tensor] |= set(merge.shares)
        for call in (*merge.above, *merge.beside):
            debts.push(call)
        found += merge.crossings
    return found


@dataclass(frozen=True)
class _Loan:
    """A view of a value, of whose readers these are to give parts at these inputs."""

    tensor: int
    readers: set[int]
    crossings: tuple[Crossing, ...]


def _lent(tensor: int, debts: Debts, known: dict[int, bool]) -> Iterator[_Loan]:
    """Readers that only hand a view on, to some that owe parts and others (a router) that give the whole gradient."""
    flow, uses = debts.flow, debts.uses[tensor]
    if len(uses) < 2 or tensor not in flow.carries:
        return
    for use in sorted(uses - debts.partial.get(tensor, set())):
        made = flow.outputs[use]
        if len(made) != 1 or debts.passes_soon(use, known) or not debts.call_passes(use):
            continue
        (view,) = made
        readers = debts.uses.get(view, set())
        owing = {r for r in readers if r in debts.partial.get(view, ()) or debts.passes_soon(r, known)}
        if (
            not owing
            or owing == readers
            or view in flow.final | flow.rewritten
            or not debts.shards.has_whole_part(view)
        ):
            continue
        crossings = debts.hook_points.before(view, readers - owing, readers)
        if crossings and not any(debts.trace.calls[r].module in flow.branching for r in readers):
            yield _Loan(view, readers - owing, tuple(crossings))


def _merge(tensor: int, debts: Debts, known: dict[int, bool]) -> _Merge | None:
    """How a value's debts can be paid together; None where that is impossible or gains nothing."""
    flow, uses = debts.flow, debts.uses[tensor]
    if len(uses) < 2 or tensor not in flow.carries or tensor in flow.final | flow.rewritten:
        return None
    if debts.trace.tensors[tensor].kind == "parameter" or debts.shards.is_split(tensor):
        return None
    if any(debts.trace.calls[use].module in flow.branching for use in uses):
        return None  # another run may read it elsewhere
    owed = uses & debts.partial.get(tensor, set())
    beside = {use: _beside(use, tensor, debts) for use in uses - owed if debts.passes_soon(use, known)}
    passing = {use for use, found in beside.items() if found is not None}
    whole = uses - owed - passing
    if whole and all(_ends_in_debt(use, debts) for use in whole):
        passing, whole = passing | whole, set()
    paid = {value for use in passing for value in _passed(use, debts)[1]} | ({tensor} if owed else set())
    if sum(_sums(value, debts) for value in paid) < 2:
        return None
    crossings = debts.hook_points.before(tensor, whole, uses) if whole else []
    above = _way_up(tensor, debts)
    if (whole and not crossings) or above is None:
        return None
    more = tuple(dict.fromkeys(call for found in beside.values() for call in found or ()))
    return _Merge(tensor, tuple(sorted(passing)), tuple(whole), tuple(crossings), above, more)


def _passed(call: int, debts: Debts) -> tuple[set[int], set[int]]:
    """The calls through which a debt comes up to this one and through it, and the values at which it is paid now."""
    calls, values, waiting = set[int](), set[int](), [call]
    while waiting:
        index = waiting.pop()
        if index in calls:
            continue
        calls.add(index)
        for tensor in debts.flow.outputs[index]:
            uses, partial = debts.uses.get(tensor, set()), debts.partial.get(tensor, set())
            waiting += uses - partial
            values |= {tensor} if uses & partial else set()
    return calls, values


def _beside(call: int, tensor: int, debts: Debts) -> tuple[int, ...] | None:
    """Where a debt that goes up through a call leads besides to the value: None if to anything large.

    Small values that it is multiplied with on the way (a router's scores) are paid for by themselves: calls to pass.
    """
    flow, found = debts.flow, list[int]()
    calls, _ = _passed(call, debts)
    inside = {made for index in calls for made in flow.outputs[index]} | {tensor}
    reached = {t for index in calls for t in flow.inputs[index] if t in flow.carries and t not in inside}
    for other in sorted(reached):
        if debts.trace.tensors[other].kind == "parameter" or not debts.shards.has_whole_part(other):
            continue
        way = _way_up(other, debts) if debts.uses[other] <= calls and other not in flow.final else None
        if way is None or prod(debts.trace.tensors[other].shape) * _SMALL > prod(debts.trace.tensors[tensor].shape):
            return None
        found += way
    return tuple(found)


def _sums(tensor: int, debts: Debts) -> int:
    """How many sums a value costs as things are."""
    where = debts.where(tensor)
    if where == "input":
        return len({crossing.visit for crossing in debts.cover(tensor)})
    return len(debts.partial[tensor]) if where == "inside" else 1


def _way_up(tensor: int, debts: Debts) -> tuple[int, ...] | None:
    """The calls above a value through which a debt of all its readers goes until one hook can pay it."""
    calls: list[int] = []
    while True:
        uses = debts.uses[tensor]
        if debts.hook_points.made_at(tensor) is not None:
            return tuple(calls)
        if len({crossing.visit for crossing in debts.hook_points.before(tensor, uses, uses)}) == 1:
            return tuple(calls)
        made = debts.flow.producer.get(tensor)
        if made is None or not debts.call_passes(made) or len(debts.flow.outputs[made]) != 1:
            return None
        sources = [t for t in debts.flow.inputs[made] if t in debts.flow.carries and debts.shards.has_whole_part(t)]
        if len(sources) != 1 or debts.uses[sources[0]] != {made} or sources[0] in debts.flow.final:
            return None
        calls.append(made)
        tensor = sources[0]


def _ends_in_debt(index: int, debts: Debts) -> bool:
    """Does the call pass a value through a thin matrix to readers that are linear and all partial?"""
    flow = debts.flow
    if thin_matrix(index, flow, debts.shards) is None:
        return False
    (output,) = flow.outputs[index]
    uses = debts.uses.get(output, set())
    linear = all(debts.trace.calls[use].name == "linear" for use in uses)
    return bool(uses) and linear and uses <= debts.partial.get(output, set()) and output not in flow.final
