"""The cut of a dim whose elements come in blocks: how the blocks lie on ranks, or that a cut falls inside one.

A packed tensor has one element for each `block` elements of a plain weight's dim (a scale for 128 of them, an integer
for eight). Its layout follows from that of the plain dim, if every rank holds whole blocks:

>>> str(in_blocks(Layout.parse("32!*128"), 4, 128)), str(in_blocks(Layout.parse("14336!|14336!"), 8, 128))
('32!', '112!|112!')
>>> str(in_blocks(Layout.parse("32!*64"), 4, 128))  # two heads to a block
'16!'
>>> in_blocks(Layout.parse("768!"), 4, 128) is None  # 192 = 1.5 blocks
True

The last block of a dim may be smaller than the others.
"""

from __future__ import annotations

from math import prod

from autoplan.common.layout import Layout, chunk


def in_blocks(layout: Layout, tp: int, block: int, segments: tuple[int, ...] = ()) -> Layout | None:
    """The layout of the blocks, or None where `tp` ranks would part one.

    `segments`: sizes of the pieces in each of which blocks are counted from its beginning.
    """
    if block == 1:
        return layout
    if len(segments) > 1 and any(size % block for size in segments[:-1]):
        return _segmented(layout, tp, block, segments)
    return _divided(layout, tp, block)


def joined(layouts: tuple[Layout, ...]) -> Layout:
    """The layout of one dim that runs over several, the first of them slowest."""
    return layouts[0] if len(layouts) == 1 else Layout("product", prod(one.size for one in layouts), layouts)


def _segmented(layout: Layout, tp: int, block: int, segments: tuple[int, ...]) -> Layout | None:
    """Blocks that begin anew with each segment: each segment must be a part of the layout."""
    if not layout.is_split:
        return Layout("factor", sum(-(-size // block) for size in segments))
    if layout.kind != "concatenation" or tuple(part.size for part in layout.parts) != segments:
        return None
    return _concatenation([_divided(part, tp, block) for part in layout.parts])


def _divided(layout: Layout, tp: int, block: int) -> Layout | None:
    if not layout.is_split:
        return Layout("factor", -(-layout.size // block))
    if layout.split is not None:
        return _divided_leaf(layout, tp, block)
    if layout.kind == "concatenation":
        if any(part.size % block for part in layout.parts[:-1]):
            return None
        return _concatenation([_divided(part, tp, block) for part in layout.parts])
    last = max(place for place, part in enumerate(layout.parts) if part.is_split)
    before, suffix = layout.parts[:last], prod(part.size for part in layout.parts[last + 1 :])
    inner = _scaled(layout.parts[last], suffix, tp)
    if inner is None or (before and inner.size % block):
        return None
    found = _divided(inner, tp, block)
    if found is None:
        return None
    return joined((*before, found)) if before else found


def _divided_leaf(leaf: Layout, tp: int, block: int) -> Layout | None:
    """Consecutive rows, cut by ceiling: all cuts must fall between blocks, and be those of the blocks cut alike."""
    assert leaf.split is not None
    if leaf.block:
        between = leaf.block % block == 0
        return Layout("factor", -(-leaf.size // block), (), leaf.split, leaf.block // block) if between else None
    pieces = leaf.split[0] or tp
    blocks = -(-leaf.size // block)
    for index in range(pieces):
        rows, held = chunk(leaf.size, pieces, index), chunk(blocks, pieces, index)
        if (rows.start, rows.stop) != (min(held.start * block, leaf.size), min(held.stop * block, leaf.size)):
            return None
    return Layout("factor", blocks, split=leaf.split)


def _scaled(layout: Layout, by: int, tp: int) -> Layout | None:
    """The same dim with `by` elements in place of each, as few factors as possible."""
    if by == 1:
        return layout
    if not layout.parts:
        if layout.split is not None and not layout.block and layout.size % (layout.split[0] or tp):
            return None
        return Layout("factor", layout.size * by, split=layout.split, block=layout.block * by)
    if layout.kind == "concatenation":
        scaled = [_scaled(part, by, tp) for part in layout.parts]
        return _concatenation(scaled)
    return Layout("product", layout.size * by, (*layout.parts, Layout("factor", by)))


def _concatenation(parts: list[Layout | None]) -> Layout | None:
    found = [part for part in parts if part is not None]
    return Layout("concatenation", sum(p.size for p in found), tuple(found)) if len(found) == len(parts) else None
