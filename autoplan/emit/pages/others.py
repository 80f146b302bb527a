"""Pages of an audit, of two plans side by side and of a choice among meshes, and the cells of a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from autoplan.common.patterns import matches
from autoplan.emit.pages.drawing import tone_of
from autoplan.emit.pages.markup import Content, Safe, WhatIf, cases, chooser, el, section, styles, table, written_here
from autoplan.emit.pages.page import (
    block_figure,
    cause_first,
    drawing_section,
    facts,
    findings_section,
    links_of,
    memory_section,
    pictures,
    plan_parts,
    stack,
    verdict,
    whole_page,
)
from autoplan.emit.pages.picture import Block, Box, BoxRow, Scene, branches, findings_about, is_about, scene_of
from autoplan.emit.tables.estimate_table import choice_reasons, row_to_dict
from autoplan.emit.words import bytes_text
from autoplan.values import CutsOf, Drawn, Finding, Plan, Report
from autoplan.values.estimate import Estimate, Row

Cut = tuple[int | None, str]
_TONES = {"wrong": "bad", "costlier": "a6", "dead": "whole"}


def scene_of_side(
    drawn: Drawn, side: CutsOf, other: CutsOf | None = None, words: Mapping[str, str] | None = None,
    findings: Sequence[Finding] = (),
) -> Scene:  # fmt: skip
    """Return the boxes of one side. `other`: the side to compare with; `words`: an audit's verdicts by pattern."""
    blocks = []
    for part in drawn.flow:
        rows = []
        for parent, columns in branches(part):
            boxes = []
            for column in columns:
                named = [(step.rpartition(".")[2], ".".join(filter(None, (part.block, step)))) for step in column]
                placed = (_box(name or path, path, side, other, words or {}, findings) for name, path in named)
                boxes.append(tuple(placed))
            rows.append(BoxRow(parent, tuple(boxes)))
        blocks.append(Block(part.block or "outside blocks", part.blocks, tuple(rows)))
    return Scene(tuple(blocks), ())


def _box(
    name: str, path: str, side: CutsOf, other: CutsOf | None, words: Mapping[str, str], findings: Sequence[Finding]
) -> Box:
    cuts, others = _cuts(side, path), _cuts(other, path) if other is not None else None
    verdicts = list(dict.fromkeys(word for pattern, word in words.items() if is_about(pattern, path)))
    lit = others is not None and cuts != others
    last = max((dim for dim, _ in cuts.values() if dim is not None), default=-1)
    tone = next((_TONES[word] for word in verdicts if word in _TONES), tone_of(last)) + " lit" * lit
    texts = dict.fromkeys(text for _, text in cuts.values())
    lines = (*texts, *(f"plan: {word}" for word in verdicts), *(("differs",) if lit else ()))
    return Box(name, path, lines, findings=findings_about(findings, path), tone=tone)


def _cuts(side: CutsOf, path: str) -> dict[str, Cut]:
    """Return the cut of each parameter of a module."""
    cuts = {}
    for pattern, dim, text in side.cuts:
        module, _, name = pattern.rpartition(".")
        if matches(module, path):
            cuts[name] = (dim, text)
    return cuts


_MOST = 24  # the most rows of a choice that are shown
_CASE = 1000  # offset of row numbers from tp sizes


def report_page(report: Report) -> str:
    """Return the page of an audit, a comparison of two plans, or the outcome of `verify`."""
    model = str(report.details.get("model", "model"))
    return whole_page(f"{model} at tp {report.tp_size}", *audit_parts(report), held={"report": report.to_dict()})


def audit_parts(report: Report) -> list[Content]:
    findings = cause_first(report.findings)
    outcome = str(report.details.get("verdict") or ("no problems were found" if report.ok else "wrong"))
    ran = str(report.details.get("ran", ""))
    bar = el("p", f"{outcome}. {ran}", class_=f"verdict {'ok' if report.ok else 'bad'}", role="status")
    details = report.details
    texts = [str(details["plan"])] if "plan" in details else []
    if "bytes_per_rank" in details:
        stored, least = details["bytes_per_rank"], details["bytes_per_rank_inferred"]
        texts.append(f"{bytes_text(stored)} of weights per rank ({bytes_text(least)} if fully sharded)")
    for side in ("a", "b"):
        if side in details:
            audited = details[side]
            held = bytes_text(audited["bytes_per_rank"])
            texts.append(f"{side}: {audited['plan']}, {audited['ran']}, {held} per rank")
    about = el("ul", *(el("li", text) for text in texts), class_="facts")
    parts: list[Content] = [bar, about, *_drawing(report), findings_section(findings)]
    entries = [(el("code", pattern), word) for pattern, word in report.details.get("verdicts", {}).items()]
    if entries:
        parts.append(section("Entries", "entries", table(("entry", "verdict"), entries, "Results of each")))
    numbers = [("forward", report.forward)] if report.forward is not None else []
    worst = sorted(report.gradients.items(), key=lambda item: -item[1])[:10]
    numbers += [(f"gradient of {name}", error) for name, error in worst]
    if numbers:
        rows = [(name, f"{error:.1e}") for name, error in numbers]
        parts.append(section("Numbers", "numbers", table(("of", "error"), rows, "Largest errors")))
    return parts


