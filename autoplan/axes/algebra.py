"""The algebra of terms: unify two dimensions that turn out to be one, split them and slice them.

Elementwise ops show that two dimensions are equal, views that one is the product of others, slices that one is a
concatenation. Each of these may need structure that a leaf does not have yet; it is then refined, everywhere it occurs
at once. Where two structures cannot be reconciled, both are marked and the place is recorded as a conflict: a link that
cannot be expressed is never dropped silently.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from autoplan.axes.events import Event
from autoplan.axes.terms import ONE, Term, concatenation, factors, find, is_data, leaf, leaves, product, segments, show

Pair = tuple[Term, Term]

MOST_SEGMENTS = 256  # a finer concatenation is no useful axis, and comparing two of them would take long


@dataclass(frozen=True)
class Conflict:
    """Two dimensions that should be one and cannot be: what was tried, on which terms, and at which op of the trace."""

    why: str
    left: str
    right: str
    op: int = -1
    name: str = ""
    module: str = ""
    terms: tuple[Term, ...] = ()

    def __str__(self) -> str:
        place = f" at op {self.op} ({self.name}) in {self.module or 'the model'}" if self.op >= 0 else ""
        return f"{self.why}: {self.left} and {self.right}{place}"


class Algebra:
    """Unifies terms and records conflicts. `place` is the (op index, name, module) that conflicts are attributed to."""

    def __init__(self) -> None:
        self.conflicts: list[Conflict] = []
        self.place: tuple[int, str, str] = (-1, "", "")
        self._marked: list[Term] = []
        self.marked_by: list[tuple[int, str, Term]] = []  # (op index, event, term)

    # Events

    def mark(self, term: Term, event: str) -> None:
        """Leave an event on a term. It stays there until `settle`, even if the term is linked or refined."""
        term = find(term)
        if term.size > 1:
            self.marked_by.append((self.place[0], event, term))
            if not term.events:
                self._marked.append(term)
            term.events.add(event)

    def settle(self) -> None:
        """Propagate every event to the leaves of the term on which it was left."""
        for term in self._marked:
            root = find(term)
            if root is not term or root.parts:
                for axis in leaves(root):
                    axis.events |= term.events

    def conflict(self, why: str, left: str, right: str, terms: Iterable[Term], event: Event) -> None:
        """Record a conflict, and mark every term that is part of it."""
        terms = tuple(terms)
        self.conflicts.append(Conflict(why, left, right, *self.place, terms))
        for term in terms:
            self.mark(term, event)

    def _clash(self, why: str, left: Term, right: Term) -> None:
        self.conflict(why, show(left), show(right), (left, right), Event.CLASH)

    # Equality

    def unify(self, left: Term, right: Term) -> None:
        """Make two terms equal."""
        pairs: list[Pair] = [(left, right)]
        while pairs:
            a, b = map(find, pairs.pop())
            if a is b or a.size == b.size == 1:
                continue
            if a.size != b.size:
                self._clash("sizes differ", a, b)
                continue
            if a.kind != "leaf" and b.kind == "leaf":
                a, b = b, a
            if a.kind == "leaf":
                self._absorb(a, b)
                continue
            aligned = self._align(a, b)
            if aligned is None:
                self._clash("structures differ", a, b)
            else:
                pairs.extend(reversed(aligned))

    def _absorb(self, a: Term, b: Term) -> None:
        """Link a leaf to the other term, whatever that is."""
        if a.data:
            axes = leaves(b)
            if b.parts and not axes:  # single positions of the input have no axes to keep
                a, b = b, a
            for axis in axes:
                axis.data = True
        a.link = b

    def _align(self, a: Term, b: Term) -> list[Pair] | None:
        """Bring two structured terms to one shape; return the pairs that remain to be unified, or None."""
        if a.kind != b.kind:
            return self._align_mixed(a, b) if a.kind == "product" else self._align_mixed(b, a)
        pairs = self._align_products(a, b) if a.kind == "product" else self._align_concatenations(a, b)
        if pairs is not None and find(a) is a and find(b) is b:
            a.link = b
        return pairs

    def _align_products(self, a: Term, b: Term) -> list[Pair] | None:
        left, right = factors(a)[::-1], factors(b)[::-1]  # stacks, major factor on top
        pairs: list[Pair] = []
        while left and right:
            x, y = find(left[-1]), find(right[-1])
            if x.size < y.size:
                x, y, left, right = y, x, right, left
            halves = self.split(x, y.size, x.size // y.size) if x.size % y.size == 0 else None
            if halves is None:
                return None
            pairs.append((halves[0], y))
            right.pop()
            left[-1:] = factors(halves[1])[::-1]
        return pairs

    def _align_concatenations(self, a: Term, b: Term) -> list[Pair] | None:
        left, right = segments(a)[::-1], segments(b)[::-1]
        if max(len(left), len(right)) > MOST_SEGMENTS and [t.size for t in left] != [t.size for t in right]:
            return None
        pairs: list[Pair] = []
        most = len(left) + len(right) + 4 * MOST_SEGMENTS
        while left and right:
            if len(pairs) > most:
                return None
            x, y = find(left[-1]), find(right[-1])
            if x.size < y.size:
                x, y, left, right = y, x, right, left
            if x.size == y.size:
                rest: list[Term] = []
            else:
                rest = segments(self.cut(x, y.size, x.size))
                x = self.cut(x, 0, y.size)
            pairs.append((x, y))
            right.pop()
            left[-1:] = rest[::-1]
        return pairs

    def _align_mixed(self, a: Term, b: Term) -> list[Pair] | None:
        """Align a product and a concatenation: some factor boundary separates rows from the contents of each row."""
        parts = factors(a)
        for k in range(1, len(parts)):
            inner = prod(part.size for part in parts[k:])
            halves = self.split(b, b.size // inner, inner)
            if halves is not None:
                if find(b) is b:
                    b.link = find(a)
                return [(product(parts[:k]), halves[0]), (product(parts[k:]), halves[1])]
        return None

    # Structure

    def split(self, term: Term, outer: int, inner: int) -> Pair | None:
        """Return the term as a product of terms of size `outer` and `inner`, or None if it is not one."""
        term = find(term)
        if term.size != outer * inner:
            return None
        if outer == 1:
            return ONE, term
        if inner == 1:
            return term, ONE
        if term.kind == "product":
            return self._split_product(term, outer)
        if term.kind == "concatenation":
            return self._split_concatenation(term, inner)
        pair = leaf(outer, term.data), leaf(inner, term.data)
        term.refine("product", list(pair))
        return pair

    def _split_product(self, term: Term, outer: int) -> Pair | None:
        parts, head, reached = factors(term), list[Term](), 1
        for k, part in enumerate(parts):
            if reached == outer:
                return product(head), product(parts[k:])
            if outer % (reached * part.size) == 0:
                head.append(part)
                reached *= part.size
                continue
            missing = outer // reached
            halves = self.split(part, missing, part.size // missing) if part.size % missing == 0 else None
            if halves is None:
                return None
            return product([*head, halves[0]]), product([halves[1], *parts[k + 1 :]])
        return product(head), ONE

    def _split_concatenation(self, term: Term, inner: int) -> Pair | None:
        """Split segments into rows: each is several rows, or several form one; all rows are then unified."""
        rows = _rows(segments(term), inner)
        if rows is None:
            return None
        outers: list[Term] = []
        row: Term | None = None
        for group in rows:
            whole = concatenation(group)
            halves = self.split(whole, whole.size // inner, inner)
            if halves is None:
                return None
            outers.append(halves[0])
            if row is None:
                row = halves[1]
            else:
                self.unify(row, halves[1])
        assert row is not None
        return concatenation(outers), row

    def cut(self, term: Term, start: int, stop: int) -> Term:
        """Return positions start to stop of a term. A leaf is refined into a concatenation; input axes are not."""
        term = find(term)
        start, stop = max(start, 0), min(stop, term.size)
        if start == 0 and stop == term.size:
            return term
        if stop <= start:
            return leaf(0)
        if is_data(term):
            return leaf(stop - start, data=True)
        if term.kind == "concatenation":
            return self._cut_concatenation(term, start, stop)
        if term.kind == "product":
            return self._cut_product(term, start, stop)
        sizes = [size for size in (start, stop - start, term.size - stop) if size]
        parts = [leaf(size) for size in sizes]
        term.refine("concatenation", parts)
        return parts[1] if start else parts[0]

    def _cut_concatenation(self, term: Term, start: int, stop: int) -> Term:
        parts = segments(term)
        if len(parts) > MOST_SEGMENTS:
            return self._cut_loose(term, stop - start)
        pieces: list[Term] = []
        offset = 0
        for part in parts:
            low, high = max(start - offset, 0), min(stop - offset, part.size)
            if low < high:
                pieces.append(self.cut(part, low, high))
            offset += part.size
        return concatenation(pieces)

    def _cut_product(self, term: Term, start: int, stop: int) -> Term:
        parts = factors(term)
        inner = term.size // parts[0].size
        if start % inner or stop % inner:
            return self._cut_loose(term, stop - start)
        return product([self.cut(parts[0], start // inner, stop // inner), *parts[1:]])

    def _cut_loose(self, term: Term, size: int) -> Term:
        """Return a slice that the structure cannot express: both sides are marked."""
        piece = leaf(size)
        self.mark(term, Event.CUT)
        self.mark(piece, Event.CUT)
        return piece


def _rows(parts: list[Term], inner: int) -> list[list[Term]] | None:
    """Group segments so that each group is an integer number of rows of size `inner`."""
    rows: list[list[Term]] = []
    group: list[Term] = []
    filled = 0
    for part in parts:
        if not group and part.size % inner == 0:
            rows.append([part])
            continue
        group.append(part)
        filled += part.size
        if filled > inner:
            return None
        if filled == inner:
            rows.append(group)
            group, filled = [], 0
    return None if group else rows
