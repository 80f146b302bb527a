"""The memory of a rank as a stack, against what the GPU has: one bar for each estimate, all to one scale."""

from __future__ import annotations

from dataclasses import fields

from autoplan.emit.pages.drawing import tone_of
from autoplan.emit.pages.markup import Safe, el, join, table
from autoplan.emit.tables.estimate_table import PARTS, mesh_text
from autoplan.emit.words import bytes_text
from autoplan.values.estimate import Estimate, MemoryParts

NO_ESTIMATE = "No step was estimated at this size."
_WIDTH, _HEIGHT = 330.0, 26.0


def memory_section(found: Estimate | None, memory: int = 0, *, alone: bool = True) -> Safe:
    """The stack, its parts as a table, and where the peak is; a sentence where a page has other estimates.

    Not `alone`: without a heading.
    """
    head = el("h2", "Memory of a rank", id="memory") if alone else None
    if found is None:
        return el("section", head, el("p", NO_ESTIMATE, class_="soft"), aria_labelledby="memory")
    where = f"The peak, {bytes_text(found.peak)}, is reached in the {found.phase}, at {found.where}."
    on = f"{mesh_text(found.mesh)}: micro-batch {found.batch} × {found.sequence} tokens, {found.train}"
    limit = f" The line is the GPU's {bytes_text(memory)}: {_room(found.peak, memory)}." if memory else ""
    rows = [
        (
            el("span", f"{n + 1}", class_=f"chip {tone_of(n)}"),
            PARTS[name],
            bytes_text(size),
            f"{size / max(found.peak, 1):.0%}",
        )
        for n, name, size in _parts(found)
    ]
    parts = table(("", "part", "size", "share"), rows, "What fills it at the peak")
    bars = [f"{name} ± {bar:.0%} ({against})" for name, bar, against in found.bars]
    sure = el("p", f"How sure: {'; '.join(bars)}.", class_="soft") if bars else None
    peak = el("p", where + limit)
    told = (el("p", on, class_="soft"), stack(found, memory), peak, parts, sure, _messages(found))
    return el("section", head, *told, aria_labelledby="memory" if alone else None)


def stack(found: Estimate, memory: int = 0, scale: int = 0) -> Safe:
    """One bar. `scale`: the bytes of its full width."""
    most = max(scale, memory, found.peak, 1) * 1.02
    x = 0.0
    drawn: list[Safe] = []
    for n, name, size in _parts(found):
        width = size / most * _WIDTH
        said = el("title", f"{PARTS[name]}: {bytes_text(size)}")
        bar = el("rect", said, x=f"{x:.2f}", y=4, width=f"{width:.2f}", height=18, class_=f"bar {tone_of(n)}")
        wide = width > 10 * len(str(n + 1))
        drawn += [bar, *([el("text", str(n + 1), x=f"{x + 2:.2f}", y=17, class_="t11")] if wide else [])]
        x += width
    if memory:
        at = f"{memory / most * _WIDTH:.2f}"
        drawn.append(el("line", x1=at, x2=at, y1=0, y2=_HEIGHT, class_="limit"))
    label = f"{bytes_text(found.peak)} at the peak" + (f", of {bytes_text(memory)}" if memory else "")
    view = {"viewBox": f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}", "width": _WIDTH, "height": _HEIGHT}
    return el("svg", *drawn, **view, role="img", class_="stack", aria_label=label)


def _parts(found: Estimate) -> list[tuple[int, str, int]]:
    sizes = [(one.name, getattr(found.parts, one.name)) for one in fields(MemoryParts)]
    return [(n, name, size) for n, (name, size) in enumerate(sizes) if size]


def _room(peak: int, memory: int) -> str:
    return f"it fits, with {bytes_text(memory - peak)} left" if peak <= memory else (
        f"it needs {bytes_text(peak - memory)} more")  # fmt: skip


def _messages(found: Estimate) -> Safe:
    rows = [(one.dim, one.kind, str(one.number), bytes_text(one.bytes)) for one in found.messages]
    sent = table(("over", "message", "number", "bytes"), rows, "Messages of a step") if rows else None
    if found.time is None:
        return join([sent])
    bar = next((f" ± {bar:.0%}" for name, bar, _ in found.bars if name == "time"), "")
    speed = f"{found.tokens_per_second:,.0f} tokens a second"
    told = f"A step takes about {found.time.total:.3g} s{bar} on {found.device}: {speed}."
    return join([sent, el("p", told)])
