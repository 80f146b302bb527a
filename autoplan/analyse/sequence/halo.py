"""Context parallelism: what is gathered for a module that reads a few positions around its own, and cut again behind
it, becomes a halo: a few positions of the ranks before and after (`windows.py` finds such modules)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from autoplan.analyse.placement.callflow import CallFlow, Crossing
from autoplan.analyse.sequence.stream import SequencePlacement, Stream
from autoplan.analyse.sequence.stream_state import HaloAt
from autoplan.axes.terms import Term

__all__ = ["mixed", "take_halos"]


def mixed(stream: Stream, blocks: Collection[str], without: Collection[int] = ()) -> set[Term]:
    """The split leaves of values whose positions some call in these blocks, of whatever stack, mixes, unless a module
    around it needs a halo only."""
    split: set[Term] = set()
    flow, windows = stream.flow, stream.windows
    spans = {v.calls for v in stream.trace.visits if v.module in blocks and v.calls[0] >= stream.first_call}
    for index in sorted({index for span in spans for index in range(*span)}):
        values = [t for t in (*flow.inputs[index], *flow.outputs[index]) if stream.positions.dims_of(t)]
        inputs = [t for t in flow.inputs[index] if t in values]
        mixes = inputs and not flow.is_identity(index) and stream.mixes(index, inputs) is not None
        if mixes and index not in stream.own_queries and index not in without and windows.around(index, blocks) is None:
            split |= {leaf for tensor in values for leaf in stream.shards.split_leaves(tensor)}
    return split


def take_halos(streams: Iterable[Stream], flow: CallFlow, cut: SequencePlacement) -> None:
    """Replace in `cut` what is gathered where a module takes it in, and cut again where it returns it."""
    points: dict[tuple[str, tuple[object, ...]], list[Crossing]] = {}
    for crossing, side in cut.gathers:
        if side == "input" and crossing.module:
            points.setdefault((crossing.module, crossing.path), []).append(crossing)
    for stream in streams:
        for (module, path), crossings in points.items():
            visits = {crossing.visit for crossing in crossings}
            reach = {stream.windows.reach(visit) for visit in visits}
            ends = [end for crossing in crossings for end in _cut_again(crossing, stream, cut)]
            everywhere = {(end.module, "output", end.path) for end in ends} | {(module, "input", path)}
            runs = [set(flow.runs_through(*point)) for point in everywhere]
            if len(reach) == 1 and len(ends) == len(crossings) and all(len(run) == len(visits) for run in runs):
                _replace(crossings, ends, reach.pop() or (0, 0), stream, cut)


def _cut_again(crossing: Crossing, stream: Stream, cut: SequencePlacement) -> list[Crossing]:
    """Where what a run of a module returns is cut."""
    returned = {tensor for _, tensor in stream.trace.visits[crossing.visit].outputs}
    return [
        end
        for end, side in cut.own
        if side == "output"
        and crossing.first <= end.first
        and end.last <= crossing.last
        and stream.flow.tensor_at(end, "output") in returned
    ]


def _replace(
    crossings: list[Crossing], ends: list[Crossing], reach: tuple[int, int], stream: Stream, cut: SequencePlacement
) -> None:
    if not any(reach):
        return
    for end in ends:
        del cut.scatters[end, "output"]
        cut.own.discard((end, "output"))
    for crossing in crossings:
        ((path, output),) = stream.trace.visits[crossing.visit].outputs
        dim = cut.gathers.pop((crossing, "input"))
        cut.partial_gathers.discard((crossing, "input"))
        cut.halos[crossing] = HaloAt(dim, reach, path, stream.positions.plain_dim(output) or 0)
    gone = {crossing.module for crossing in crossings}
    cut.whole = [why for why in cut.whole if why.at not in gone]
