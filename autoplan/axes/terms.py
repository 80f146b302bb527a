"""Terms: one tensor dimension as a leaf, a product of terms, or a concatenation of terms.

A dimension of 4096 may be 32 heads of 128 features (a product, major factor first), or packed q, k and v one after the
other (a concatenation). Leaves are the axes of the model; two dimensions that share a leaf are split together or not at
all. Terms are union-find nodes: views and slices refine a leaf in place, and terms found equal are linked, so always
read a term through the functions below, which resolve links.

Sizes keep this sound without an occurs check: a product drops factors of 1 and a concatenation drops parts of 0, so a
term is larger than any term in it, and only terms of one size are ever linked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from math import prod
from typing import Literal

Kind = Literal["leaf", "product", "concatenation"]
_numbers = count()


class Term:
    """One node. `events` are complete on leaves once the algebra has settled; `data`: an axis of the input."""

    __slots__ = ("data", "events", "id", "kind", "link", "parts", "size")

    def __init__(self, size: int, kind: Kind = "leaf", parts: list[Term] | None = None, data: bool = False) -> None:
        self.id = next(_numbers)
        self.size = size
        self.kind: Kind = kind
        self.parts: list[Term] = parts or []
        self.events: set[str] = set()
        self.data = data
        self.link: Term | None = None

    def refine(self, kind: Kind, parts: list[Term]) -> None:
        """Give a leaf structure."""
        assert self.kind == "leaf" and self.link is None
        self.kind, self.parts = kind, parts

    def __repr__(self) -> str:
        return show(self)


ONE = Term(1)


def find(term: Term) -> Term:
    """Return the representative of `term`, following links and shortening the path."""
    while (link := term.link) is not None:
        if link.link is not None:
            term.link = link.link
        term = link
    return term


def leaf(size: int, data: bool = False) -> Term:
    """Return a new axis. All dimensions of size 1 are the same term."""
    return ONE if size == 1 else Term(size, data=data)


def product(terms: Iterable[Term]) -> Term:
    """Return the product of terms, major first."""
    parts = [part for term in terms for part in factors(term)]
    if len(parts) == 1:
        return parts[0]
    return Term(prod(part.size for part in parts), "product", parts) if parts else ONE


def concatenation(terms: Iterable[Term]) -> Term:
    """Return the concatenation of terms. Parts of size 1 stay: they hold a place."""
    parts = [part for term in terms for part in segments(term) if part.size]
    if len(parts) == 1:
        return parts[0]
    return Term(sum(part.size for part in parts), "concatenation", parts) if parts else leaf(0)


def factors(term: Term) -> list[Term]:
    """Return the factors of a product, nested ones flattened; of any other term, itself; of size 1, none."""
    term = find(term)
    if term.size == 1:
        return []
    return list(_flat(term)) if term.kind == "product" else [term]


def segments(term: Term) -> list[Term]:
    """Return the parts of a concatenation, nested ones flattened; of any other term, itself."""
    term = find(term)
    return list(_flat(term)) if term.kind == "concatenation" else [term]


def _flat(term: Term) -> list[Term]:
    """Return the parts, with those of the same kind opened. The result is stored, so that chains are opened once."""
    parts = [find(part) for part in term.parts]
    if any(part.kind == term.kind for part in parts):
        todo, parts = parts[::-1], []
        while todo:
            part = find(todo.pop())
            if part.kind == term.kind:
                todo.extend(reversed(part.parts))
            else:
                parts.append(part)
    term.parts = parts
    return parts


def leaves(term: Term) -> list[Term]:
    """Return the distinct axes in a term, in order of appearance, without those of size 1."""
    term = find(term)
    if not term.parts:
        return [term] if term.size > 1 else []
    axes: list[Term] = []
    seen: set[int] = set()
    todo = [term]
    while todo:
        node = find(todo.pop())
        if node.id in seen:
            continue
        seen.add(node.id)
        if node.parts:
            todo.extend(reversed(node.parts))
        elif node.size > 1:
            axes.append(node)
    return axes


def is_data(term: Term) -> bool:
    """Return whether the term consists of axes of the input only."""
    term = find(term)
    if not term.parts:
        return term.data
    axes = leaves(term)
    return bool(axes) and all(axis.data for axis in axes)


def show(term: Term, names: Mapping[Term, str] | None = None) -> str:
    """Return a readable form: leaves as name:size ("a7" if unnamed), sizes of 1 as 1."""
    term = find(term)
    if term.kind == "product":
        return "*".join(f"({show(p, names)})" if p.kind == "concatenation" else show(p, names) for p in factors(term))
    if term.kind == "concatenation":
        return "|".join(show(part, names) for part in segments(term))
    if term.size <= 1:
        return str(term.size)
    return f"{(names or {}).get(term) or f'a{term.id}'}:{term.size}"


def layout(term: Term, is_split: Callable[[Term], str | None]) -> str:
    """Return a term in the notation of `autoplan.common.layout`: `is_split` gives the mark of a leaf that is sharded.

    Unsplit factors are merged into plain numbers: 4 heads of 16 features, none of them split, read "64".
    """
    marks = {axis.id: mark for axis in leaves(term) if (mark := is_split(axis))}
    carried: dict[int, bool] = {}

    def carries(node: Term) -> bool:
        if not node.parts:
            return node.id in marks
        if node.id not in carried:
            carried[node.id] = any([carries(part) for part in _flat(node)])
        return carried[node.id]

    def render(node: Term) -> str:
        if not carries(node):
            return str(node.size)
        if node.kind == "concatenation":
            return "|".join(render(part) for part in segments(node))
        if node.kind == "leaf":
            return f"{node.size}{marks[node.id]}"
        texts: list[str] = []
        whole = 1
        for part in factors(node):
            if not carries(part):
                whole *= part.size
                continue
            texts += [str(whole)] if whole > 1 else []
            texts.append(f"({render(part)})" if part.kind == "concatenation" else render(part))
            whole = 1
        return "*".join(texts + ([str(whole)] if whole > 1 else []))

    return render(find(term))
