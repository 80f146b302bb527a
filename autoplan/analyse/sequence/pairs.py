"""Values with a number for each pair of positions (masks, scores of attention in eager ops), which a rank holds whole.

The axes say so: two dims of such a value are the whole sequence. Inside a fused attention nothing of it is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autoplan.analyse.sequence.stream import Stream
from autoplan.axes.terms import Term, find, leaves
from autoplan.common.patterns import starred
from autoplan.ops import call_record
from autoplan.values import Call, Finding, refs

__all__ = ["pairs_of_positions"]


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
            made = {tensor for op in trace.ops[slice(*call.ops)] for tensor in refs(op.outputs)}
            size, positions = max((_size(tensor, streams, batch) for tensor in made), default=(0, 0))
            if size > largest.get(starred(call.module), (0, 0, call))[0]:
                largest[starred(call.module)] = size, positions, call
    return tuple(Finding("sequence", "note", name, _said(*found), kind="pairs") for name, found in largest.items())


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
