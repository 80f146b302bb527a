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

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from itertools import product
from math import prod
from typing import Any

from autoplan.analyse.infer import Shards
from autoplan.analyse.placement.callflow import UNRETURNED, CallFlow, Crossing, Placement
from autoplan.analyse.sequence.changes import HaloAt, Refused, SequencePlacement
from autoplan.analyse.sequence.context import leave_partial
from autoplan.analyse.sequence.exchange import exchange
from autoplan.analyse.sequence.stream import Stream
from autoplan.analyse.sequence.windows import attended, check_places
from autoplan.axes.terms import Term, find, leaves
from autoplan.common.patterns import starred
from autoplan.ops import call_record
from autoplan.values import (
    AllGatherPicked,
    AllGatherSequence,
    AllGatherSequenceSumGradient,
    AllReduce,
    AllReduceGradient,
    Boundary,
    Call,
    CallRewrite,
    ExchangeToPieces,
    ExchangeToPositions,
    Finding,
    Halo,
    HookKind,
    LogitsOfPositions,
    NoteShard,
    OwnPositions,
    ReduceScatterSequence,
    ScaleGradient,
    ScatterSequence,
    WholeLength,
    WithholdPartial,
    refs,
)
from autoplan.values.not_placed import WholeSequence

__all__ = ["SequencePlacement", "mixed_leaves", "place_sequence", "sequence_boundaries"]


def place_sequence(
    shards: Shards,
    flow: CallFlow,
    placement: Placement,
    stacks: Iterable[tuple[str, ...]],
    context: bool = False,
    rewritten: Collection[str] = (),
    gathered: Collection[HookKind] | None = None,
) -> SequencePlacement:
    """Cut the residual stream of every stack of blocks along its sequence; one that cannot be stays whole.
    `context`: all gradients outside of split regions are parts of a sum. `rewritten`: modules in whose code calls are
    changed. `gathered`: see Capabilities."""
    walked: dict[tuple[str, ...], tuple[Stream, SequencePlacement]] = {}
    refused: list[WholeSequence] = []
    without: list[WholeSequence] = []
    waiting = [names for names in stacks if names][::-1]
    while waiting:
        names = waiting.pop()
        walk, stream = _walked(shards, flow, placement, names, context, gathered or ())
        if stream is None:
            without.append(WholeSequence("no-positions", names[0]))
        elif stream.refused:
            refused += [replace(why, stack=names[0].rpartition(".")[0]) for why in stream.refused]
        elif before := next((other for other, (first, _) in walked.items() if _goes_on(first, walk)), None):
            del walked[before]
            waiting.append((*before, *names))
        else:
            walked[names] = walk, stream
    walks, placements = [walk for walk, _ in walked.values()], [stream for _, stream in walked.values()]
    for number, (walk, stream) in enumerate(walked.values()):
        stream.name_crossings(f"s{number}")
        stream.values, stream.reduced = walk.cut, walk.reduced
    if not placements or (context and refused):  # then `planning.py` tries it without these
        reasons = [replace(why, stack=None) for why in refused] or without or [WholeSequence("no-blocks")]
        return SequencePlacement(refused=tuple(dict.fromkeys(reasons)))
    result = reduce(_merged, placements)
    result.whole += refused
    result.partial_gathers = {key for key in result.gathers if flow.tensor_at(*key) in placement.partial}
    try:
        for work in (result.work.lengths, result.work.kept, result.work.summed):
            check_places(work, shards)
        if context:
            leave_partial(flow, placement, result)
            take_halos(walks, flow, result)
            exchange(walks, result, rewritten, gathered)
            result.calls = attended(result.attended, shards)
            result.pairs = pairs_of_positions(walks)
    except Refused as error:
        return SequencePlacement(refused=(error.reason,))
    return result


