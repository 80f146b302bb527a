"""Place boxes, edges and texts of a drawing for a given width, and write it as SVG. Type is monospaced, so that extents
are known without a browser.

Weights are drawn to scale at each size of tp: rank 0's shard shaded, packed segments separated by lines.

>>> runs(Layout.parse("32!*128|8!*128"), rank=0, ranks=4)
((0, 1024), (4096, 4352))
>>> segments(Layout.parse("32!*128|8!*128"))
((0, 4096), (4096, 5120))
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby, pairwise
from math import prod, sqrt
from typing import Any

from autoplan.common.errors import AutoplanError
from autoplan.common.layout import Layout
from autoplan.common.patterns import matches
from autoplan.emit.pages.markup import Safe, breakable, el
from autoplan.emit.pages.picture import Axis, Block, Box, BoxRow, Mark
from autoplan.emit.words import bytes_text
from autoplan.values import Entry, Plan

CELL = 0.62  # width of a letter relative to its size, with some room
_LARGE, _SMALL = 13, 11
_LINE = 15
_PAD, _GAP, _MARGIN = 8, 10, 12
_NARROWEST = 90
_EDGE = 12


@dataclass(frozen=True)
class Shape:
    """A box of the drawing, or the frame around some boxes (`frame`)."""

    x: float
    y: float
    width: float
    height: float
    box: Box | None = None

    @property
    def frame(self) -> bool:
        return self.box is None


@dataclass(frozen=True)
class Words:
    """A line of text. `y` is its baseline."""

    x: float
    y: float
    text: str
    size: int
    kind: str
    box: Box | None = None

    @property
    def width(self) -> float:
        return cells(self.text) * self.size * CELL


@dataclass(frozen=True)
class Edge:
    """A line from top to bottom; `kind`: "value", "cut", "partial" or "gradient"."""

    x: float
    top: float
    bottom: float
    kind: str
    axis: int = -1


@dataclass
class Drawing:
    width: float
    height: float = 0.0
    shapes: list[Shape] = field(default_factory=list)
    words: list[Words] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)


def cells(text: str) -> int:
    """Return the width of a text in letters: those of some scripts are two wide."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def wrapped(text: str, width: float, size: int) -> list[str]:
    """Return lines no wider than `width`, broken after a blank, a dot or an underscore if possible."""
    most = max(1, int(width / (size * CELL)))
    lines = [""]
    for piece in re.split(r"(?<=[ ._])", text):
        if cells(lines[-1]) + cells(piece.rstrip()) > most and lines[-1]:
            lines.append("")
        for letter in piece:
            if cells(lines[-1]) + cells(letter) > most:
                lines.append("")
            lines[-1] += letter
    return [line.strip() for line in lines if line.strip()] or [""]


def draw_block(block: Block, width: float) -> Drawing:
    """Draw rows from top to bottom, with neighbours of one parent in a frame with its name."""
    drawing = Drawing(width)
    y = _MARGIN / 2
    for parent, group in groupby(block.rows, key=lambda row: row.parent):
        rows = tuple(group)
        y = _frame(drawing, parent, rows, y)
        if parent and rows[-1] is not block.rows[-1]:  # to the next frame
            last = [edge for edge in drawing.edges if edge.bottom == y]
            kinds = {edge: "value" if edge.kind == "partial" else edge.kind for edge in last}
            drawing.edges += [replace(edge, top=y, bottom=y + _EDGE, kind=kind) for edge, kind in kinds.items()]
        y += _EDGE if parent else 0
    drawing.height = y + _MARGIN / 2
    return drawing


def _frame(drawing: Drawing, parent: str, rows: tuple[BoxRow, ...], y: float) -> float:
    inset = _MARGIN * 2 if parent else _MARGIN
    top = y
    if parent:
        for line in wrapped(parent, drawing.width - 2 * inset, _SMALL):
            drawing.words.append(Words(inset, y + _LINE, line, _SMALL, "parent"))
            y += _LINE
        y += 6
    for row in rows:
        y = _row(drawing, row, inset, y)
    if parent:
        drawing.shapes.append(Shape(_MARGIN, top, drawing.width - 2 * _MARGIN, y - top))
    return y


