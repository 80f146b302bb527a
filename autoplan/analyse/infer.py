"""Infer the axes of every dimension of every tensor of a trace, in one pass over the ops, first to last.

Each op is read by the dim rule of its record (`autoplan/ops`), which relates the dims of the inputs to those of the
outputs and leaves events on them. No names are read: a head axis is whatever the model treats as one. Two promises hold
throughout: an op without an exact rule marks every axis it touches as opaque, and a link that cannot be expressed marks
both of its sides, so a conflict can never look free to split.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod

from autoplan.axes.algebra import Conflict
from autoplan.axes.events import Event
from autoplan.axes.terms import Term, find, is_data, layout, leaf, leaves, segments, show
from autoplan.common.layout import Layout
from autoplan.ops import op_record
from autoplan.ops.attention import mask_of_heads
from autoplan.ops.convolutions import groups_of
from autoplan.ops.elementwise import asks
from autoplan.ops.records.answers import Drawn, Linear, Shows
from autoplan.ops.records.site import Dims, Inference, Site
from autoplan.values import Op, Ref, Trace


@dataclass
class Axes:
    """The inferred axes. `dims` has every tensor of the trace; terms are settled: leaves carry all their events.

    `conflicts` are those that touch an axis of a weight; the `harmless` ones lie between others (positions, mostly).
    `weights` are parameters, views of them, and what is computed from a quantised weight and its companions alone;
    `sources` says of which parameter (or buffer, if that is where a quantised weight is kept), and `companions`, by
    weight, what was computed with it; `computed` are the weights, and what is made of parameters, buffers and constants
    alone (a masked, scaled or standardised weight), with the largest parameter in each. `static` are tensors made in
    forward from constants only, equal in every run, `identities` identity matrices whose rows and columns are one axis;
    `marked_by` says which op left which event; `unknown` counts ops that were treated as opaque.
    """

    dims: dict[int, tuple[Term, ...]]
    conflicts: list[Conflict] = field(default_factory=list)
    harmless: list[Conflict] = field(default_factory=list)
    unknown: Counter[str] = field(default_factory=Counter)
    weights: set[int] = field(default_factory=set)
    sources: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    static: set[int] = field(default_factory=set)
    identities: set[int] = field(default_factory=set)
    companions: dict[int, set[int]] = field(default_factory=dict)
    marked_by: list[tuple[int, str, Term]] = field(default_factory=list)  # (op index, event, term), as it happened
    gathered: frozenset[int] = frozenset()  # ops after which an all-gather was decided
    taken: dict[int, tuple[int, tuple[Term, ...]]] = field(default_factory=dict)  # op index: see `_Reader.read`

    def of(self, tensor: int) -> tuple[Term, ...]:
        """Return the terms of a tensor, one per dim."""
        return self.dims[tensor]

    def is_stored_weight(self, tensor: int) -> bool:
        """Return whether the tensor is a weight itself, rather than a view of one."""
        return self.sources.get(tensor) == tensor


def infer_axes(trace: Trace, gathered: frozenset[int] = frozenset()) -> Axes:
    """Infer the axes of a trace. After the ops in `gathered` (indices), output dims of a weight are new axes."""
    reader = _Reader(trace)
    for index, op in enumerate(trace.ops):
        reader.read(index, op, index in gathered)
    return replace(reader.finish(), gathered=gathered)


class _Reader:
    """Reads ops in order; `state` is what has been inferred so far."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.state = Inference(trace)
        self.unknown: Counter[str] = Counter()
        self.views: dict[int, int] = {}  # view -> the tensor whose elements it shows
        self.shown_by: defaultdict[int, list[int]] = defaultdict(list)
        self.kept = self.state.kept
        self.companions: defaultdict[int, set[int]] = defaultdict(set)
        masks = ((call, mask_of_heads(call, trace)) for call in trace.calls)
        self.taken: dict[int, tuple[int, tuple[Term, ...]]] = {}
        self.masks = {index: mask for call, mask in masks if mask is not None for index in range(*call.ops)}
        for tensor, info in enumerate(trace.tensors):
            if info.kind == "parameter" or info.quantised:
                self.state.sources[tensor] = tensor
            if info.kind in ("parameter", "buffer", "constant"):
                self.kept[tensor] = frozenset() if info.kind == "constant" else frozenset((tensor,))
            if info.kind == "constant":
                self.state.static.add(tensor)

    def read(self, index: int, op: Op, gathered: bool) -> None:
        state = self.state
        inputs, outputs = [*map(Ref, op.reads)], [*map(Ref, op.results)]
        state.algebra.place = (index, op.name, op.module)
        state.gathered = gathered
        record = op_record(op.name)
        site = Site(op, state, inputs, outputs)
        full = self.masks.get(index)
        if gathered and record.drawn is Drawn.CONVOLUTION and groups_of(op) > 1:
            full = inputs[0].id
        if full is not None and Ref(full) in inputs:  # a rank takes what its heads or groups of channels need from it
            outside, inside = state.terms(full), [leaf(size) for size in self.trace.tensors[full].shape]
            state.dims[full] = inside
            answer = record.dims(site)
            state.dims[full], self.taken[index] = outside, (full, tuple(inside))
        else:
            answer = record.dims(site) if outputs else None
        self._update_static(op, inputs, outputs)
        if record.dims is asks:
            return
        if answer is None:
            answer = self._opaque(op, inputs, outputs)
        elif record.shows is not Shows.NOTHING and inputs:
            source = inputs[0]
            root = self.views.get(source.id, source.id)
            parameter = self.state.sources.get(source.id)
            for ref in outputs:
                if ref.id != source.id and ref.id not in self.views:
                    self.views[ref.id] = root
                    self.shown_by[root].append(ref.id)
                if parameter is not None:
                    self.state.sources.setdefault(ref.id, parameter)
        self._update_dequantised(op, inputs, outputs)
        self._record(outputs, answer)

    def _opaque(self, op: Op, inputs: Sequence[Ref], outputs: Sequence[Ref]) -> list[Dims | None]:
        """Mark every axis of the inputs and outputs: the op has no exact rule."""
        algebra = self.state.algebra
        operands = [self.state.terms(ref.id) for ref in inputs]
        for term in (term for dims in operands for term in dims):
            algebra.mark(term, Event.OPAQUE)
        if any(term.size > 1 for dims in operands for term in dims):
            self.unknown[op.name] += 1
        answer: list[Dims | None] = []
        for ref in outputs:
            shape = self.trace.tensors[ref.id].shape
            alike = next((dims for dims in operands if [term.size for term in dims] == list(shape)), None)
            answer.append(alike)
        return answer

    def _record(self, outputs: Sequence[Ref], answer: Sequence[Dims | None]) -> None:
        """Record the dims of the outputs. Dims that one has already (in place, or an input) are unified with these."""
        algebra = self.state.algebra
        for position, ref in enumerate(outputs):
            shape = self.trace.tensors[ref.id].shape
            dims = answer[position] if position < len(answer) else None
            if dims is not None and tuple(term.size for term in dims) != shape:
                algebra.conflict("shape", ", ".join(map(show, dims)), str(shape), dims, Event.OPAQUE)
                dims = None
            if dims is None:
                dims = [leaf(size) for size in shape]
                for term in dims:
                    algebra.mark(term, Event.OPAQUE)
            existing = self.state.dims.get(ref.id)
            if existing is None:
                self.state.dims[ref.id] = dims
                continue
            for old, new in zip(existing, dims, strict=True):
                algebra.unify(old, new)

    def _update_dequantised(self, op: Op, inputs: Sequence[Ref], outputs: Sequence[Ref]) -> None:
        """Track a quantised weight through the steps of dequantisation: each result is still the weight."""
        results = {ref.id for ref in outputs}
        if not inputs or not outputs or not all(ref.id in self.kept for ref in inputs) or _may_draw(op):
            for tensor in results:
                self.kept.pop(tensor, None)
            return
        record, shape = op_record(op.name), self.trace.tensors[outputs[0].id].shape
        whole = [ref.id for ref in inputs if self.state.parameters_of(ref.id)]
        # A product of weights is none of them; a weight that it is added to (a merged LoRA) still is one.
        added = record.linear is Linear.ADDS and any(self.trace.tensors[tensor].shape == shape for tensor in whole)
        kinds = [{self.trace.tensors[root].kind for root in self.kept[ref.id]} for ref in inputs]
        several = record.product is not None and sum("parameter" in each for each in kinds) > 1
        if (several and len(shape) > 1) or (not added and any(ref.id in self.state.multiplied for ref in inputs)):
            self.state.multiplied |= results
        roots = frozenset(root for ref in inputs for root in self.kept[ref.id])
        self.kept |= dict.fromkeys(results, roots)
        sources = [self.state.sources[ref.id] for ref in inputs if ref.id in self.state.sources]
        quantised = next((source for source in sources if self.trace.tensors[source].quantised), None)
        if quantised is not None:
            self.companions[quantised] |= roots - {quantised}
            for tensor in results:
                self.state.sources.setdefault(tensor, quantised)

    def _update_static(self, op: Op, inputs: Sequence[Ref], outputs: Sequence[Ref]) -> None:
        """Follow tensors made of constants only; one that is overwritten with anything else is no longer static."""
        static = self.state.static
        if all(ref.id in static for ref in inputs) and not _may_draw(op):
            static.update(ref.id for ref in outputs)
            return
        for ref in outputs:
            if ref.id in static:
                root = self.views.get(ref.id, ref.id)
                static.difference_update((ref.id, root, *self.shown_by[root]))

    def finish(self) -> Axes:
        state = self.state
        for term in state.contracted.values():
            _mark_mixed(state, find(term))
        self._mark_twice()
        state.algebra.settle()
        dims = {i: tuple(find(term) for term in state.terms(i)) for i in range(len(self.trace.tensors))}
        in_weights = {axis.id for i in state.sources for term in dims[i] for axis in leaves(term)}
        conflicts: tuple[list[Conflict], list[Conflict]] = [], []
        for conflict in state.algebra.conflicts:
            harmless = in_weights.isdisjoint(axis.id for term in conflict.terms for axis in leaves(term))
            conflicts[harmless].append(conflict)
        return Axes(
            dims,
            *conflicts,
            self.unknown,
            set(state.sources),
            state.sources,
            self._computed(),
            state.static,
            state.identities,
            dict(self.companions),
            state.algebra.marked_by,
            taken={index: (full, tuple(map(find, inside))) for index, (full, inside) in self.taken.items()},
        )

    def _computed(self) -> dict[int, int]:
        """Return what is computed from weights alone, with the largest parameter in it; for a view, its base."""
        largest = {
            tensor: max(self.state.parameters_of(tensor), key=lambda root: prod(self.trace.tensors[root].shape))
            for tensor in self.kept
            if self.state.parameters_of(tensor)
        }
        return largest | self.state.sources

    def _mark_twice(self) -> None:
        """Mark axes that are in two dims of one value (x times x.T): a rank has its own block of it only."""
        for tensor, info in enumerate(self.trace.tensors):
            if info.kind != "activation" or tensor in self.state.sources or tensor in self.state.identities:
                continue
            seen: set[int] = set()
            for term in map(find, self.state.terms(tensor)):
                if term.size > 1 and id(term) in seen and not is_data(term):
                    self.state.algebra.mark(term, Event.TWICE)
                seen.add(id(term))