def _walked(
    shards: Shards,
    flow: CallFlow,
    placement: Placement,
    names: tuple[str, ...],
    context: bool,
    gathered: Collection[HookKind],
) -> tuple[Stream, SequencePlacement | None]:
    """The best of the ways to follow the stream of these blocks."""
    best = None
    ways = [(context, False), (False, False), (context, True)][: 3 if context else 1]
    for rescales, outside, (apart, shares) in product((False, True), (False, True), ways):
        walk = Stream(shards, flow, placement, names, context, apart, shares, outside, rescales, gathered)
        stream = walk.run()
        if stream is None or (not stream.refused and walk.leaves_blocks_cut() and not walk.whole):
            return walk, stream
        # Else the first that is not refused, though blocks return whole values, unless fewer of them take in all; of
        # refusals the last usual one
        cut = not stream.refused and walk.leaves_blocks_cut()
        if (
            best is None
            or (best[1].refused and not (rescales and stream.refused))
            or (cut and len(walk.whole) < len(best[0].whole))
        ):
            best = walk, stream
    assert best is not None
    return best


def _goes_on(a: Stream, b: Stream) -> bool:
    """Return whether one of two stacks takes in what the other returns on shards."""
    return any(
        tensor in one.cut and one.first_call < start.first
        for one, other in ((a, b), (b, a))
        for start, tensor in other.starts.items()
    )


def mixed_leaves(
    shards: Shards, flow: CallFlow, stacks: Iterable[tuple[str, ...]], without: Collection[int] = ()
) -> tuple[set[Term], set[int]]:
    """The split leaves that calls which mix positions treat apart (heads of attention, channels of scans), and the
    calls that a rank runs for own queries instead."""
    stacks = [names for names in stacks if names]
    streams = [Stream(shards, flow, Placement(), names, context=True, apart=True) for names in stacks]
    blocks = {name for names in stacks for name in names}
    begun = [stream for stream in streams if stream.begin()]
    leaves = {leaf for stream in begun for leaf in mixed(stream, blocks, without)}
    return leaves, {index for stream in begun for index in stream.own_queries}


def _merged(a: SequencePlacement, b: SequencePlacement) -> SequencePlacement:
    for name, more in vars(b).items():
        mine = getattr(a, name)
        if isinstance(mine, dict | set):
            mine.update(more)
    for name, work in vars(b.work).items():
        getattr(a.work, name).update(work)
    a.whole += b.whole
    return a


def sequence_boundaries(placement: Placement, cut: SequencePlacement) -> tuple[Boundary | CallRewrite, ...]:
    """All that is done at boundaries, with sums and copies of the stream turned into moves along the sequence, and
    calls that attend across ranks."""
    boundaries: dict[Boundary, None] = {}

    def add(kind: Callable[..., Boundary], place: tuple[Crossing, str], *more: Any) -> None:
        crossing, side = place
        boundaries[kind(crossing.module, side, crossing.path, *more)] = None

    def moved(kind: Callable[..., Boundary], place: tuple[Crossing, str], dim: int, *more: Any) -> None:
        add(kind, place, dim, cut.names[place[0]], *more)

    done_at = {"output": placement.outputs, "input": placement.inputs}
    dropped = {done_at[side][crossing, AllReduceGradient] for crossing, side in cut.dropped} | cut.undone
    for side, place in done_at.items():
        for (crossing, kind), done in place.items():
            if side == "output" and kind in (AllReduce, WithholdPartial) and crossing in cut.reduce_scatters:
                leaving = ReduceScatterSequence if kind is AllReduce else kind
                moved(leaving, (crossing, side), cut.reduce_scatters[crossing])
            elif kind is AllReduceGradient and (crossing, side) in cut.gather_sums:
                moved(AllGatherSequenceSumGradient, (crossing, side), cut.gather_sums[crossing, side])
            else:
                boundaries[done] = None
    for key, dim in cut.scatters.items():
        moved(OwnPositions if key in cut.own else ScatterSequence, key, dim)
    for key, dim in cut.gathers.items():
        if UNRETURNED not in key[0].path:
            moved(AllGatherSequenceSumGradient if key in cut.partial_gathers else AllGatherSequence, key, dim)
    for key, dim in cut.shown.items():
        moved(WholeLength, key, dim)
    for key, (dim, feature, layout) in cut.exchanges.items():
        moved(ExchangeToPieces if key[1] == "output" else ExchangeToPositions, key, dim, feature, layout)
    for crossing, halo in cut.halos.items():
        before, after = halo.reach
        moved(Halo, (crossing, "input"), halo.dim, before, halo.output, halo.output_dim, after)
    for crossing, dim in cut.returned_shards.items():
        moved(NoteShard, (crossing, "output"), dim)
    logits = next((cut.names[c] for c, _ in cut.gathers if c.module == ""), None)
    for crossing, dim in cut.heads.items():
        add(LogitsOfPositions, (crossing, "output"), dim, logits, crossing not in cut.unreturned)
    for crossing, dim in cut.picked.items():
        add(AllGatherPicked, (crossing, "output"), dim, logits)
    for key in sorted(cut.summed_back, key=str):
        add(AllReduceGradient, key)
    for crossing in sorted(cut.scaled, key=str):
        add(ScaleGradient, (crossing, "output"))
    return *(done for done in boundaries if done not in dropped), *cut.calls


