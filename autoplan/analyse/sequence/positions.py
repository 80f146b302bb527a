"""Questions about the positions of a stream: where they are in a tensor, and which calls couple them.

Each run of a model has a sequence axis of its own; a stack of blocks that several runs go through has several. It
need not be a single leaf: prompts and text one after the other are a concatenation, chunks of a sequence a product.
What counts is that the whole of it stands in one dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from math import prod
from typing import Any

from autoplan.analyse.infer import Shards
from autoplan.analyse.placement.callflow import CallFlow
from autoplan.analyse.splits.integer_edits import evaluate
from autoplan.axes.events import Event
from autoplan.axes.terms import Term, find, leaves
from autoplan.common.patterns import is_under, like_modules
from autoplan.ops import call_record, op_record
from autoplan.ops.pieces import joins
from autoplan.ops.records.on_shards import Indexed
from autoplan.values import Call, HookKind, LengthArgument, Ref, SequenceName, Symbolic, Trace, refs, symbolics

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
                checks_only = bool(users) and all(op_record(user.name).tells for user in users)
                checked += [op] if checks_only and results.isdisjoint(refs(call.outputs)) else []
    return checked


# Code that picks positions by what they hold, works on those, and puts the results back in their places.
#
# A loop over experts lists the tokens that chose each one (`torch.where`, a mask), runs the expert for these rows, and
# adds what it returns at the same positions. A rank can do so with its own positions: each row is about one of them,
# and nothing but the lists says which. What is counted over positions (tokens of an expert) may decide which rows are
# worked on, but must not become part of any value. Sums, sorts and statistics over positions or rows are excluded here;
# the trial proves the rest.

_PICKED = frozenset({Event.INDEX, Event.SCATTER})
_COUNTED = frozenset({Event.REDUCE_LIN, Event.REDUCE_LOGIC, Event.SORT})


class Picks:
    """The calls that pick positions, work on rows or put them back (`calls`), and what they make of rows (`rows`).
    `gathered`: see Capabilities."""

    def __init__(self, shards: Shards, flow: CallFlow, positions: Positions, gathered: Collection[HookKind]) -> None:
        self.trace, self.axes, self.flow, self.positions = shards.trace, shards.axes, flow, positions
        self.rows, self.calls = set[int](), set[int]()
        self.asking = set[int]()  # calls that tell Python of rows or counts: ranks may branch differently behind
        self.counts: dict[int, set[int]] = {}  # what was counted -> the calls that count
        self.places: set[Term] = set()  # axes of rows
        self.events: dict[int, list[tuple[str, set[Term]]]] = {}
        for op, event, term in self.axes.marked_by:
            self.events.setdefault(op, []).append((event, {find(leaf) for leaf in leaves(term)}))
        alike = like_modules(self.trace.module_classes) if gathered else {}
        whole = {name for name, kind in alike.items() if any(is_under(at, kind) for at, s in gathered if s == "input")}
        spoilt = {index for index, call in enumerate(self.trace.calls) if call.module in whole}
        for index in range(len(self.trace.calls)):
            spoilt |= self._visit(index)
        self.calls -= spoilt

    def _visit(self, index: int) -> set[int]:
        """Note what a call makes; return the calls that count what it makes part of a value."""
        inputs, outputs = self.flow.inputs[index], self.flow.outputs[index]
        counting = set[int]().union(*(self.counts.get(t, set()) for t in inputs))
        of_positions, of_rows = [t for t in inputs if self.positions.dims_of(t)], [t for t in inputs if t in self.rows]
        reads_values = any(op_record(self.trace.ops[op].name).tells for op in range(*self.trace.calls[index].ops))
        if reads_values and (counting or of_positions or of_rows) and not any(map(self.positions.dims_of, outputs)):
            self.asking.add(index)
        if counting and not self._only_selects(index):
            among_positions = bool(of_positions or of_rows)
            if any(map(self._is_number, outputs)) or (among_positions and not self._are_ids(inputs)):
                return counting
            self.counts |= dict.fromkeys(() if among_positions else outputs, counting)
        crossed = self._marked(index, self.positions.sequences | self.places) - LOCAL
        if not of_rows and not (of_positions and crossed):
            return set()
        if crossed <= _COUNTED and not any(map(self._is_number, (*of_positions, *of_rows, *outputs))) and crossed:
            if not any(self.positions.dims_of(t) for t in outputs):
                self.calls.add(index)
                self.counts |= {t: counting | {index} for t in outputs}
        elif crossed <= _PICKED and self._by_rows(index):
            self.calls.add(index)
            self.rows.update(t for t in outputs if not self.positions.dims_of(t))
            results = {
                find(leaf) for t in self.rows.intersection(outputs) for term in self.axes.of(t) for leaf in leaves(term)
            }
            self.places |= {leaf for leaf in results if Event.INDEX in self._marked(index, {leaf})}
        return set()

    def _marked(self, index: int, along: Collection[Term]) -> set[str]:
        """Return the events that a call leaves on some axes."""
        marks = (mark for op in range(*self.trace.calls[index].ops) for mark in self.events.get(op, ()))
        return {event for event, axes in marks if not axes.isdisjoint(along)}

    def _is_number(self, tensor: int) -> bool:
        return self.trace.tensors[tensor].differentiable

    def _are_ids(self, tensors: Iterable[int]) -> bool:
        """Return whether all are integers, such as ids that are compared with one that occurs."""
        return not any(self._is_number(t) or self.trace.tensors[t].dtype == "bool" for t in tensors)

    def _only_selects(self, index: int) -> bool:
        """Return whether what was counted stands only where a call selects."""
        call = self.trace.calls[index]
        return isinstance(call_record(call.name).sizes, Indexed) and not any(
            t in self.counts for t in refs(call.args[0])
        )

    def _by_rows(self, index: int) -> bool:
        """Return whether positions are picked, or put back, by lists or masks of them and by nothing else, and no part
        of some rows is taken (the first ones of an expert)."""
        call = self.trace.calls[index]
        source, along = next(refs(call.args[:1]), None), call_record(call.name).along
        if along is not None and along.what == "scatters":
            return all(isinstance(ref, Ref) and ref.id in self.rows for ref in call.args[2:4])
        if source is None:
            return True
        dims, terms = self.positions.dims_of(source), self.axes.of(source)
        of_rows = {d for d, term in enumerate(terms) if not self.places.isdisjoint(map(find, leaves(term)))}
        if source in self.rows:  # an axis of one row, or of none, is no axis
            of_rows |= {dim for dim, size in enumerate(self.trace.tensors[source].shape) if size < 2}
        for dim, item in self._taken(call, source):
            listed = isinstance(item, Ref) and (item.id in self.rows or bool(self.positions.dims_of(item.id)))
            if dim in of_rows or (dim in dims and not listed):
                return False
        return True

    def _taken(self, call: Call, source: int) -> Iterator[tuple[int, object]]:
        """Yield the dims along which a call takes a part of a value, and by what."""
        record, shape = call_record(call.name), self.trace.tensors[source].shape
        if isinstance(record.sizes, Indexed):
            dims = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
            items = [item for item in dims if item is not None]
            many = [self._covered(item) for item in items]
            place = 0
            for number, item in enumerate(items):
                yield from ((dim, item) for dim in range(place, place + many[number]) if item != slice(None))
                place = len(shape) - sum(many[number + 1 :]) if item is Ellipsis else place + many[number]
        elif record.along is not None:
            dims = call.args[record.along.dim : record.along.dim + 1] or (call.kwargs.get("dim", 0),)
            by = call.args[2] if record.along.what == "picks" and len(call.args) > 2 else None
            yield (dims[0] % len(shape) if isinstance(dims[0], int) else 0), by

    def _covered(self, item: object) -> int:
        """Return how many dims an index stands for."""
        info = self.trace.tensors[item.id] if isinstance(item, Ref) else None
        return len(info.shape) if info is not None and info.dtype in ("bool", "uint8") else int(item is not Ellipsis)
