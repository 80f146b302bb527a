"""Make HTML and SVG by function calls. Text is escaped unless `el` made it. Pages need neither script nor network.

A page that shows one of several cases (sizes of tp, rows of a choice) holds all of them behind radio buttons; equal
cases are written once.


>>> print(el("p", "a <b>", el("b", "c"), class_="x"))
<p class="x">a &lt;b&gt;<b>c</b></p>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

from autoplan.common.errors import AutoplanError
from autoplan.common.files.plain import write_whole
from autoplan.common.options import check_argument
from autoplan.values import Plan
from autoplan.values.estimate import Estimate

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


@dataclass(frozen=True)
class WhatIf:
    """The same model at another size of tp, or as another row of a choice runs it, and what it costs there."""

    plan: Plan
    estimate: Estimate | None = None


def cases(contents: Mapping[int, Safe], numbers: Sequence[int], own: int) -> Safe:
    """`contents` by case; a case without its own shows that of `own`."""
    alike: dict[Safe, list[int]] = {}
    for number in numbers:
        alike.setdefault(contents.get(number, contents[own]), []).append(number)
    if len(alike) < 2:
        return contents[own]
    return join([el("div", content, class_=" ".join(["case", *(f"case-{n}" for n in which)]))
                 for content, which in alike.items()])  # fmt: skip


def chooser(labels: Mapping[int, Content], own: int, title: str) -> Safe:
    """Buttons, one for each case."""
    buttons = [el("label", el("input", type="radio", name="case", id=f"at-{n}", checked=n == own), " ", label)
               for n, label in labels.items()]  # fmt: skip
    return el("fieldset", el("legend", title), *buttons, class_="noprint")


def cases_style(numbers: Sequence[int]) -> Safe:
    return written_here("".join(f"body:has(#at-{n}:checked) .case-{n}{{display:block}}" for n in numbers))


_LIGHT = ("#cfe3fb", "#fbdcc4", "#d3eccb", "#ead7f5", "#fbd3df", "#cdeeee", "#f4e8b4", "#dcdcf7", "#e2e2d5")
_DARK = ("#1d4370", "#6b3d1a", "#275a2b", "#553069", "#6d2740", "#1b5555", "#594d12", "#3b3b80", "#4a4a3d")

_BASE = """
:root{--paper:#fff;--ink:#1b1f24;--soft:#5a636e;--line:#c9d1d9;--whole:#eef0f3;--sum:#c02626;--move:#8a5a00;
--grad:#6b3fa0;--good:#1a7f37;--bad:#c02626;--open:#8a5a00;--lit:#ffdf5d;LIGHT}
@media (prefers-color-scheme:dark){:root{--paper:#12161b;--ink:#e6eaef;--soft:#9aa5b1;--line:#3a434d;--whole:#262c33;
--sum:#ff8080;--move:#e3b341;--grad:#c9a3ff;--good:#5ed37a;--bad:#ff8080;--open:#e3b341;--lit:#8a6d00;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
header,main,footer{max-width:1180px;margin:0 auto;padding:0 16px}
h1{font-size:22px;margin:16px 0 4px;overflow-wrap:anywhere}h2{font-size:18px;margin:28px 0 8px}
code,svg text,pre{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace}
code{overflow-wrap:anywhere;font-size:13px}pre{font-size:13px;white-space:pre-wrap;overflow-wrap:anywhere;margin:4px 0}
.skip{position:absolute;left:-999px}.skip:focus{left:8px;top:8px;background:var(--paper);padding:4px}
a{color:inherit}:focus-visible{outline:3px solid #2f81f7;outline-offset:2px}
.verdict{border-left:6px solid var(--open);padding:8px 12px;background:var(--whole);margin:8px 0;overflow-wrap:anywhere}
.verdict.ok{border-color:var(--good)}.verdict.bad{border-color:var(--bad)}
.facts{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:6px;margin:8px 0}
.facts li{border:1px solid var(--line);border-radius:12px;padding:0 10px;font-size:13px}
.soft,figcaption,caption{color:var(--soft);font-size:13px}caption{text-align:left;padding-bottom:4px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:13px}
th,td{text-align:left;padding:3px 14px 3px 0;vertical-align:top;border-top:1px solid var(--line)}
th[scope=row]{font-weight:600;overflow-wrap:anywhere;min-width:110px}tr.lit th,tr.lit td{background:var(--lit)}
.blocks{display:flex;flex-wrap:wrap;gap:20px;align-items:flex-start}.blocks figure{margin:0}
.blocks figcaption{max-width:360px;overflow-wrap:anywhere;margin-bottom:4px}
.frame{fill:none;stroke:var(--line);stroke-dasharray:3 3}.box rect{fill:var(--whole);stroke:var(--line)}
a:hover .box rect,a:focus .box rect{stroke:var(--ink);stroke-width:2}.box.pinned rect{stroke:var(--bad);stroke-width:2}
.box.bad rect{fill:#f7b2b2}.pair{margin-bottom:20px}
@media (prefers-color-scheme:dark){.box.bad rect{fill:#7a2222}}
.box.lit rect{stroke:#2f81f7;stroke-width:3}.box.dim{opacity:.35}
.t13{font-size:13px;font-weight:600}.t11{font-size:11px}svg text{fill:var(--ink)}
svg .parent,svg .line{fill:var(--soft)}svg .box .line{fill:var(--ink)}svg .pin,svg .sum{fill:var(--sum)}
svg .move{fill:var(--move)}svg .gradient{fill:var(--grad)}
.edge{stroke:var(--soft);stroke-width:2}.edge.partial{stroke:var(--sum);stroke-width:3;stroke-dasharray:4 3}
.edge.cut{stroke-width:5}.edge.gradient{stroke:var(--grad);stroke-dasharray:2 3}
body:not(:has(#gradients:checked)) svg .gradient{display:none}
.legend{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:4px 14px;font-size:13px}
.chip{display:inline-block;min-width:20px;padding:0 5px;border-radius:3px;text-align:center;font-weight:600}
.weights{display:flex;flex-wrap:wrap;gap:14px;align-items:flex-end}.weights figure{margin:0;max-width:170px}
.weights figcaption code{font-size:12px}.outline{fill:var(--whole);stroke:var(--soft)}.part{stroke:var(--ink)}
.tp,.case{display:none}fieldset{border:1px solid var(--line);border-radius:6px;margin:8px 0;font-size:13px}
fieldset label{margin-right:12px;white-space:nowrap}
details{border-top:1px solid var(--line);padding:4px 0}summary{cursor:pointer;overflow-wrap:anywhere}
.error b{color:var(--bad)}.warn b{color:var(--open)}ol.findings li{margin:6px 0;overflow-wrap:anywhere}
input[type=search]{font:inherit;padding:4px 8px;border:1px solid var(--line);border-radius:6px;background:var(--paper);
color:var(--ink);width:min(320px,100%)}
.explore{display:flex;flex-wrap:wrap;gap:4px 24px;align-items:center}.stack{width:100%;max-width:720px;height:auto}
.bar{fill:var(--whole)}.limit{stroke:var(--bad);stroke-width:2}.side{display:grid;gap:20px}
@media(min-width:900px){.side{grid-template-columns:1fr 1fr}}
@media print{:root{--paper:#fff;--ink:#000;--soft:#444;--line:#999;--whole:#eee}.noprint{display:none}
body{font-size:11px}figure,tr,.box{break-inside:avoid}h2{break-after:avoid}.scroll{overflow:visible}}
"""

_SCRIPT = """
(function(){
var open=function(){var id=decodeURIComponent(location.hash.slice(1)),to=id&&document.getElementById(id);
if(to&&to.tagName==='DETAILS'){to.open=true;to.scrollIntoView({block:'nearest'});to.querySelector('summary').focus()}};
addEventListener('hashchange',open);open();
document.addEventListener('click',function(e){var a=e.target.closest&&e.target.closest('a[href^="#"]');
if(a&&a.getAttribute('href')===location.hash)open()});
var field=document.getElementById('search');if(!field)return;
document.getElementById('searching').hidden=false;
var boxes=[].slice.call(document.querySelectorAll('.box'));
var told=[].slice.call(document.querySelectorAll('details[data-path]'));
field.addEventListener('input',function(){var q=field.value.trim().toLowerCase(),n=0;
boxes.forEach(function(b){var hit=q&&b.textContent.toLowerCase().indexOf(q)>=0;
b.classList.toggle('lit',!!hit);b.classList.toggle('dim',!!q&&!hit);if(hit)n++});
told.forEach(function(d){d.hidden=!!q&&d.textContent.toLowerCase().indexOf(q)<0});
document.getElementById('hits').textContent=q?n+' in the drawing, '+told.filter(function(d){return !d.hidden}).length+
' explained below':''});
})();
"""


def styles(sizes: tuple[int, ...] = ()) -> Safe:
    """For a page that can be switched between `sizes` of tp, or between numbered cases."""
    light = ";".join(f"--a{n}:{colour}" for n, colour in enumerate(_LIGHT))
    dark = ";".join(f"--a{n}:{colour}" for n, colour in enumerate(_DARK))
    tones = "".join(
        f".box.a{n} rect,.a{n} .held,.bar.a{n}{{fill:var(--a{n})}}.chip.a{n}{{background:var(--a{n})}}"
        f".edge.cut.a{n}{{stroke:var(--a{n})}}"
        for n in range(len(_LIGHT))
    )
    held = ".held{stroke:var(--ink);stroke-width:.5}.whole .held{fill:var(--line)}.held.fine{fill-opacity:.5}"
    shown = "".join(f"body:has(#at-{n}:checked) .tp-{n}{{display:inline}}" for n in sizes) + cases_style(sizes)
    return written_here(f"<style>{_BASE.replace('LIGHT', light).replace('DARK', dark)}{tones}{held}{shown}</style>")


def script() -> Safe:
    return written_here(f"<script>{_SCRIPT}</script>")


def check_page(path: str | PathLike[str]) -> Path:
    """The path, if a page can have it."""
    check_argument("the page", path, (str, PathLike), "give its path")
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise AutoplanError(
            f"{target}: pages end in .html, not {target.suffix or 'no suffix'!r}",
            hint=f"rename it, for example to {target.stem or 'plan'}.html",
        )
    return target


def write_page(path: str | PathLike[str], page: Callable[[], str]) -> None:
    write_whole(check_page(path), page())
