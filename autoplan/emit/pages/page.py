"""A plan as one HTML file. It needs no network and, for reading, no script: the script searches and opens targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from autoplan.emit.explain import explain
from autoplan.emit.pages.markup import Content, Safe, WhatIf, cases, data, el, script, section, styles, written_here
from autoplan.emit.pages.picture import scene_of
from autoplan.emit.pages.sections import (
    drawing_section,
    facts,
    findings_section,
    memory_section,
    messages_section,
    picture,
    sizes_section,
    switch,
    verdict,
    weights_section,
    whole_section,
)
from autoplan.values import Finding, Plan
from autoplan.values.estimate import Estimate
from autoplan.values.plain import finite
from autoplan.version import __version__

_RANKS = {"error": 0, "warn": 1, "note": 2}


def plan_page(
    plan: Plan,
    data_of: dict[str, Any],
    estimate: Estimate | None = None,
    memory: int = 0,
    what_if: Mapping[int, WhatIf] = MappingProxyType({}),
) -> str:
    """Return the page. `data_of`: the plan as plain data; `memory`: bytes of the GPU; `what_if`: plans at other sizes
    of tp."""
    values = {"plan": data_of, "estimate": None if estimate is None else estimate.to_dict()}
    planned = {**what_if, plan.ranks: WhatIf(plan, estimate)}
    sizes = tuple(sorted(planned))
    parts = plan_parts(plan, memory_cases(planned, memory, sizes, plan.ranks), planned)
    return whole_page(f"{plan.model} at {plan.over.replace('=', ' ')}", *parts, held=values, sizes=sizes)


def memory_cases(known: Mapping[int, WhatIf], memory: int, numbers: Sequence[int], own: int) -> Safe | None:
    """Return the memory of a rank in each case; None if no case has an estimate."""
    if all(case.estimate is None for case in known.values()):
        return None
    sections = {n: memory_section(case.estimate, memory, alone=False) for n, case in known.items()}
    return section("Memory of a rank", "memory", cases(sections, numbers, own))


def pictures(known: Mapping[int, Plan], numbers: Sequence[int], own: int, links: dict[str, str]) -> Safe:
    """Return the drawing of each plan; boxes link to explanations on this page."""
    drawn = {}
    for n, plan in known.items():
        own_links = {path: links.get(path, "") for path in links_of(plan)}
        drawn[n] = picture(scene_of(plan, own_links, cause_first(plan.findings) if n == own else ()))
    return cases(drawn, numbers, own)


def plan_parts(
    plan: Plan, after_verdict: Safe | None = None, what_if: Mapping[int, WhatIf] = MappingProxyType({})
) -> list[Content]:
    """Return all sections of a plan, from the verdict down; some also at other sizes."""
    findings = cause_first(plan.findings)
    links = links_of(plan)
    own = plan.ranks
    plans = dict(sorted({**{n: case.plan for n, case in what_if.items()}, own: plan}.items()))
    sizes = tuple(plans)
    return [
        verdict(plan.proof),
        facts(plan),
        switch(plans, own),
        after_verdict,
        drawing_section(scene_of(plan, links, findings), pictures(plans, sizes, own, links)),
        weights_section(plans, own),
        messages_section(plans, sizes, own),
        whole_section(plans, sizes, own),
        sizes_section(plans, own, what_if),
        findings_section(findings),
        explanations(plan, links),
    ]


def whole_page(title: str, *parts: Content, held: dict[str, Any], sizes: tuple[int, ...] = ()) -> str:
    """Return a complete document around `parts`; `held` is the data in it."""
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        styles(sizes),
    )
    skip = el("a", "To the drawing", href="#drawing", class_="skip")
    top = el("header", el("h1", title))
    footer = el(
        "footer", el("p", f"Made by autoplan {__version__}. The data of this page are embedded as JSON.", class_="soft")
    )
    body = el("body", skip, top, el("main", *parts), footer, data("data", finite(held)), script())
    return written_here("<!DOCTYPE html>\n") + el("html", head, body, lang="en") + "\n"


def cause_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Sort findings: causes before consequences, errors before notes."""
    return tuple(sorted(findings, key=lambda one: (one.is_consequence, _RANKS[one.level])))


def links_of(plan: Plan) -> dict[str, str]:
    """Return where the page explains a pattern of an entry, or a replicated parameter."""
    links = {entry.pattern: f"e{number}" for number, entry in enumerate(plan.entries)}
    return links | {item.fqn: f"w{number}" for number, item in enumerate(plan.replicated)}


def explanations(plan: Plan, links: dict[str, str]) -> Safe:
    """Return what `explain` says about each entry and each replicated parameter."""
    details = [_explained(plan, path, link) for path, link in links.items()]
    return section("Details", "explained", *details)


def _explained(plan: Plan, path: str, link: str) -> Safe:
    text = "\n".join(explain(plan, path).splitlines()[1:])
    return el("details", el("summary", el("code", path)), el("pre", text), id=link, data_path=path)
