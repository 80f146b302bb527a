"""Questions about the positions of a stream: where they are in a tensor, and which calls couple them.

Each run of a model has a sequence axis of its own; a stack of blocks that several runs go through has several. It
need not be a single leaf: prompts and text one after the other are a concatenation, chunks of a sequence a product.
What counts is that the whole of it stands in one dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from math import prod
from typing import Any

from autoplan.analyse.shards import Shards
from autoplan.analyse.splits.integer_edits import evaluate
from autoplan.axes.terms import Term, find, leaves
from autoplan.ops import call_record, op_record
from autoplan.ops.pieces import joins
from autoplan.ops.records.on_shards import Indexed
from autoplan.values import LengthArgument, SequenceName, Symbolic, Trace, refs, symbolics

# Events along the sequence that leave each position by itself.
LOCAL = frozenset({"free_a", "batch_a", "batch_w", "conv_group", "created", "const", "random"})


class Positions:
    """The sequence axes of one stack of blocks."""

    def __init__(self, shards: Shards, sequences: Iterable[Term], context: bool = False) -> None:
        self.context = context
        self.trace, self.axes = shards.trace, shards.axes
        self.wholes = {tuple(find(leaf) for leaf in leaves(axis)): find(axis).size for axis in sequences}
        self.sequences = {leaf for whole in self.wholes for leaf in whole}
        self._crossing = coupling_ops(shards)
        self._dims, self._lengths = dict[int, list[int]](), dict[int, list[Symbolic]]()  # a walk asks again and again

    @staticmethod
    def of(terms: tuple[Term, ...], in_blocks: Collection[Term], anywhere: Collection[Term]) -> Term | None:
        """The sequence among the dims of a stream of shape (batch, sequence, …, features), which may have others in
        front: the first one whose positions some op couples, in the blocks if possible. There the batch may come
        second.
        """
        dims = [find(term) for term in (*terms[1:-1], *(terms[:1] if len(terms) > 2 else ()))]
        long = [axis for axis in dims if axis.size > 1 and any(find(leaf).data for leaf in leaves(axis))]
        inner = [axis for axis in long if axis in dims[: len(terms) - 2]]
        coupled = (
            axis
            for axes, by in ((long, in_blocks), (inner, anywhere))
            for axis in axes
            if any(find(leaf) in by for leaf in leaves(axis))
        )
        return next(coupled, (*inner, None)[0])

    def dims_of(self, tensor: int) -> list[int]:
        if tensor not in self._dims:
            self._dims[tensor] = [d for d, term in enumerate(self.axes.of(tensor)) if self.has(term)]
        return self._dims[tensor]

    def has(self, term: Term) -> bool:
        return any(find(leaf) in self.sequences for leaf in leaves(term))

    def is_whole(self, term: Term) -> bool:
        """Return whether a dim is all of a sequence, and nothing else."""
        return self._major(term) == 1

    def plain_dim(self, tensor: int) -> int | None:
        """The dim that is the sequence, or batch times sequence, counted from the end."""
        terms = self.axes.of(tensor)
        dims = self.dims_of(tensor)
        if len(dims) != 1:
            return None
        return dims[0] - len(terms) if self._major(terms[dims[0]]) is not None else None

    def _major(self, term: Term) -> int | None:
        """Return the size in front of the sequence in a dim: 1 if the dim is the sequence; None if it has none."""
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
        """Return whether this op left an event that couples positions, or joined them to others: what that makes is
        another sequence."""
        joined = self.trace.ops[op]
        if joins(joined.name) and any(map(self.dims_of, refs(joined.args))):
            return not any(map(self.dims_of, joined.results))
        return not self._crossing.get(op, set()).isdisjoint(self.sequences)

    def picks(self, index: int, cut: list[int]) -> bool:
        call = self.trace.calls[index]
        if not isinstance(call_record(call.name).sizes, Indexed):
            return True
        items = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
        dims = self.dims_of(call.args[0].id)
        if not dims:  # of something else, for each position
            return False
        position = 0
        for item in items:
            if item is None or item is Ellipsis:
                if item is Ellipsis:
                    break
                continue
            if position in dims:
                first = (None, 0) if self.context else (None,)  # a first position that is told is `AllGatherPicked`'s
                return not (isinstance(item, slice) and item.start in first and item.stop is item.step is None)
            position += 1
        return False

    def lengths_passed(self, index: int) -> list[Symbolic]:
        """Return the integers passed to a call that depend on a length of the sequence."""
        if index not in self._lengths:
            call = self.trace.calls[index]
            passed = (item for _, item in symbolics((call.args, call.kwargs)))
            self._lengths[index] = [item for item in passed if any(map(self._is_length, item.parts("size")))]
        return self._lengths[index]

    def lengths_to_change(
        self, index: int, is_one: Callable[[int, int], bool], own: bool = False
    ) -> tuple[LengthArgument, ...] | None:
        """Return where a call is passed lengths of shards that should be whole, or the reverse if it should get its
        `own`; None if one is no multiple of them plus a number. `is_one`: whether a dim of a tensor is one, as code
        reads it."""
        call, arguments = self.trace.calls[index], list[LengthArgument]()
        for path, item in symbolics({"args": call.args, "kwargs": call.kwargs}):

            def value(local: int, other: int, item: Symbolic = item) -> int | None:
                def size(tensor: int, dim: int) -> int:
                    return self.trace.tensors[tensor].shape[dim] * (local if is_one(tensor, dim) else other)

                return evaluate(item.origin, size, lambda _: 1)

            values = [value(*times) for times in ((1, 1), (2, 1), (5, 1), (1, 3), (2, 3))]
            numbers = [number for number in values if number is not None]
            if len(numbers) < len(values):
                return None
            once, twice, more, of_others, twice_of_others = numbers
            plus = 2 * once - twice
            if once != twice or once != more:
                if more - once != 4 * (twice - once) or plus != 2 * of_others - twice_of_others:
                    return None
                arguments.append(LengthArgument(path, SequenceName(""), plus, own))
        return tuple(arguments)

    def _is_length(self, size: tuple[Any, ...]) -> bool:
        _, tensor, dim = size
        terms = self.axes.of(tensor)
        return dim < len(terms) and self.has(terms[dim])


def coupling_ops(shards: Shards) -> dict[int, set[Term]]:
    """Return for every op the axes on which it left an event that couples positions."""
    coupling: dict[int, set[Term]] = {}
    for op, event, term in shards.axes.marked_by:
        if event not in LOCAL:
            coupling.setdefault(op, set()).update(find(leaf) for leaf in leaves(term))
    for op in _only_checked(shards.trace, coupling):
        del coupling[op]
    return coupling


def _only_checked(trace: Trace, ops: Collection[int]) -> list[int]:
    """Return those of these ops whose results a torch function only checks (`one_hot` its ids)."""
    checked = []
    for call in trace.calls:
        for op in range(*call.ops):
            if op in ops and len(inside := range(op + 1, call.ops[1])):
                results = set(trace.ops[op].results)
                users = [trace.ops[i] for i in inside if not results.isdisjoint(refs(trace.ops[i].args))]
                told = bool(users) and all(op_record(user.name).tells for user in users)
                checked += [op] if told and results.isdisjoint(refs(call.outputs)) else []
    return checked
