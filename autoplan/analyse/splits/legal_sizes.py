"""The sizes at which everything divides that can be split, and no block of a quantised weight is parted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import gcd

from autoplan.analyse.infer import Axes
from autoplan.analyse.splits.choose import SplitMarks, occurrences, weights_of
from autoplan.analyse.splits.packed import Packed, fits_blocks, marks_at
from autoplan.axes.terms import Term
from autoplan.values import Trace
from autoplan.values.reasons import InsideQuantisedBlock

__all__ = ["Tried", "legal_sizes"]


@dataclass(frozen=True)
class Tried:
    """The candidates in the order in which they were tried first, and those that were given up at this size.

    `blocked`: axes that would be cut inside a block of a quantised weight, each with the axis that splits on within it.
    `why`: where that would be.
    """

    order: tuple[Term, ...] = ()
    blocked: Mapping[Term, Term | None] = field(default_factory=dict)
    why: Mapping[Term, InsideQuantisedBlock] = field(default_factory=dict)


def legal_sizes(trace: Trace, axes: Axes, choice: SplitMarks, tried: Tried, packed: Packed) -> tuple[int, ...]:
    """Sizes at which every class that can be split divides, between the blocks of quantised weights.

    Key/value heads may be shared by groups of ranks, or held by all while the queries of each are sharded.
    """
    vocabularies = choice.vocabularies
    partners = {**choice.partners, **{leaf: other for leaf, other in tried.blocked.items() if other is not None}}
    splittable = dict.fromkeys((*choice.marks, *choice.indivisible, *tried.blocked))
    followers = set(partners.values())
    alone = [leaf for leaf in splittable if leaf not in vocabularies | followers and leaf not in partners]
    largest = min([*(leaf.size for leaf in alone), *(a.size * b.size for a, b in partners.items())], default=1)
    first = _first_choices(trace, axes, tried, splittable) if packed else set()

    def fits(tp: int) -> bool:
        if any(leaf.size % tp for leaf in alone):
            return False
        if not all(_shareable(a.size, b.size, tp) for a, b in partners.items()):
            return False
        marks = {leaf: "!" for leaf in splittable if leaf in first and leaf not in followers}
        for leaf, partner in partners.items():
            marks |= marks_at(leaf, partner, tp) if leaf in first else {}
        return fits_blocks(trace, axes, marks, tp, packed)

    return tuple(tp for tp in range(1, largest + 1) if tp == 1 or fits(tp))


def _first_choices(trace: Trace, axes: Axes, tried: Tried, splittable: Iterable[Term]) -> set[Term]:
    """What is split where everything divides: others are tried only for weights that nothing before them cuts."""
    places = {leaf: number for number, leaf in enumerate(tried.order)}
    occurring = occurrences(trace, axes)
    found, taken = set(), set[int]()
    for leaf in sorted(splittable, key=lambda one: places.get(one, -1)):
        weights = weights_of(leaf, occurring, trace)
        if not weights & taken:
            found.add(leaf)
            taken |= weights
    return found


def _shareable(heads: int, within: int, tp: int) -> bool:
    return within % (tp // gcd(heads, tp)) == 0
