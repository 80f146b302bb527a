"""Terms mean something: each position of a dimension is a place on some axes. Whatever the algebra does must keep it.

`places` spells a term out: for every position, the (axis, index) pairs it stands for, major first. Splitting, cutting,
unifying and printing are then checked against plain list arithmetic on random terms.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from autoplan.axes.algebra import MOST_SEGMENTS, Algebra
from autoplan.axes.events import FORBIDDING, Event
from autoplan.axes.terms import (
    ONE,
    Term,
    concatenation,
    factors,
    find,
    is_data,
    layout,
    leaf,
    leaves,
    product,
    segments,
    show,
)
from autoplan.common.layout import Layout

Place = tuple[tuple[int, int], ...]


def places(term: Term) -> list[Place]:
    """What each position of a term stands for."""
    term = find(term)
    if term.kind == "product":
        spelled: list[Place] = [()]
        for part in term.parts:
            spelled = [before + here for before in spelled for here in places(part)]
        return spelled
    if term.kind == "concatenation":
        return [here for part in term.parts for here in places(part)]
    return [((term.id, index),) if term.size > 1 else () for index in range(term.size)]


@st.composite
def terms(draw: Any, size: int | None = None, pool: dict[int, list[Term]] | None = None, depth: int = 3) -> Term:
    """A random term, of a given size when asked; axes of one size are sometimes shared."""
    pool = {} if pool is None else pool
    size = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24])) if size is None else size
    kind = draw(st.sampled_from(["leaf", "product", "concatenation"])) if depth and size > 1 else "leaf"
    if kind == "product":
        outer = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        return product(draw(terms(part, pool, depth - 1)) for part in (outer, size // outer))
    if kind == "concatenation":
        first = draw(st.integers(1, size - 1))
        return concatenation(draw(terms(part, pool, depth - 1)) for part in (first, size - first))
    known = pool.setdefault(size, [])
    if known and draw(st.booleans()):
        return draw(st.sampled_from(known))
    known.append(leaf(size))
    return known[-1]


@st.composite
def equal_sizes(draw: Any) -> tuple[Term, Term]:
    pool: dict[int, list[Term]] = {}
    first = draw(terms(pool=pool))
    return first, draw(terms(first.size, pool=pool))


@given(terms(), st.data())
def test_split_is_the_inverse_of_product(term: Term, data: Any) -> None:
    inner = data.draw(st.sampled_from([n for n in range(1, term.size + 1) if term.size % n == 0]))
    algebra = Algebra()
    halves = algebra.split(term, term.size // inner, inner)
    if halves is not None and not algebra.conflicts:
        assert (find(halves[0]).size, find(halves[1]).size) == (term.size // inner, inner)
        assert places(term) == places(product(halves))


@given(terms(), st.data())
def test_cut_is_a_slice(term: Term, data: Any) -> None:
    start = data.draw(st.integers(0, term.size))
    stop = data.draw(st.integers(start, term.size))
    algebra = Algebra()
    piece = algebra.cut(term, start, stop)
    algebra.settle()
    assert find(piece).size == stop - start
    if all(Event.CUT not in axis.events for axis in (*leaves(term), *leaves(piece))):
        assert places(piece) == places(term)[start:stop]
    else:
        kept = {find(axis).id for axis in leaves(term)}  # segments that the cut did not touch
        assert all(Event.CUT in axis.events or find(axis).id in kept for axis in leaves(piece))


@example(product([concatenation([leaf(1), leaf(1)]), concatenation([leaf(1), leaf(1)])]), [1])
@given(terms(), st.lists(st.integers(0, 24), max_size=4))
def test_pieces_put_together_are_the_whole(term: Term, points: list[int]) -> None:
    algebra = Algebra()
    edges = sorted({0, term.size, *(min(point, term.size) for point in points)})
    pieces = [algebra.cut(term, low, high) for low, high in zip(edges, edges[1:], strict=False)]
    algebra.settle()
    marked = [axis for whole in (term, *pieces) for axis in leaves(whole) if Event.CUT in axis.events]
    if not marked:  # (axes of one unit bear no marks; pieces of what is made of them do)
        assert places(concatenation(pieces)) == places(term)


@settings(max_examples=300)
@given(equal_sizes())
def test_unified_terms_are_equal_or_marked(pair: tuple[Term, Term]) -> None:
    algebra = Algebra()
    algebra.unify(*pair)
    algebra.settle()
    if algebra.conflicts or any(Event.CUT in axis.events for term in pair for axis in leaves(term)):
        return
    assert places(pair[0]) == places(pair[1])


def outcome(first: Term, second: Term, watched: list[Term]) -> tuple[bool, list[Any]]:
    """Unify, then spell out what became of everything, with axes numbered by first appearance."""
    algebra = Algebra()
    algebra.unify(first, second)
    numbers: dict[int, int] = {}
    spelled = [
        [[(numbers.setdefault(axis, len(numbers)), index) for axis, index in place] for place in places(term)]
        for term in watched
    ]
    return bool(algebra.conflicts), spelled


@settings(max_examples=300)
@given(equal_sizes())
def test_unify_does_not_care_which_comes_first(pair: tuple[Term, Term]) -> None:
    watched = [*leaves(pair[0]), *leaves(pair[1])]
    one, other = copy.deepcopy((pair, watched)), copy.deepcopy((pair, watched))
    forward, backward = outcome(*one[0], one[1]), outcome(other[0][1], other[0][0], other[1])
    assert forward[0] == backward[0]
    if not forward[0]:
        assert forward[1] == backward[1]


@given(terms(), st.sampled_from([2, 3]), st.data())
def test_layout_holds_the_rows_of_each_rank(term: Term, tp: int, data: Any) -> None:
    split = {axis.id for axis in leaves(term) if axis.size % tp == 0 and data.draw(st.booleans())}
    text = layout(term, lambda axis: "!" if axis.id in split else None)
    parsed = Layout.parse(text)
    sizes = {axis.id: axis.size for axis in leaves(term)}
    for rank in range(tp):
        mine = [
            row
            for row, place in enumerate(places(term))
            if all(index // (sizes[axis] // tp) == rank for axis, index in place if axis in split)
        ]
        assert list(parsed.rows(rank, tp)) == mine


def test_layout_merges_what_is_whole() -> None:
    heads, width, groups = leaf(4), leaf(16), leaf(8)
    packed = concatenation([product([heads, width]), groups, ONE])
    assert layout(packed, lambda axis: None) == "73"
    assert layout(packed, lambda axis: "!" if axis is heads else None) == "4!*16|8|1"
    assert layout(packed, lambda axis: "!2@2" if axis is groups else None) == "64|8!2@2|1"
    assert layout(product([leaf(2), packed]), lambda axis: "!" if axis is heads else None) == "2*(4!*16|8|1)"


def test_show_names_axes() -> None:
    heads, width = leaf(4), leaf(16)
    term = product([concatenation([heads, ONE]), width])
    assert show(term, {heads: "heads", width: "width"}) == "(heads:4|1)*width:16"


def test_refining_a_shared_axis_shows_everywhere() -> None:
    algebra = Algebra()
    axis = leaf(12)
    rows, columns = product([leaf(2), axis]), concatenation([axis, leaf(3)])
    algebra.split(axis, 3, 4)
    assert [part.size for part in factors(rows)] == [2, 3, 4]
    assert [part.size for part in factors(segments(columns)[0])] == [3, 4]


def test_equal_segments_are_rows_of_a_product() -> None:
    algebra = Algebra()
    one, two, three = leaf(8), leaf(8), leaf(8)
    which, row = leaf(3), leaf(8)
    algebra.unify(concatenation([one, two, three]), product([which, row]))
    assert find(one) is find(two) is find(three) is find(row)
    assert leaves(which) == []  # three places, no axis: nothing there can be sharded
    assert not algebra.conflicts


def test_grouped_query_heads_are_read_off() -> None:
    """(KV·g·d | KV·d | KV·d) meets KV x (g + 2) x d from neither side; each segment meets its own view."""
    algebra = Algebra()
    fused = leaf(64)
    query, key, value = (algebra.cut(fused, low, high) for low, high in ((0, 32), (32, 48), (48, 64)))
    heads, width = algebra.split(query, 4, 8)  # type: ignore[misc]
    shared, same_width = algebra.split(key, 2, 8)  # type: ignore[misc]
    algebra.unify(width, same_width)
    algebra.unify(heads, product([shared, leaf(2)]))
    algebra.unify(key, value)
    assert layout(fused, lambda axis: "!" if axis is find(shared) else None) == "2!*16|2!*8|2!*8"


@pytest.mark.parametrize(("left", "right"), [((6, 4), (4, 6)), ((3, 5), (5, 3))])
def test_what_cannot_be_one_is_a_conflict_on_both_sides(left: tuple[int, int], right: tuple[int, int]) -> None:
    algebra = Algebra()
    algebra.place = (7, "add", "block")
    first, second = product(map(leaf, left)), product(map(leaf, right))
    axes = [*leaves(first), *leaves(second)]
    algebra.unify(first, second)
    algebra.settle()
    assert [(c.op, c.name, c.module) for c in algebra.conflicts] == [(7, "add", "block")]
    assert all(Event.CLASH in inner.events for axis in axes for inner in leaves(axis))


def test_events_sink_to_axes_that_appear_later() -> None:
    algebra = Algebra()
    whole, other = leaf(12), leaf(12)
    algebra.mark(whole, Event.SOFTMAX)
    algebra.unify(whole, other)
    outer, inner = algebra.split(other, 3, 4)  # type: ignore[misc]
    piece = algebra.cut(inner, 0, 1)
    algebra.settle()
    assert outer.events == {Event.SOFTMAX} and "softmax" in leaves(inner)[0].events
    assert find(piece).size == 1 and not ONE.events


def test_input_axes_pass_on_and_stay_whole() -> None:
    algebra = Algebra()
    batch, rows = leaf(6, data=True), product([leaf(2), leaf(3)])
    algebra.unify(rows, batch)
    assert is_data(rows) and all(axis.data for axis in leaves(rows))
    piece = algebra.cut(rows, 1, 5)
    assert is_data(piece) and find(piece).size == 4
    positions = concatenation([ONE] * 5)  # one by one along an input axis
    algebra.unify(leaf(5, data=True), positions)
    assert is_data(positions)


def test_long_chains_need_no_recursion_and_little_time() -> None:
    algebra = Algebra()
    grown = leaf(2)
    for _ in range(3000):
        grown = concatenation([grown, leaf(2)])
    algebra.mark(grown, Event.NORM)
    algebra.settle()
    assert len(leaves(grown)) == 3001
    marked = leaves(grown)[-1]
    assert layout(grown, lambda axis: "!" if axis is marked else None).endswith("|2|2!")
    linked = [leaf(2) for _ in range(5000)]
    for before, after in zip(linked, linked[1:], strict=False):
        algebra.unify(before, after)
    assert len({find(term).id for term in linked}) == 1


def test_a_row_of_too_many_slices_is_given_up_aloud() -> None:
    algebra = Algebra()
    axis = leaf(4 * MOST_SEGMENTS)
    pieces = [algebra.cut(axis, 2 * k, 2 * k + 2) for k in range(2 * MOST_SEGMENTS)]
    algebra.settle()
    assert len(segments(axis)) <= MOST_SEGMENTS + 2
    assert Event.CUT in pieces[-1].events and Event.CUT in leaves(axis)[0].events


def test_every_event_is_either_allowed_or_not() -> None:
    allowed = set(Event) - FORBIDDING
    assert {Event.CONTRACT_W, Event.BATCH_A, Event.NORM, Event.CONST, Event.RANDOM} <= allowed
    assert {Event.OPAQUE, Event.CLASH, Event.CUT, Event.BADVIEW, Event.CONTRACT_MIXED} <= FORBIDDING
    assert len({event.value for event in Event}) == len(list(Event))
