"""The local shapes and layouts that follow once it is decided which axis classes are split.

Splits are marked on leaves of terms (`marks`); everything else follows: which dims of which tensors are sharded, how
many indices of a dim a rank holds, and which rows of a partly sharded dim are replicated.
"""

from __future__ import annotations

from autoplan.analyse.infer import Axes
from autoplan.axes.terms import Term, find, layout, leaves
from autoplan.common.layout import Layout
from autoplan.values import Trace


class Shards:
    """The layouts and local sizes of all tensors under a set of split leaves."""

    def __init__(self, trace: Trace, axes: Axes, marks: dict[Term, str], tp: int) -> None:
        self.trace, self.axes, self.tp = trace, axes, tp
        self.marks = {find(term): mark for term, mark in marks.items()}
        self._layouts: dict[int, Layout | None] = {}
        self._split_tensors: dict[int, bool] = {}
        self._keep: list[Term] = []  # ids of terms stay unique while they are kept

    def mark(self, leaf: Term) -> str | None:
        return self.marks.get(find(leaf))

    def layout_of(self, term: Term) -> Layout | None:
        """Return the layout of a dimension, or None if it is replicated."""
        term = find(term)
        key = id(term)
        if key not in self._layouts:
            self._keep.append(term)
            split = any(find(leaf) in self.marks for leaf in leaves(term))
            self._layouts[key] = Layout.parse(layout(term, self.mark)) if split else None
        return self._layouts[key]

    def split_leaves(self, tensor: int) -> set[Term]:
        return {find(leaf) for term in self.axes.of(tensor) for leaf in leaves(term) if find(leaf) in self.marks}

    def is_split(self, tensor: int) -> bool:
        """Return whether any dimension of the tensor carries a split axis."""
        split = self._split_tensors.get(tensor)
        if split is None:
            split = any(self.layout_of(term) is not None for term in self.axes.of(tensor))
            self._split_tensors[tensor] = split
        return split

    def layouts(self, tensor: int) -> tuple[Layout | None, ...]:
        return tuple(self.layout_of(term) for term in self.axes.of(tensor))

    def is_mixed(self, tensor: int) -> bool:
        """Return whether some dimension is sharded in some rows and replicated in others."""
        return any(layout is not None and not layout.all_carried() for layout in self.layouts(tensor))

    def has_whole_part(self, tensor: int) -> bool:
        """Return whether any of the tensor is replicated: all of it, or some rows of a partly sharded dimension."""
        return not self.is_split(tensor) or self.is_mixed(tensor)

    def local_size(self, term: Term, rank: int) -> int:
        dim_layout = self.layout_of(term)
        return find(term).size if dim_layout is None else dim_layout.held(rank, self.tp)

    def local_shape(self, tensor: int, rank: int) -> tuple[int, ...]:
        """Return the shape of a tensor on one rank."""
        terms, shape = self.axes.of(tensor), self.trace.tensors[tensor].shape
        if len(terms) != len(shape):
            return shape
        return tuple(
            size if self.layout_of(term) is None else self.local_size(term, rank)
            for term, size in zip(terms, shape, strict=True)
        )

    def held_below(self, term: Term, rank: int, bound: int) -> int:
        """Return how many of the first `bound` indices of a dimension a rank holds."""
        dim_layout = self.layout_of(term)
        if dim_layout is None:
            return bound
        return sum(len(range(run.start, min(run.stop, bound))) for run in dim_layout.runs(rank, self.tp))
