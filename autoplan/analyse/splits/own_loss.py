"""A loss that the model itself makes of the logits that it returns, taken out of the trace.

The problem: `loss = F.cross_entropy(logits.view(-1, vocabulary), targets)` reads across the vocabulary, so the head
could not stay split: its columns would be gathered, for a loss that ranks can compute of the columns they hold
(`execute/vocabulary`). What the head's columns go through on the way to such a loss knows that it holds columns only,
and whatever else reads them there gets whole logits. So the loss says nothing about how the weights may be cut.

Taken out are the loss and what is made of it alone. A loss of logits that do not leave the model stays, as does one
that is added to something else: nobody would see that sum then.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.ops import call_record
from autoplan.ops.records.answers import Shows
from autoplan.ops.records.record import REMOVED
from autoplan.values import Call, Ref, Trace, refs

__all__ = ["without_own_loss"]


def without_own_loss(trace: Trace) -> Trace:
    """The trace as if the model had returned its logits and computed no loss of them."""
    taken = _losses(trace)
    if not taken:
        return trace
    ops, calls = list(trace.ops), list(trace.calls)
    for number in taken:
        first, stop = calls[number].ops
        for op in range(first, stop):
            ops[op] = replace(ops[op], name=REMOVED, args=(), kwargs={}, outputs=())
        calls[number] = replace(calls[number], name=REMOVED, args=(), kwargs={}, outputs=(), ops=(stop, stop))
    return replace(trace, ops=tuple(ops), calls=tuple(calls))


def _losses(trace: Trace) -> set[int]:
    """The calls of such losses, of what only they read, and of what is made of them; none if other values join that."""
    returned = {tensor for visit in trace.visits if visit.module == "" for _, tensor in visit.outputs}
    made_by = {tensor: number for number, call in enumerate(trace.calls) for tensor in refs(call.outputs)}
    losses: set[int] = set()
    ways: set[int] = set()
    lost: set[int] = set()
    for number, call in enumerate(trace.calls):
        read = set(refs((call.args, call.kwargs)))
        way = _way_from_logits(call, returned, trace, made_by) if call_record(call.name).loss_of_columns else None
        if way is None and not read & lost:
            continue
        if way is None and any(trace.tensors[other].kind != "constant" for other in read - lost):
            return set()
        losses.add(number)
        ways.update(way or ())
        lost |= set(refs(call.outputs))
    return losses | _only_for(losses, ways, trace)


def _way_from_logits(loss: Call, returned: set[int], trace: Trace, made_by: dict[int, int]) -> list[int] | None:
    """The calls between scores that the model returns and the loss of them: views, casts, pieces. None if there are no
    such scores."""
    scores = loss.args[0] if loss.args else loss.kwargs.get("input")
    way: list[int] = []
    while isinstance(scores, Ref) and scores.id not in returned:
        number = made_by.get(scores.id, -1)
        if number < 0 or call_record(trace.calls[number].name).shows == Shows.NOTHING:
            return None
        way.append(number)
        scores = trace.calls[number].args[0]
    return way if isinstance(scores, Ref) else None


def _only_for(losses: set[int], ways: set[int], trace: Trace) -> set[int]:
    """Of the calls on the way to losses those that nothing else reads: the last first, the next one reads it."""
    readers: dict[int, set[int]] = {}
    for number, call in enumerate(trace.calls):
        for tensor in refs((call.args, call.kwargs)):
            readers.setdefault(tensor, set()).add(number)
    gone = set(losses)
    for number in sorted(ways, reverse=True):
        if all(readers.get(tensor, set()) <= gone for tensor in refs(trace.calls[number].outputs)):
            gone.add(number)
    return gone
