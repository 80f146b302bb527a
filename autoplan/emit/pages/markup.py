"""Make HTML and SVG by function calls. Text is escaped unless `el` made it. Pages need neither script nor network.

A page that shows one of several cases (sizes of tp, rows of a choice) holds all of them behind radio buttons; equal
cases are written once.


>>> print(el("p", "a <b>", el("b", "c"), class_="x"))
<p class="x">a &lt;b&gt;<b>c</b></p>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from autoplan.common.errors import AutoplanError
from autoplan.common.files.plain import write_whole
from autoplan.common.options import check_argument
from autoplan.common.patterns import grouped
from autoplan.common.templates import template
from autoplan.values import Plan
from autoplan.values.estimate import Estimate

_VOID = ("meta", "input", "br", "wbr", "rect", "line", "path", "circle")


class Safe(str):
    """Markup that `el` made, or that comes from our own files."""

    __slots__ = ()


Content = str | Safe | None


def el(name: str, /, *content: Content, **attributes: Any) -> Safe:
    """Return one element. `class_` is class, `aria_label` is aria-label; None and False omit an attribute."""
    written = ""
    for key, value in attributes.items():
        if value is not None and value is not False:
            key = key.rstrip("_").replace("_", "-")
            written += f" {key}" if value is True else f' {key}="{escape(_plain(value))}"'
    if name in _VOID and not content:
        return Safe(f"<{name}{written}/>")
    return Safe(f"<{name}{written}>{join(content)}</{name}>")


def join(parts: Iterable[Content]) -> Safe:
    return Safe("".join(part if isinstance(part, Safe) else escape(_plain(part)) for part in parts if part is not None))


def breakable(name: str) -> list[Content]:
    """Return a dotted name that a line may break after a dot or an underscore."""
    pieces = re.split(r"(?<=[._])(?=.)", name)
    return [part for piece in pieces for part in (piece, el("wbr"))][:-1]


def written_here(text: str) -> Safe:
    """Return markup, styles or script of our own source; never use it for text of a model."""
    return Safe(text)


def data(identity: str, value: Any) -> Safe:
    """Return plain data inside a page. No text in it can end the element: `<`, `>` and `&` are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Safe(f'<script type="application/json" id="{escape(identity)}">{text}</script>')


def table(head: Iterable[str], rows: Iterable[Iterable[Content]], caption: str, **attributes: Any) -> Safe:
    """Return a table with a caption; the first cell of a row is its header. It scrolls by itself if it is too wide."""
    top = el("tr", *(el("th", cell, scope="col") for cell in head))
    body = [el("tr", el("th", first, scope="row"), *(el("td", cell) for cell in rest)) for first, *rest in rows]
    element = el("table", el("caption", caption), el("thead", top), el("tbody", *body), **attributes)
    return el("div", element, class_="scroll", tabindex="0", role="region", aria_label=caption)


def section(title: str, identity: str, *content: Content, about: str = "") -> Safe:
    """Return a section of a page under a heading; `about`: a sentence under the heading."""
    introduction = el("p", about, class_="soft") if about else None
    return el("section", el("h2", title, id=identity), introduction, *content, aria_labelledby=identity)


def _plain(value: Any) -> str:
    """Replace control characters, which no page may hold, by the replacement sign."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))


@dataclass(frozen=True)
class WhatIf:
    """The same model at another tp size, or as another row of a choice, and its estimate there."""

    plan: Plan
    estimate: Estimate | None = None


def cases(contents: Mapping[int, Safe], numbers: Sequence[int], own: int) -> Safe:
    """Return `contents` by case; a case without its own shows that of `own`."""
    alike = grouped((contents.get(number, contents[own]), number) for number in numbers)
    if len(alike) < 2:
        return contents[own]
    return join([el("div", content, class_=" ".join(["case", *(f"case-{n}" for n in which)]))
                 for content, which in alike.items()])  # fmt: skip


def chooser(labels: Mapping[int, Content], own: int, title: str) -> Safe:
    """Return buttons, one per case."""
    buttons = [el("label", el("input", type="radio", name="case", id=f"at-{n}", checked=n == own), " ", label)
               for n, label in labels.items()]  # fmt: skip
    return el("fieldset", el("legend", title), *buttons, class_="noprint")


_LIGHT = ("#cfe3fb", "#fbdcc4", "#d3eccb", "#ead7f5", "#fbd3df", "#cdeeee", "#f4e8b4", "#dcdcf7", "#e2e2d5")
_DARK = ("#1d4370", "#6b3d1a", "#275a2b", "#553069", "#6d2740", "#1b5555", "#594d12", "#3b3b80", "#4a4a3d")


def styles(sizes: tuple[int, ...] = ()) -> Safe:
    """Return the styles of a page that can be switched between `sizes` of tp, or between numbered cases."""
    light = ";".join(f"--a{n}:{colour}" for n, colour in enumerate(_LIGHT))
    dark = ";".join(f"--a{n}:{colour}" for n, colour in enumerate(_DARK))
    tones = "".join(
        f".box.a{n} rect,.a{n} .held,.bar.a{n}{{fill:var(--a{n})}}.chip.a{n}{{background:var(--a{n})}}"
        f".edge.cut.a{n}{{stroke:var(--a{n})}}"
        for n in range(len(_LIGHT))
    )
    held = ".held{stroke:var(--ink);stroke-width:.5}.whole .held{fill:var(--line)}.held.fine{fill-opacity:.5}"
    shown = "".join(f"body:has(#at-{n}:checked) .tp-{n}{{display:inline}}" for n in sizes)
    shown += "".join(f"body:has(#at-{n}:checked) .case-{n}{{display:block}}" for n in sizes)
    return written_here(
        f"<style>{template('page.css').replace('LIGHT', light).replace('DARK', dark)}{tones}{held}{shown}</style>"
    )


def script() -> Safe:
    return written_here(f"<script>{template('page.js')}</script>")


def check_page(path: str | PathLike[str]) -> Path:
    """Return the path, if it is valid for a page."""
    check_argument("the page", path, (str, PathLike), "give its path")
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        hint = f"rename it, for example to {target.stem or 'plan'}.html"
        raise AutoplanError(f"{target}: pages end in .html, not {target.suffix or 'no suffix'!r}", hint=hint)
    return target


def write_page(path: str | PathLike[str], page: Callable[[], str]) -> None:
    write_whole(check_page(path), page())
