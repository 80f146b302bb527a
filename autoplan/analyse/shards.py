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
