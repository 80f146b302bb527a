"""Values with a number for each pair of positions (masks, scores of attention in eager ops), which a rank holds whole.

The axes say so: two dims of such a value are the whole sequence. Inside a fused attention nothing of it is in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from autoplan.analyse.sequence.stream import Stream
from autoplan.axes.terms import find, leaves
from autoplan.common.patterns import starred
from autoplan.ops import call_record
from autoplan.values import refs
from autoplan.values.not_placed import PairsOfPositions

__all__ = ["pairs_of_positions"]


def pairs_of_positions(streams: Sequence[Stream]) -> tuple[PairsOfPositions, ...]:
    """Return the first of the largest values of each kind of module."""
    largest: dict[str, PairsOfPositions] = {}
    trace = streams[0].trace
    for call in trace.calls:
        if call_record(call.name).causal is None:
            made = {tensor for op in trace.ops[slice(*call.ops)] for tensor in refs(op.outputs)}
            size, positions = max((_size(tensor, streams) for tensor in made), default=(0, 0))
            module = starred(call.module)
            if size > (largest[module].bytes if module in largest else 0):
                largest[module] = PairsOfPositions(module, call.name, call.place, positions, size)
    return tuple(largest.values())


def _size(tensor: int, streams: Sequence[Stream]) -> tuple[int, int]:
    """Return how many bytes a rank holds for each pair of positions of one sequence, and how many positions there are;
    zeros if it is another value."""
    shards = streams[0].shards
    terms = shards.axes.of(tensor)
    others = [term for term in terms if not any(stream.positions.is_whole(term) for stream in streams)]
    if len(terms) != len(others) + 2:
        return 0, 0
    inside = {find(leaf) for term in others for leaf in leaves(term)}
    batch = prod(leaf.size for leaf in inside if any(leaf in stream.batch for stream in streams))
    size = shards.trace.tensors[tensor].item_size * prod(shards.local_size(term, 0) for term in others)
    return size // batch, max(term.size for term in map(find, terms) if term not in map(find, others))
