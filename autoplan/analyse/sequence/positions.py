"""Questions about the positions of a stream: where they are in a tensor, and which calls couple them.

Each run of a model has a sequence axis of its own; a stack of blocks that several runs go through has several. It need
not be a single leaf: prompts and text one after the other are a concatenation, chunks of a sequence a product. What
counts is that the whole of it stands in one dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from autoplan.analyse.shards import Shards
from autoplan.axes.terms import Term, find, leaves
from autoplan.ops import call_record
from autoplan.ops.records.sizes import Indexed
from autoplan.values import Symbolic

__all__ = ["Positions", "integers"]

# Events along the sequence that leave each position by itself.
_LOCAL = frozenset({"free_a", "batch_a", "batch_w", "conv_group", "created", "const", "random"})


class Positions:
    """The sequence axes of one stack of blocks."""

    def __init__(self, shards: Shards, sequences: Iterable[Term]) -> None:
        self.trace, self.axes = shards.trace, shards.axes
        self.wholes = {tuple(find(leaf) for leaf in leaves(axis)): find(axis).size for axis in sequences}
        self.sequences = {leaf for whole in self.wholes for leaf in whole}
        self._crossing = self._crossing_ops()

    @staticmethod
    def of(terms: tuple[Term, ...]) -> Term | None:
        """The sequence among the dims of a stream of shape (batch, sequence, …, features)."""
        for term in terms[1:-1]:
            axis = find(term)
            if axis.size > 1 and any(find(leaf).data for leaf in leaves(axis)):
                return axis
        return None

    def dims_of(self, tensor: int) -> list[int]:
        return [d for d, term in enumerate(self.axes.of(tensor)) if self.has(term)]

    def has(self, term: Term) -> bool:
        return any(find(leaf) in self.sequences for leaf in leaves(term))

    def plain_dim(self, tensor: int) -> int | None:
        """The dim that is the sequence, or batch times sequence, counted from the end."""
        terms = self.axes.of(tensor)
        dims = self.dims_of(tensor)
        if len(dims) != 1:
            return None
        return dims[0] - len(terms) if self._major(terms[dims[0]]) is not None else None

    def _major(self, term: Term) -> int | None:
        """What a dim has in front of the sequence, as a size: 1 where it is the sequence; None if it is neither."""
        inside = tuple(find(leaf) for leaf in leaves(term))
        for whole, size in self.wholes.items():
            before = inside[: len(inside) - len(whole)]
            if inside[len(before) :] == whole and not self.sequences & set(before):
                major = prod(leaf.size for leaf in before)
                return major if major * size == find(term).size else None
        return None

    def flattened(self, tensor: int) -> bool:
        terms = self.axes.of(tensor)
        return any((self._major(terms[d]) or 1) > 1 for d in self.dims_of(tensor))

    def crossed_by(self, op: int) -> bool:
        """Did this op leave an event that couples positions?"""
        return not self._crossing.get(op, set()).isdisjoint(self.sequences)

    def _crossing_ops(self) -> dict[int, set[Term]]:
        """For every op the axes on which it left an event that couples positions."""
        found: dict[int, set[Term]] = {}
        for op, event, term in self.axes.marked_by:
            if event not in _LOCAL:
                found.setdefault(op, set()).update(find(leaf) for leaf in leaves(term))
        return found

    def picks(self, index: int, cut: list[int]) -> bool:
        call = self.trace.calls[index]
        if not isinstance(call_record(call.name).sizes, Indexed):
            return True
        items = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
        dims = self.dims_of(cut[0])
        position = 0
        for item in items:
            if item is None or item is Ellipsis:
                if item is Ellipsis:
                    break
                continue
            if position in dims:
                return not (isinstance(item, slice) and (item.start, item.stop, item.step) == (None, None, None))
            position += 1
        return False

    def depends_on_length(self, item: Symbolic) -> bool:
        todo, found = [item.origin], False
        while todo:
            part = todo.pop()
            if part[0] == "size":
                terms = self.axes.of(part[1])
                found = found or (part[2] < len(terms) and self.has(terms[part[2]]))
            todo += [p for p in part[1:] if isinstance(p, tuple)]
        return found


def integers(value: Any) -> Iterator[Any]:
    """Every integer of known origin in recorded arguments."""
    if isinstance(value, Symbolic):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from integers(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from integers(item)
    elif isinstance(value, slice):
        yield from integers((value.start, value.stop, value.step))
