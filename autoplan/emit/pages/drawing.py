"""A drawing as SVG: boxes that link to their explanation, in colours that style.py gives for light and for dark."""

from __future__ import annotations

from autoplan.emit.pages.geometry import Drawing, Edge, Shape, Words
from autoplan.emit.pages.markup import Safe, el

COLOURS = 9  # after which axes are told apart by their letters alone


def tone_of(axis: int) -> str:
    return f"a{axis % COLOURS}" if axis >= 0 else "whole"


def svg_of(drawing: Drawing, label: str, class_: str) -> Safe:
    frames = [_frame(shape) for shape in drawing.shapes if shape.frame]
    loose = [_words(words) for words in drawing.words if words.box is None]
    boxes = [_box(shape, drawing) for shape in drawing.shapes if not shape.frame]
    size = {"width": _number(drawing.width), "height": _number(drawing.height)}
    view = f"0 0 {size['width']} {size['height']}"
    edges = [_edge(edge) for edge in drawing.edges]
    return el(
        "svg", *frames, *edges, *loose, *boxes, viewBox=view, **size, class_=class_, role="group", aria_label=label
    )


def _frame(shape: Shape) -> Safe:
    return el("rect", x=_number(shape.x), y=_number(shape.y), width=_number(shape.width),
              height=_number(shape.height), rx=6, class_="frame")  # fmt: skip


def _edge(edge: Edge) -> Safe:
    tone = f" {tone_of(edge.axis)}" if edge.axis >= 0 else ""
    return el("line", x1=_number(edge.x), x2=_number(edge.x), y1=_number(edge.top), y2=_number(edge.bottom),
              class_=f"edge {edge.kind}{tone}")  # fmt: skip


def _words(words: Words) -> Safe:
    return el("text", words.text, x=_number(words.x), y=_number(words.y), class_=f"t{words.size} {words.kind}")


def _box(shape: Shape, drawing: Drawing) -> Safe:
    box = shape.box
    assert box is not None
    tone = box.tone or (tone_of(box.axis.number) if box.axis else "whole")
    rect = el("rect", x=_number(shape.x), y=_number(shape.y), width=_number(shape.width),
              height=_number(shape.height), rx=4)  # fmt: skip
    texts = [_words(w) for w in drawing.words if w.box is box and _within(w, shape)]
    said = f"{box.path}: {', '.join(box.lines)}"
    inside = (el("title", said), rect, *texts)
    pinned = " pinned" if box.findings else ""
    made = el("g", *inside, class_=f"box {tone}{pinned}", data_path=box.path)
    return el("a", made, href=f"#{box.link}", aria_label=said) if box.link else made


def _within(words: Words, shape: Shape) -> bool:
    return shape.x <= words.x <= shape.x + shape.width and shape.y <= words.y <= shape.y + shape.height


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")
