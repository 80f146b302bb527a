"""Sequence parallelism: between the split regions, ranks shard the positions instead of all doing the same.

Under tensor parallelism every rank holds the whole residual stream, and computes every norm and residual addition on
all of it. Here the stream is cut along the sequence from the input of the first block on. A sum that left a region
becomes a reduce-scatter, a whole value that entered one an all-gather: the same bytes on the wire, 1/tp of the memory.

Which calls may run on a shard of the positions is read off the trace: those whose ops left no event on the sequence
axis (they treat each position by itself), on values that carry the axis once. Everything else gets the whole sequence
back: a value is gathered at the boundary of the module that needs it, and what such a module returns is cut again.

Parameters used on shards (norms, scales) see some of the positions, so their gradients are summed over ranks. Where
the boundaries cannot be found the plan stays without sequence parallelism and says which op is to blame.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce

from autoplan.analyse.placement.callflow import CallFlow, Crossing, Placement
from autoplan.analyse.sequence.stream import SequencePlacement, Stream
from autoplan.analyse.shards import Shards
from autoplan.values import (
    AllGatherSequence,
    AllGatherSequenceSumGradient,
    AllReduce,
    AllReduceGradient,
    Boundary,
    NoteShard,
    ReduceScatterSequence,
    ScatterSequence,
    SequenceBoundary,
    Side,
    WithholdPartial,
)
from autoplan.values.whole_sequence import WholeSequence

__all__ = ["SequencePlacement", "place_sequence", "sequence_boundaries"]


def place_sequence(
    shards: Shards, flow: CallFlow, placement: Placement, stacks: Iterable[tuple[str, ...]]
) -> SequencePlacement:
    """Cut the residual stream of every stack of blocks along its sequence; one that cannot be stays whole."""
    placements: list[SequencePlacement] = []
    refused: list[WholeSequence] = []
    without: list[WholeSequence] = []
    for number, names in enumerate(blocks for blocks in stacks if blocks):
        stream = Stream(shards, flow, placement, names).run()
        if stream is None:
            without.append(WholeSequence("no-positions", names[0]))
            continue
        if stream.refused:
            refused += [replace(why, stack=names[0].rpartition(".")[0]) for why in stream.refused]
            continue
        stream.name_crossings(f"s{number}")
        placements.append(stream)
    if not placements:
        reasons = [replace(why, stack=None) for why in refused] or without or [WholeSequence("no-blocks")]
        return SequencePlacement(refused=tuple(dict.fromkeys(reasons)))
    result = reduce(_merged, placements)
    result.whole += refused
    return result


def _merged(a: SequencePlacement, b: SequencePlacement) -> SequencePlacement:
    a.names.update(b.names)
    a.scatters.update(b.scatters)
    a.gathers.update(b.gathers)
    a.gather_sums.update(b.gather_sums)
    a.reduce_scatters.update(b.reduce_scatters)
    a.returned_shards.update(b.returned_shards)
    a.summed_parameters |= b.summed_parameters
    a.random |= b.random
    a.whole += b.whole
    return a


def sequence_boundaries(placement: Placement, cut: SequencePlacement) -> tuple[Boundary, ...]:
    """All that is done at boundaries, with sums and copies of the stream turned into moves along the sequence."""
    found: dict[Boundary, None] = {}

    def add(kind: type[SequenceBoundary] | type[WithholdPartial], crossing: Crossing, side: Side, dim: int) -> None:
        found[kind(crossing.module, side, crossing.path, dim, cut.names[crossing])] = None

    for (crossing, kind), done in placement.outputs.items():
        if kind in _ON_SHARDS and crossing in cut.reduce_scatters:
            add(_ON_SHARDS[kind], crossing, "output", cut.reduce_scatters[crossing])
        elif kind is AllReduceGradient and (crossing, "output") in cut.gather_sums:
            add(AllGatherSequenceSumGradient, crossing, "output", cut.gather_sums[crossing, "output"])
        else:
            found[done] = None
    for (crossing, kind), done in placement.inputs.items():
        if kind is AllReduceGradient and (crossing, "input") in cut.gather_sums:
            add(AllGatherSequenceSumGradient, crossing, "input", cut.gather_sums[crossing, "input"])
        else:
            found[done] = None
    for (crossing, side), dim in cut.scatters.items():
        add(ScatterSequence, crossing, "input" if side == "input" else "output", dim)
    for (crossing, side), dim in cut.gathers.items():
        add(AllGatherSequence, crossing, "input" if side == "input" else "output", dim)
    for crossing, dim in cut.returned_shards.items():
        add(NoteShard, crossing, "output", dim)
    return tuple(found)


# what a sum becomes whose value is cut along the sequence from there on
_ON_SHARDS: dict[type[Boundary], type[ReduceScatterSequence] | type[WithholdPartial]] = {
    AllReduce: ReduceScatterSequence,
    WithholdPartial: WithholdPartial,
}