def _drawing(report: Report) -> Iterable[Safe]:
    """Yield each kind of block: once, or once for each of two plans, with differences highlighted."""
    drawn = report.drawn
    if drawn is None or not drawn.sides:
        return
    words = report.details.get("verdicts", {})
    findings = cause_first(report.findings)
    sides = drawn.sides
    others = sides[::-1] if len(sides) == 2 else (None,) * len(sides)
    scenes = [scene_of_side(drawn, side, other, words, findings) for side, other in zip(sides, others, strict=True)]
    names = ("a: ", "b: ") if len(sides) == 2 else ("",)
    figures = []
    for place in range(len(drawn.flow)):
        pair = [block_figure(scene.blocks[place], side) for scene, side in zip(scenes, names, strict=True)]
        figures.append(el("div", *pair, class_="blocks pair"))
    about = "Blue boxes are sharded along dim 0, orange along 1, green along 2, grey ones are replicated; a finding's "
    more = "number is shown in the box that it is about." + (
        " Where the plans differ, the box has a thick border." if len(sides) == 2 else ""
    )
    title = "Side by side" if len(sides) == 2 else "What the plan does"
    yield section(title, "drawing", *figures, about=about + more)


def choice_page(choice: Any, plan: Plan | None, what_ifs: Mapping[int, WhatIf] = MappingProxyType({})) -> str:
    """Return the rows of a choice, their memory to one scale, and the first one's plan. `what_ifs`: plans by row."""
    held = {"rows": [row_to_dict(row) for row in choice.rows], "plan": plan.to_dict() if plan is not None else None}
    title = f"{choice.source.name} on {choice.gpus} × {choice.device.name}"
    looked = [_looked_at(choice, what_ifs)] if what_ifs else []
    parts = [*choice_parts(choice), *looked, *(plan_parts(plan) if plan is not None else [])]
    sizes = (plan.ranks,) if plan is not None else ()
    return whole_page(title, *parts, held=held, sizes=(*sizes, *(_CASE + n for n in what_ifs)))


def _looked_at(choice: Any, what_ifs: Mapping[int, WhatIf]) -> Safe:
    """Return one row's memory and drawing, with buttons that switch to other rows."""
    numbers = [_CASE + n for n in what_ifs]
    labels = {_CASE + n: f"{n}. {choice.rows[n - 1]}" for n in what_ifs}
    memory = {_CASE + n: memory_section(case.estimate, choice.memory, alone=False) for n, case in what_ifs.items()}
    drawn = pictures({_CASE + n: case.plan for n, case in what_ifs.items()}, numbers, numbers[0], {})
    about = el("p", "Rows that also shard the sequence are drawn without that.", class_="soft")
    look = chooser(labels, numbers[0], "Look at")
    return section("What if: a row", "row", look, cases(memory, numbers, numbers[0]), about, drawn)


def choice_parts(choice: Any, most: int = _MOST) -> list[Content]:
    state = "ok" if choice.fits else "bad"
    fitting = sum(row.fits for row in choice.rows)
    summary = f"{fitting} of {len(choice.rows)} configurations fit {bytes_text(choice.memory)}."
    bar = el("p", summary, class_=f"verdict {state}", role="status")
    reasons = el("ul", *(el("li", text) for text in choice_reasons(choice)))
    shown = list(choice.rows[:most])
    if choice.nearest is not None and choice.nearest not in shown:
        shown.append(choice.nearest)
    scale = max((row.estimate.peak for row in shown), default=1)
    details = [_row(choice, row, scale) for row in shown]
    return [bar, reasons, section("Configurations", "ways", *details)]


def _row(choice: Any, row: Row, scale: int) -> Safe:
    """Return one configuration: its memory as a bar, and all details on demand."""
    fast = f"{row.estimate.tokens_per_second:,.0f} tokens per second"
    speed = fast if row.fits else f"needs {bytes_text(row.missing)} more"
    head = el("summary", el("b", f"{choice.rows.index(row) + 1}. {row}"), f": {speed}; {row.binds}", el("br"),
              stack(row.estimate, choice.memory, scale))  # fmt: skip
    return el("details", head, memory_section(row.estimate, choice.memory, alone=False))


_ROWS = 6  # of a choice
_HEIGHTS = {"small": 320, "large": 560}


def plan_cell(plan: Plan) -> Safe:
    """Return verdict, drawing, findings; the targets of links are on the page that `plan.report(path)` writes."""
    findings = cause_first(plan.findings)
    scene = scene_of(plan, dict.fromkeys(links_of(plan), ""), findings)
    parts = (verdict(plan.proof), facts(plan), drawing_section(scene), findings_section(findings))
    return _cell(f"{plan.model} at {plan.over.replace('=', ' ')}", "large", *parts)


def report_cell(report: Report) -> Safe:
    return _cell(f"{report.details.get('model', 'report')} at tp {report.tp_size}", "large", *audit_parts(report))


def estimate_cell(estimate: Estimate) -> Safe:
    return _cell(estimate.model, "small", memory_section(estimate))


def choice_cell(choice: Any) -> Safe:
    return _cell(f"{choice.source.name} on {choice.gpus} × {choice.device.name}", "large", *choice_parts(choice, _ROWS))


def _cell(title: str, size: str, *parts: Content) -> Safe:
    head = el("head", el("meta", charset="utf-8"), el("title", title), styles())
    body = el("body", el("header", el("h1", title)), el("main", *parts))
    page = written_here("<!DOCTYPE html>") + el("html", head, body, lang="en")
    look = f"width:100%;height:{_HEIGHTS[size]}px;border:1px solid #8888"
    return el("iframe", srcdoc=page, sandbox="", title=title, style=look)
