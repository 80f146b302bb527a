"""Blocks of a dim on ranks: exactly those of the rows that a rank holds, or no layout at all."""

from __future__ import annotations

import pytest

from autoplan.common.layout import Layout, in_blocks

LAYOUTS = ["768!", "32!*128", "32!*64", "96!*(128|64)", "1024!|1024!", "192!|192!", "(16!|1)*64", "8!4@2*2!2@1*64",
           "2880!*2", "2*12!*32", "576", "640!", "3!*256|1*128", "6!*96|6!*96|2!*96", "4*(6!|2)*16",
           "768!~128", "2880!~32", "2*640!~128", "768!~128|768!~128", "(6!~2|1)*64", "5!~1*128"]  # fmt: skip


@pytest.mark.parametrize("text", LAYOUTS)
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
