"""What is asked of a layout is answered without listing its rows, and the same as by listing them."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from autoplan.common.layout import Layout, chunk, in_blocks
from autoplan.emit.words import layout_text, ranges_text

LAYOUTS = (
    "7", "8!", "7!", "8!~3", "8!*3", "3*8!", "4!*2|2!*2", "(4!|1)*3", "4!|3", "2!2@2*4!2@1*3", "2!2@1*3", "4!2@2",
    "8!~2*3", "4*2", "1!", "(2!*2|3)*2",
)  # fmt: skip


def listed(layout: Layout, tp: int) -> list[tuple[int, ...]]:
    return [rows_of(layout, rank, tp) for rank in range(tp)]


def rows_of(layout: Layout, rank: int, tp: int) -> tuple[int, ...]:
    """What the notation says, index by index."""
    if not layout.parts:
        return tuple(range(layout.size) if layout.split is None else layout.piece(rank, tp))
    rows: tuple[int, ...] = (0,) if layout.kind == "product" else ()
    offset = 0
    for part in layout.parts:
        inner = rows_of(part, rank, tp)
        if layout.kind == "product":
            rows = tuple(row * part.size + i for row in rows for i in inner)
        else:
            rows, offset = rows + tuple(offset + i for i in inner), offset + part.size
    return rows


@pytest.mark.parametrize("tp", [1, 2, 4, 5])
@pytest.mark.parametrize("text", LAYOUTS)
def test_answers_are_those_of_the_list(text: str, tp: int) -> None:
    layout = Layout.parse(text)
    rows = listed(layout, tp)
    assert [layout.rows(rank, tp) for rank in range(tp)] == rows
    everything = [row for held in rows for row in held]
    assert [layout.held(rank, tp) for rank in range(tp)] == [len(held) for held in rows]
    runs = [layout.runs(rank, tp) for rank in range(tp)]
    assert [tuple(row for run in held for row in run) for held in runs] == rows
    assert all(one and one.stop != two.start for held in runs for one, two in pairwise(held))
    assert layout.all_carried() == all(layout.carried(tp))
    assert layout.shared_rows(tp) == (len(everything) != len(set(everything)))
    assert layout.contiguous(tp) == all(rows[rank] == tuple(chunk(layout.size, tp, rank)) for rank in range(tp))
    assert layout.one_run(tp) == (everything == list(range(layout.size)))
    assert not layout.is_split or f"rank 0: {ranges_text(runs[0])}" in layout_text(text, tp)


def test_a_table_of_a_milliard_rows_is_no_list() -> None:
    """Recommenders have such tables; listing a rank's rows would take all memory."""
    began = time.process_time()
    for text in ("1000000000!", "1000000000!*64", "500000000!|500000000!"):
        layout = Layout.parse(text)
        assert layout.held(1, 8) == layout.size // 8
        assert not layout.shared_rows(8) and layout.all_carried()
    assert Layout.parse("1000000000!*64").one_run(8) and not Layout.parse("500000000!|500000000!").one_run(8)
    assert layout_text("500000000!|500000000!", 8).endswith("rank 0: 0–62499999, 500000000–562499999")
    assert layout_text("1000000000!", 8).endswith("rank 0: 0–124999999")
    assert time.process_time() - began < 1


# Blocks of a dim on ranks: exactly those of the rows that a rank holds, or no layout at all.


IN_BLOCKS = ["768!", "32!*128", "32!*64", "96!*(128|64)", "1024!|1024!", "192!|192!", "(16!|1)*64", "8!4@2*2!2@1*64",
           "2880!*2", "2*12!*32", "576", "640!", "3!*256|1*128", "6!*96|6!*96|2!*96", "4*(6!|2)*16",
           "768!~128", "2880!~32", "2*640!~128", "768!~128|768!~128", "(6!~2|1)*64", "5!~1*128"]  # fmt: skip


@pytest.mark.parametrize("text", IN_BLOCKS)
@pytest.mark.parametrize("tp", [2, 4, 8])
@pytest.mark.parametrize("block", [2, 8, 32, 64, 128])
def test_whole_blocks_or_none(text: str, tp: int, block: int) -> None:
    """The law: a rank's blocks are those of its rows, in their order; no layout where one would be parted."""
    layout = Layout.parse(text)
    held = [layout.rows(rank, tp) for rank in range(tp)]
    found = in_blocks(layout, tp, block)
    whole = all(_in_whole_blocks(rows, block, layout.size) for rows in held)
    if found is None:
        assert not whole or _unsaid(text, tp), "a legal cut was refused"
        return
    assert whole and found.size == -(-layout.size // block)
    for rank in range(tp):
        assert list(found.rows(rank, tp)) == list(dict.fromkeys(row // block for row in held[rank]))


def _unsaid(text: str, tp: int) -> bool:
    """Cut unevenly, so that a rank may hold nothing, a product has no exact notation in blocks."""
    return any(
        factor.split is not None and factor.size % (factor.split[0] or tp) for factor in _factors(Layout.parse(text))
    )


def _factors(layout: Layout) -> list[Layout]:
    return [one for part in layout.parts for one in _factors(part)] if layout.parts else [layout]


def _in_whole_blocks(rows: tuple[int, ...], block: int, size: int) -> bool:
    """Each block of which a rank holds a row is there whole and in order."""
    expected = [
        row for first in dict.fromkeys(row // block for row in rows)
        for row in range(first * block, min((first + 1) * block, size))
    ]  # fmt: skip
    return expected == list(rows)


def test_segments_begin_with_a_block_of_their_own() -> None:
    """192 rows of gate and 192 of up, quantised apart in blocks of 128: two blocks each, not three in all."""
    assert in_blocks(Layout.parse("384"), 1, 128, (192, 192)) == Layout.parse("4")
    assert in_blocks(Layout.parse("192!|192!"), 2, 128, (192, 192)) is None
    assert str(in_blocks(Layout.parse("192!|192!"), 2, 96, (192, 192))) == "2!|2!"
    assert in_blocks(Layout.parse("384!"), 2, 128, (192, 192)) is None