def _may_draw(op: Op) -> bool:
    return op_record(op.name).random.may_draw(op.args, op.kwargs)


def _mark_mixed(state: Inference, term: Term) -> None:
    """Find concatenations, inside the axis being summed over, that carry an axis in only some segments. With that axis
    split each rank would add the other, replicated segments, and the sum would count them several times."""
    todo, seen = [term], set[int]()
    while todo:
        node = find(todo.pop())
        if node.id in seen or not node.parts or is_data(node):
            continue
        seen.add(node.id)
        todo.extend(node.parts)
        if node.kind == "concatenation":
            carried = [leaves(part) for part in segments(node)]
            counts = Counter(axis.id for axes in carried for axis in axes)
            for axis in (axis for axes in carried for axis in axes):
                if counts[axis.id] < len(carried):
                    state.algebra.mark(axis, Event.CONTRACT_MIXED)


# The local shapes and layouts that follow once it is decided which axis classes are split.
#
# Splits are marked on leaves of terms (`marks`); everything else follows: which dims of which tensors are sharded, how
# many indices of a dim a rank holds, and which rows of a partly sharded dim are replicated.


class Shards:
    """The layouts and local sizes of all tensors under a set of split leaves."""

    def __init__(self, trace: Trace, axes: Axes, marks: dict[Term, str], tp: int) -> None:
        self.trace, self.axes, self.tp = trace, axes, tp
        self.marks = {find(term): mark for term, mark in marks.items()}
        self._layout_of: dict[Term, Layout | None] = {}
        self._layouts: dict[int, tuple[Layout | None, ...]] = {}
        self._split: dict[int, bool] = {}

    def mark(self, leaf: Term) -> str | None:
        return self.marks.get(find(leaf))

    def layout_of(self, term: Term) -> Layout | None:
        """Return the layout of a dimension, or None if it is replicated."""
        term = find(term)
        if term not in self._layout_of:
            split = any(find(leaf) in self.marks for leaf in leaves(term))
            self._layout_of[term] = Layout.parse(layout(term, self.mark)) if split else None
        return self._layout_of[term]

    def split_leaves(self, tensor: int) -> set[Term]:
        return {find(leaf) for term in self.axes.of(tensor) for leaf in leaves(term) if find(leaf) in self.marks}

    def is_split(self, tensor: int) -> bool:
        """Return whether any dimension of the tensor carries a split axis."""
        split = self._split.get(tensor)
        if split is None:
            split = self._split[tensor] = any(layout is not None for layout in self.layouts(tensor))
        return split

    def layouts(self, tensor: int) -> tuple[Layout | None, ...]:
        layouts = self._layouts.get(tensor)
        if layouts is None:
            layouts = self._layouts[tensor] = tuple(map(self.layout_of, self.axes.of(tensor)))
        return layouts

    def is_mixed(self, tensor: int) -> bool:
        """Return whether some dimension is sharded in some rows and replicated in others."""
        return any(layout is not None and not layout.all_carried() for layout in self.layouts(tensor))

    def local_size(self, term: Term, rank: int) -> int:
        dim_layout = self.layout_of(term)
        return find(term).size if dim_layout is None else dim_layout.held(rank, self.tp)

    def local_shape(self, tensor: int, rank: int) -> tuple[int, ...]:
        """Return the shape of a tensor on one rank."""
        layouts, shape = self.layouts(tensor), self.trace.tensors[tensor].shape
        if len(layouts) != len(shape):
            return shape
        return tuple(
            size if layout is None else layout.held(rank, self.tp) for layout, size in zip(layouts, shape, strict=True)
        )

    def held_below(self, term: Term, rank: int, bound: int) -> int:
        """Return how many of the first `bound` indices of a dimension a rank holds."""
        dim_layout = self.layout_of(term)
        if dim_layout is None:
            return bound
        return sum(len(range(run.start, min(run.stop, bound))) for run in dim_layout.runs(rank, self.tp))