# Values with a number for each pair of positions (masks, scores of attention in eager ops), which a rank holds whole.
#
# The axes say so: two dims of such a value are the whole sequence. Inside a fused attention nothing of it is in
# memory.


def pairs_of_positions(streams: Sequence[Stream]) -> tuple[Finding, ...]:
    """Return a note on the largest value of each kind of module, in the first call that makes it."""
    largest: dict[str, tuple[int, int, Call]] = {}
    trace, shards = streams[0].trace, streams[0].shards
    starts = [
        (stream, term)
        for stream in streams
        for t in (*stream.starts.values(), *stream.made_at.values())
        for term in shards.axes.of(t)[:-1]
    ]
    batch = {find(leaf) for stream, term in starts if not stream.positions.has(term) for leaf in leaves(term)}
    for call in trace.calls:
        if call_record(call.name).causal is None:
            results = {tensor for op in trace.ops[slice(*call.ops)] for tensor in refs(op.outputs)}
            size, positions = max((_size(tensor, streams, batch) for tensor in results), default=(0, 0))
            if size > largest.get(starred(call.module), (0, 0, call))[0]:
                largest[starred(call.module)] = size, positions, call
    return tuple(
        Finding("sequence", "note", name, _said(*largest_pair), kind="pairs") for name, largest_pair in largest.items()
    )


def _said(size: int, positions: int, call: Call) -> str:
    function, *line = call.place.rpartition(">")[2].split(":")
    where = f" in line {line[0]} of {function}" if line else ""
    return (
        f"{call.name}{where} makes a value of sequence × sequence: a rank holds {size} byte{'s' * (size > 1)} for each "
        f"pair of the {positions} positions that were recorded"
    )


def _size(tensor: int, streams: Sequence[Stream], batch: set[Term]) -> tuple[int, int]:
    """Return how many bytes a rank holds for each pair of positions of one sequence, and how many positions there are;
    zeros if it is another value."""
    shards = streams[0].shards
    terms = shards.axes.of(tensor)
    others = [term for term in terms if not any(stream.positions.is_whole(term) for stream in streams)]
    if len(terms) != len(others) + 2:
        return 0, 0
    inside = {find(leaf) for term in others for leaf in leaves(term)}
    size = shards.trace.tensors[tensor].item_size * prod(shards.local_size(term, 0) for term in others)
    positions = max(find(term).size for term in terms if not any(term is other for other in others))
    return size // prod(leaf.size for leaf in inside & batch), positions


# Context parallelism: what is gathered for a module that reads a few positions around its own, and cut again behind
# it, becomes a halo: a few positions of the ranks before and after (`windows.py` finds such modules).


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
        if mixes and index not in stream.own_queries and index not in without and windows.around(index) is None:
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