def _row(drawing: Drawing, row: BoxRow, inset: float, y: float) -> float:
    y = _marks(drawing, [mark for mark in row.marks if mark.before], row, inset, y)
    room = drawing.width - 2 * inset
    in_line = max(1, min(len(row.columns), int((room + _GAP) / (_NARROWEST + _GAP))))
    for start in range(0, len(row.columns), in_line):
        some = row.columns[start : start + in_line]
        each = (room - _GAP * (len(some) - 1)) / len(some)
        ends = []
        for level in range(max(map(len, some))):
            there = [(inset + n * (each + _GAP), column) for n, column in enumerate(some) if level < len(column)]
            if level:
                drawing.edges += [_below(x, y, y + _EDGE, column[level - 1]) for x, column in there]
                y += _EDGE
            tallest = max(_box(drawing, column[level], x, y, each) for x, column in there)
            drawing.shapes += [Shape(x, y, each, tallest, column[level]) for x, column in there]
            y += tallest
            ends += [(x, y, column[level]) for x, column in there if level == len(column) - 1]
        y += _GAP if start + in_line < len(row.columns) else 0
    after = [mark for mark in row.marks if not mark.before]
    if after:
        return _marks(drawing, after, row, inset, y)
    drawing.edges += [_below(x, bottom, y + _EDGE, box) for x, bottom, box in ends]
    return y + _EDGE


def _below(x: float, top: float, bottom: float, box: Box) -> Edge:
    """Return the edge that leaves a box whose left side is at `x`."""
    axis = box.axis.number if box.axis and box.gives == "cut" else -1
    return Edge(max(x, _MARGIN * 2) + 10, top, bottom, box.gives or "value", axis)


def _box(drawing: Drawing, box: Box, x: float, y: float, width: float) -> float:
    """Place the texts of a box; return its height."""
    room = width - 2 * _PAD
    below = y + _PAD / 2
    letter = f"{box.axis.letter} " if box.axis else ""
    for line in wrapped(letter + box.name, room, _LARGE):
        below += _LINE
        drawing.words.append(Words(x + _PAD, below, line, _LARGE, "name", box))
    texts = [*box.lines, *([f"finding {', '.join(map(str, box.findings))}"] if box.findings else [])]
    for place, text in enumerate(texts):
        kind = "pin" if box.findings and place == len(texts) - 1 else "line"
        for line in wrapped(text, room, _SMALL):
            below += _LINE
            drawing.words.append(Words(x + _PAD, below, line, _SMALL, kind, box))
    return below + _PAD - y


def _marks(drawing: Drawing, marks: list[Mark], row: BoxRow, inset: float, y: float) -> float:
    """Draw the edge above or below a row, with the collectives on it as text; nothing without one."""
    if not marks:
        return y
    top, x = y, _MARGIN * 2 + 10
    y += _EDGE / 2
    for mark in marks:
        kind = "gradient" if mark.backward else "sum" if mark.partial else "move"
        for line in wrapped(mark.text, drawing.width - x - 14 - inset, _SMALL):
            drawing.words.append(Words(x + 14, y + _LINE - 4, line, _SMALL, kind))
            y += _LINE
    y += _EDGE / 2
    edge = Edge(x, top, y, "value") if marks[0].before else _below(0, top, y, row.columns[0][-1])
    partial = any(mark.partial and not mark.backward for mark in marks)
    drawing.edges.append(replace(edge, kind="partial", axis=-1) if partial else edge)
    if any(mark.backward for mark in marks):
        drawing.edges.append(Edge(x + 6, top, y, "gradient"))
    return y


COLOURS = 9  # further axes differ by their letters only


def tone_of(axis: int) -> str:
    return f"a{axis % COLOURS}" if axis >= 0 else "whole"


