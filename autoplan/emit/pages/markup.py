"""HTML and SVG by function calls: what is not made here is text, and text is escaped. So a module called `<script>` is
shown, not run, and no page can forget it.

>>> print(el("p", "a <b>", el("b", "c"), class_="x"))
<p class="x">a &lt;b&gt;<b>c</b></p>
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from typing import Any

_VOID = ("meta", "input", "br", "rect", "line", "path", "circle")


class Safe(str):
    """Markup that `el` made, or that stands in our own files."""

    __slots__ = ()


Content = str | Safe | None


def el(name: str, /, *content: Content, **attributes: Any) -> Safe:
    """One element. `class_` is class, `aria_label` is aria-label; None and False leave an attribute out."""
    said = "".join(
        _attribute(key, value) for key, value in attributes.items() if value is not None and value is not False
    )
    if name in _VOID and not content:
        return Safe(f"<{name}{said}/>")
    return Safe(f"<{name}{said}>{join(content)}</{name}>")


def join(parts: Iterable[Content]) -> Safe:
    return Safe("".join(part if isinstance(part, Safe) else escape(_plain(part)) for part in parts if part is not None))


def written_here(text: str) -> Safe:
    """Markup, styles or script that stand in our own source; never anything of a model."""
    return Safe(text)


def data(identity: str, value: Any) -> Safe:
    """Plain data inside a page. No text in it can end the element: `<`, `>` and `&` are written as escapes."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Safe(f'<script type="application/json" id="{escape(identity)}">{text}</script>')


def table(head: Iterable[str], rows: Iterable[Iterable[Content]], caption: str, **attributes: Any) -> Safe:
    """A table that says what it is of; the first cell of a row names it. It scrolls by itself where it is too wide."""
    top = el("tr", *(el("th", cell, scope="col") for cell in head))
    body = [el("tr", el("th", first, scope="row"), *(el("td", cell) for cell in rest)) for first, *rest in rows]
    made = el("table", el("caption", caption), el("thead", top), el("tbody", *body), **attributes)
    return el("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _attribute(key: str, value: Any) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is True:
        return f" {name}"
    return f' {name}="{escape(_plain(value))}"'


def _plain(value: Any) -> str:
    """Control characters, which no page may hold, as the sign that stands for them."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in str(value))
