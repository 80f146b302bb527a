"""Weights drawn to scale at each size of tp: rank 0's shard shaded, packed segments separated by lines.


>>> runs(Layout.parse("32!*128|8!*128"), rank=0, ranks=4)
((0, 1024), (4096, 4352))
>>> segments(Layout.parse("32!*128|8!*128"))
((0, 4096), (4096, 5120))
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt

from autoplan.common.errors import AutoplanError
from autoplan.common.layout import Layout
from autoplan.common.patterns import matches
from autoplan.emit.pages.drawing import tone_of
from autoplan.emit.pages.markup import Safe, el
from autoplan.emit.pages.picture import Axis
from autoplan.emit.words import bytes_text
from autoplan.values import Entry, Plan

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
    ends = [0]
    for part in layout.parts:
        ends.append(ends[-1] + part.size)
    return tuple(zip(ends, ends[1:], strict=False))


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
        for parameter, segment in zip(entry.parameters, entry.segments, strict=False):
            dim, _, text = segment.partition(":")
            try:
                layout = Layout.parse(text)
            except AutoplanError:  # another system's notation, which `explain` shows unchanged
                continue
            if dim.isdigit() and layout.is_split:
                weights.append(Weight(entry, parameter, int(dim), layout, _shape(plan, entry.pattern, parameter)))
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
    outline = el("rect", x=1, y=1, width=_n(width), height=_n(height), class_="outline")
    held = [_held(weight, size, along, width, height) for size in sizes]
    parts = [_line(stop / cut * along, width, height, weight.upright) for _, stop in segments(weight.layout)[:-1]]
    shape = " × ".join(map(str, weight.shape)) or f"{cut} along dim {weight.dim}"
    name = weight.parameter if weight.entry.pattern.endswith(weight.parameter) else (
        f"{weight.entry.pattern}.{weight.parameter}")  # fmt: skip
    name = weight.entry.pattern if name == weight.parameter else name
    label = f"{name}: {shape}, {weight.layout} along dim {weight.dim}"
    size = {"width": _n(width + 2), "height": _n(height + 2)}
    view = f"0 0 {size['width']} {size['height']}"
    svg = el("svg", el("title", label), outline, *held, *parts, viewBox=view, **size, class_=tone, role="img")
    letter = el("b", f"{axis.letter} ") if axis else None
    caption = el("figcaption", letter, el("code", name), el("br"), shape, el("br"), bytes_text(weight.entry.bytes))
    return el("figure", svg, caption)


def _held(weight: Weight, ranks: int, along: float, width: float, height: float) -> Safe:
    """Return rank 0's shard at one size. A pattern too fine to draw is hatched."""
    chosen = f"tp tp-{ranks}"
    if not divides(weight.layout, ranks):
        return el("g", class_=chosen)
    stretches = runs(weight.layout, 0, ranks)
    if stretches is None:
        return el("rect", x=1, y=1, width=_n(width), height=_n(height), class_=f"{chosen} held fine")
    scale = along / weight.layout.size
    rects = []
    for start, stop in stretches:
        place = {"x": 1.0, "y": 1 + start * scale, "width": width, "height": (stop - start) * scale}
        if not weight.upright:
            place = {"x": 1 + start * scale, "y": 1.0, "width": (stop - start) * scale, "height": height}
        rects.append(el("rect", **{key: _n(value) for key, value in place.items()}, class_="held"))
    return el("g", *rects, class_=chosen)


def _line(at: float, width: float, height: float, upright: bool) -> Safe:
    if upright:
        return el("line", x1=1, x2=_n(width + 1), y1=_n(at + 1), y2=_n(at + 1), class_="part")
    return el("line", x1=_n(at + 1), x2=_n(at + 1), y1=1, y2=_n(height + 1), class_="part")


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