def svg_of(drawing: Drawing, label: str, class_: str) -> Safe:
    frames = [_rect(shape, rx=6, class_="frame") for shape in drawing.shapes if shape.frame]
    loose = [_words_svg(words) for words in drawing.words if words.box is None]
    boxes = [_box_svg(shape, drawing) for shape in drawing.shapes if not shape.frame]
    size = {"width": _number(drawing.width), "height": _number(drawing.height)}
    view = f"0 0 {size['width']} {size['height']}"
    edges = [_edge_svg(edge) for edge in drawing.edges]
    return el(
        "svg", *frames, *edges, *loose, *boxes, viewBox=view, **size, class_=class_, role="group", aria_label=label
    )


def _rect(shape: Shape, **attributes: Any) -> Safe:
    sides = {name: _number(getattr(shape, name)) for name in ("x", "y", "width", "height")}
    return el("rect", **sides, **attributes)


def _edge_svg(edge: Edge) -> Safe:
    x, tone = _number(edge.x), f" {tone_of(edge.axis)}" if edge.axis >= 0 else ""
    kind = f"edge {edge.kind}{tone}"
    return el("line", x1=x, x2=x, y1=_number(edge.top), y2=_number(edge.bottom), class_=kind)


def _words_svg(words: Words) -> Safe:
    return el("text", words.text, x=_number(words.x), y=_number(words.y), class_=f"t{words.size} {words.kind}")


def _box_svg(shape: Shape, drawing: Drawing) -> Safe:
    box = shape.box
    assert box is not None
    tone = box.tone or (tone_of(box.axis.number) if box.axis else "whole")
    inside = (w for w in drawing.words if w.box is box and shape.x <= w.x <= shape.x + shape.width)
    texts = [_words_svg(w) for w in inside if shape.y <= w.y <= shape.y + shape.height]
    label = f"{box.path}: {', '.join(box.lines)}"
    pinned = " pinned" if box.findings else ""
    group = el("g", el("title", label), _rect(shape, rx=4), *texts, class_=f"box {tone}{pinned}", data_path=box.path)
    return el("a", group, href=f"#{box.link}", aria_label=label) if box.link else group


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


Run = tuple[int, int]
MOST = 96  # runs; a finer pattern is hatched


def runs(layout: Layout, rank: int, ranks: int) -> tuple[Run, ...] | None:
    """Return (start, stop) of the rows of a rank; None if there are more than `MOST`."""
    rank_runs = layout.runs(rank, ranks)
    return tuple((run.start, run.stop) for run in rank_runs) if len(rank_runs) <= MOST else None


def segments(layout: Layout) -> tuple[Run, ...]:
    """Return (start, stop) of each packed segment; a single one if nothing is packed."""
    if layout.kind != "concatenation":
        return ((0, layout.size),)
    ends = accumulate((part.size for part in layout.parts), initial=0)
    return tuple(pairwise(ends))


def divides(layout: Layout, ranks: int) -> bool:
    """Return whether each sharded factor is divisible by its number of ranks."""
    if layout.split is not None:
        return layout.size % (layout.split[0] or ranks) == 0
    return all(divides(part, ranks) for part in layout.parts)


_SIDE = 120.0  # length of the longest dim
_LEAST = 6.0


@dataclass(frozen=True)
class Weight:
    """One cut parameter of an entry. `shape` is empty if the plan does not record it."""

    entry: Entry
    parameter: str
    dim: int
    layout: Layout
    shape: tuple[int, ...]
    bytes: int = 0  # in all blocks; 0 if the plan does not record the shapes

    @property
    def sides(self) -> tuple[int, int]:
        """Return (the cut dim, the longest other one)."""
        others = [size for place, size in enumerate(self.shape) if place != self.dim]
        return self.layout.size, max(others, default=1)

    @property
    def upright(self) -> bool:
        """Return whether the cut dim is vertical. The last dim is horizontal, as matrices are written."""
        return len(self.shape) < 2 or self.dim != len(self.shape) - 1


