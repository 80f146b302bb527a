"""The same parts, small, in a notebook: each in a frame of its own, where its styles touch nothing else and no script
runs."""

from __future__ import annotations

from typing import Any

from autoplan.emit.pages.markup import Content, Safe, el, written_here
from autoplan.emit.pages.memory import memory_section
from autoplan.emit.pages.others import audit_parts, choice_parts
from autoplan.emit.pages.page import cause_first, links_of
from autoplan.emit.pages.picture import scene_of
from autoplan.emit.pages.sections import drawing_section, facts, findings_section, verdict
from autoplan.emit.pages.style import styles
from autoplan.values import Plan, Report
from autoplan.values.estimate import Estimate

_ROWS = 6  # of a choice
_HEIGHTS = {"small": 320, "large": 560}


def plan_cell(plan: Plan) -> Safe:
    """Verdict, drawing, findings; what a box links to is on the page that `plan.report(path)` writes."""
    findings = cause_first(plan.findings)
    scene = scene_of(plan, dict.fromkeys(links_of(plan), ""), findings)
    parts = (verdict(plan.proof), facts(plan), drawing_section(scene), findings_section(findings))
    return _cell(f"{plan.model} at tp {plan.tp_size}", "large", *parts)


def report_cell(report: Report) -> Safe:
    return _cell(f"{report.details.get('model', 'report')} at tp {report.tp_size}", "large", *audit_parts(report))


def estimate_cell(found: Estimate) -> Safe:
    return _cell(found.model, "small", memory_section(found))


def choice_cell(choice: Any) -> Safe:
    return _cell(f"{choice.source.name} on {choice.gpus} × {choice.device.name}", "large", *choice_parts(choice, _ROWS))


def _cell(title: str, size: str, *parts: Content) -> Safe:
    head = el("head", el("meta", charset="utf-8"), el("title", title), styles())
    page = written_here("<!DOCTYPE html>") + el(
        "html", head, el("body", el("header", el("h1", title)), el("main", *parts)), lang="en"
    )
    look = f"width:100%;height:{_HEIGHTS[size]}px;border:1px solid #8888"
    return el("iframe", srcdoc=page, sandbox="", title=title, style=look)
