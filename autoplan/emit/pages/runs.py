"""Which stretches of a dimension a rank holds, without listing every row: what the drawing of a weight shades.

>>> runs(Layout.parse("32!*128|8!*128"), rank=0, ranks=4)
((0, 1024), (4096, 4352))
>>> segments(Layout.parse("32!*128|8!*128"))
((0, 4096), (4096, 5120))
"""

from __future__ import annotations

from autoplan.common.layout import Layout

Run = tuple[int, int]
MOST = 96  # stretches; a finer pattern is drawn as its share


def runs(layout: Layout, rank: int, ranks: int) -> tuple[Run, ...] | None:
    """From and up to which row; None where there are more than `MOST`."""
    found = _runs(layout, rank, ranks)
    return None if found is None else tuple(found)


def segments(layout: Layout) -> tuple[Run, ...]:
    """Where each packed piece begins and ends; one where nothing is packed."""
    if layout.kind != "concatenation":
        return ((0, layout.size),)
    ends = [0]
    for part in layout.parts:
        ends.append(ends[-1] + part.size)
    return tuple(zip(ends, ends[1:], strict=False))


def divides(layout: Layout, ranks: int) -> bool:
    """Does each factor that is cut over all ranks give them equal parts?"""
    if layout.split is not None:
        return layout.size % (layout.split[0] or ranks) == 0
    return all(divides(part, ranks) for part in layout.parts)


def _runs(layout: Layout, rank: int, ranks: int) -> list[Run] | None:
    if not layout.parts:
        if layout.split is None:
            return [(0, layout.size)]
        held = layout.piece(rank, ranks)
        return [(held.start, held.stop)] if held else []
    parts = [_runs(part, rank, ranks) for part in layout.parts]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    return _product(layout, known) if layout.kind == "product" else _concatenation(layout, known)


def _concatenation(layout: Layout, parts: list[list[Run]]) -> list[Run] | None:
    found: list[Run] = []
    offset = 0
    for part, held in zip(layout.parts, parts, strict=True):
        found += [(offset + start, offset + stop) for start, stop in held]
        offset += part.size
    return _merged(found)


def _product(layout: Layout, parts: list[list[Run]]) -> list[Run] | None:
    found: list[Run] | None = [(0, 1)]
    for part, held in zip(layout.parts, parts, strict=True):
        if found is None:
            return None
        if held == [(0, part.size)]:
            found = [(start * part.size, stop * part.size) for start, stop in found]
            continue
        if sum(stop - start for start, stop in found) * len(held) > MOST:
            return None
        rows = [row for start, stop in found for row in range(start, stop)]
        found = _merged([(row * part.size + start, row * part.size + stop) for row in rows for start, stop in held])
    return found


def _merged(found: list[Run]) -> list[Run] | None:
    merged: list[Run] = []
    for start, stop in found:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged if len(merged) <= MOST else None
