"""Context parallelism where heads cannot be shared out: attention of a rank's own queries.

A fused attention makes each position from one query, and from all keys and values. Where its heads are not sharded a
rank computes own positions only: the call itself gets the keys and values of all ranks, and rows of its mask. All else
in that module then treats positions apart.
"""

from __future__ import annotations

from autoplan.analyse.placement.callflow import CallFlow
from autoplan.analyse.sequence.positions import Positions
from autoplan.analyse.sequence.stream_state import Refused
from autoplan.analyse.shards import Shards
from autoplan.axes.terms import find
from autoplan.ops import call_record
from autoplan.values import AttendAcross, Call, CallSite, SequenceName, refs
from autoplan.values.not_placed import WholeSequence

__all__ = ["attended", "own_queries"]


def own_queries(shards: Shards, flow: CallFlow, positions: Positions) -> dict[int, set[int]]:
    """Return the calls that a rank can run for own queries, with these, their keys and values."""
    calls = enumerate(shards.trace.calls)
    given = {i: list(refs(call.args[:3])) for i, call in calls if call_record(call.name).causal is not None}
    return {i: set(first) for i, first in given.items() if _is_apart(i, first, shards, flow, positions)}


def _is_apart(index: int, first: list[int], shards: Shards, flow: CallFlow, positions: Positions) -> bool:
    """Return whether queries, keys and values are of the same positions, and neither their heads are sharded nor a
    bias is learnt."""
    return (
        len(first) == 3
        and all(positions.plain_dim(tensor) == -2 and not positions.flattened(tensor) for tensor in first)
        and len({find(shards.axes.of(tensor)[-2]) for tensor in first}) == 1
        and not any(shards.is_split(tensor) for tensor in first[:2])
        and (set(flow.inputs[index]) - set(first)).isdisjoint(flow.carries)
    )


def attended(calls: dict[int, SequenceName], shards: Shards) -> tuple[AttendAcross, ...]:
    """Return the instructions for these calls. All calls at one place of a module must be among them."""
    made: dict[tuple[str, str, str], AttendAcross] = {}
    for index, name in calls.items():
        call = shards.trace.calls[index]
        made[_place(call)] = AttendAcross(call.module, CallSite(call.name, call.place), name)
    for index, call in enumerate(shards.trace.calls):
        if _place(call) in made and index not in calls:
            raise Refused(WholeSequence("runs-both-ways", call.module))
    return tuple(made.values())


def _place(call: Call) -> tuple[str, str, str]:
    return call.module, call.name, call.place