def weights_of(plan: Plan) -> tuple[Weight, ...]:
    weights = []
    for entry in plan.entries:
        shapes = {name: _shape(plan, entry.pattern, name) for name in entry.parameters}
        numbers = sum(map(prod, shapes.values())) if all(shapes.values()) else 0
        for parameter, segment in zip(entry.parameters, entry.segments, strict=False):
            dim, _, text = segment.partition(":")
            try:
                layout = Layout.parse(text)
            except AutoplanError:  # another system's notation, which `explain` shows unchanged
                continue
            if dim.isdigit() and layout.is_split:
                shape = shapes[parameter]
                held = entry.bytes * prod(shape) // numbers if numbers else 0 if len(shapes) > 1 else entry.bytes
                weights.append(Weight(entry, parameter, int(dim), layout, shape, held))
    return tuple(weights)


def _shape(plan: Plan, module: str, parameter: str) -> tuple[int, ...]:
    for sizes in plan.made_for.sizes:
        if sizes.pattern in (module, f"{module}.{parameter}") or matches(f"{module}.{parameter}", sizes.pattern):
            return sizes.shapes[0]
    return ()


def weight_figure(weight: Weight, axis: Axis | None, longest: int, sizes: Iterable[int]) -> Safe:
    """Return a figure with its caption; `longest`: rows of the longest dim on the page."""
    cut, other = weight.sides
    along, across = (max(_LEAST, _SIDE * sqrt(size / longest)) for size in (cut, other))
    width, height = (across, along) if weight.upright else (along, across)
    tone = tone_of(axis.number) if axis else "whole"
    outline = el("rect", x=1, y=1, width=_number(width), height=_number(height), class_="outline")
    pieces = [_held(weight, size, along, width, height) for size in sizes]
    parts = [_line(stop / cut * along, width, height, weight.upright) for _, stop in segments(weight.layout)[:-1]]
    shape = " × ".join(map(str, weight.shape)) or f"{cut} along dim {weight.dim}"
    pattern = weight.entry.pattern
    name = pattern if pattern.endswith(weight.parameter) else f"{pattern}.{weight.parameter}"
    label = f"{name}: {shape}, {weight.layout} along dim {weight.dim}"
    size = {"width": _number(width + 2), "height": _number(height + 2)}
    view = f"0 0 {size['width']} {size['height']}"
    svg = el("svg", el("title", label), outline, *pieces, *parts, viewBox=view, **size, class_=tone, role="img")
    letter = el("b", f"{axis.letter} ") if axis else None
    size_of = bytes_text(weight.bytes) if weight.bytes else None
    caption = el("figcaption", letter, el("code", *breakable(name)), el("br"), shape, el("br"), size_of)
    return el("figure", svg, caption)


def _held(weight: Weight, ranks: int, along: float, width: float, height: float) -> Safe:
    """Return rank 0's shard at one size. A pattern too fine to draw is hatched."""
    chosen = f"tp tp-{ranks}"
    if not divides(weight.layout, ranks):
        return el("g", class_=chosen)
    stretches = runs(weight.layout, 0, ranks)
    if stretches is None:
        return el("rect", x=1, y=1, width=_number(width), height=_number(height), class_=f"{chosen} held fine")
    scale, rects = along / weight.layout.size, []
    for start, size in ((1 + start * scale, (stop - start) * scale) for start, stop in stretches):
        x, y, wide, high = (1.0, start, width, size) if weight.upright else (start, 1.0, size, height)
        rects.append(_rect(Shape(x, y, wide, high), class_="held"))
    return el("g", *rects, class_=chosen)


def _line(at: float, width: float, height: float, upright: bool) -> Safe:
    if upright:
        return el("line", x1=1, x2=_number(width + 1), y1=_number(at + 1), y2=_number(at + 1), class_="part")
    return el("line", x1=_number(at + 1), x2=_number(at + 1), y1=1, y2=_number(height + 1), class_="part")
