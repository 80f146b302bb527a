"""A plan as one HTML file, and its sections, each from values alone. It needs no network and, for reading, no script:
the script searches and opens targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from types import MappingProxyType
from typing import Any

from autoplan.emit.explain import explain
from autoplan.emit.pages.drawing import draw_block, svg_of, tone_of, weight_figure, weights_of
from autoplan.emit.pages.markup import (
    Content,
    Safe,
    WhatIf,
    breakable,
    cases,
    chooser,
    data,
    el,
    join,
    script,
    section,
    styles,
    table,
    written_here,
)
from autoplan.emit.pages.picture import Axis, Block, Scene, axes_of, scene_of
from autoplan.emit.tables.estimate_table import PARTS, equal_blocks, messages_of_a_block, rank_weights, tokens_text
from autoplan.emit.tables.terminal import plan_facts, proof_text
from autoplan.emit.words import LEVELS, bytes_text, count
from autoplan.values import Finding, Plan, Proof, Traffic
from autoplan.values.estimate import Estimate, MemoryParts, mesh_text
from autoplan.values.plain import finite
from autoplan.version import __version__


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
    held = {n: memory_section(case.estimate, memory, alone=False) for n, case in planned.items()}
    estimated = any(case.estimate is not None for case in planned.values())
    memories = section("Memory of a rank", "memory", cases(held, sizes, plan.ranks)) if estimated else None
    parts = plan_parts(plan, memories, planned)
    return whole_page(f"{plan.model} at {plan.over.replace('=', ' ')}", *parts, held=values, sizes=sizes)


def pictures(plans: Mapping[int, Plan], numbers: Sequence[int], own: int, links: dict[str, str]) -> Safe:
    """Return the drawing of each plan; boxes link to explanations on this page."""
    drawn = {}
    for n, plan in plans.items():
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
    messages = {n: _messages(each.communication) for n, each in plans.items()}
    whole = {n: _whole(each) for n, each in plans.items()}  # largest first; after some, the rest on demand
    return [
        verdict(plan.proof),
        facts(plan),
        switch(plans, own),
        after_verdict,
        drawing_section(scene_of(plan, links, findings), pictures(plans, sizes, own, links)),
        weights_section(plans, own),
        section("Communication of a block, and the minimum", "messages", cases(messages, sizes, own)),
        section("Replicated", "whole", cases(whole, sizes, own)),
        sizes_section(plans, own, what_if),
        findings_section(findings),
        explanations(plan, links),
    ]


def whole_page(title: str, *parts: Content, held: dict[str, Any], sizes: tuple[int, ...] = ()) -> str:
    """Return a complete document around `parts`; `held` is the data in it."""
    metas = ({"charset": "utf-8"}, {"name": "viewport", "content": "width=device-width, initial-scale=1"},
             {"name": "color-scheme", "content": "light dark"})  # fmt: skip
    head = el("head", *(el("meta", **meta) for meta in metas), el("title", title), styles(sizes))
    skip = el("a", "To the drawing", href="#drawing", class_="skip")
    top = el("header", el("h1", title))
    made = f"Made by autoplan {__version__}. The data of this page are embedded as JSON."
    footer = el("footer", el("p", made, class_="soft"))
    body = el("body", skip, top, el("main", *parts), footer, data("data", finite(held)), script())
    return written_here("<!DOCTYPE html>\n") + el("html", head, body, lang="en") + "\n"


def cause_first(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Sort findings: causes before consequences, errors before notes."""
    return tuple(sorted(findings, key=lambda finding: (finding.is_consequence, LEVELS.index(finding.level))))


def links_of(plan: Plan) -> dict[str, str]:
    """Return where the page explains a pattern of an entry, or a replicated parameter."""
    links = {entry.pattern: f"e{number}" for number, entry in enumerate(plan.entries)}
    return links | {item.fqn: f"w{number}" for number, item in enumerate(plan.replicated)}


def explanations(plan: Plan, links: dict[str, str]) -> Safe:
    """Return what `explain` says about each entry and each replicated parameter."""
    details = []
    for path, link in links.items():
        text = "\n".join(explain(plan, path).splitlines()[1:])
        details.append(el("details", el("summary", el("code", path)), el("pre", text), id=link, data_path=path))
    return section("Details", "explained", *details)


# The sections: verdict, drawing, weights, messages, memory, replicated, sizes, findings

NO_ESTIMATE = "No step was estimated at this size."
_WIDTH, _HEIGHT = 330.0, 26.0


def memory_section(estimate: Estimate | None, memory: int = 0, *, alone: bool = True) -> Safe:
    """Return the memory as a bar, its parts as a table, and the place of the peak. Not `alone`: without a heading."""
    head = el("h2", "Memory of a rank", id="memory") if alone else None
    if estimate is None:
        return el("section", head, el("p", NO_ESTIMATE, class_="soft"), aria_labelledby="memory")
    where = f"Peak: {bytes_text(estimate.peak)}, in {estimate.phase}, at {estimate.where}."
    on = f"{mesh_text(estimate.mesh)}: micro-batch {estimate.batch} × {tokens_text(estimate)}, {estimate.train}"
    more = f"it needs {bytes_text(estimate.peak - memory)} more"
    room = f"it fits, with {bytes_text(memory - estimate.peak)} left" if estimate.peak <= memory else more
    limit = f" The line is the GPU's {bytes_text(memory)}: {room}." if memory else ""
    rows = [(el("span", f"{n + 1}", class_=f"chip {tone_of(n)}"), PARTS[name], bytes_text(size),
             f"{size / max(estimate.peak, 1):.0%}") for n, name, size in _parts(estimate)]  # fmt: skip
    parts = table(("", "part", "size", "share"), rows, "Composition of the peak")
    bars = [f"{name} ± {bar:.0%} ({against})" for name, bar, against in estimate.bars]
    sure = el("p", f"Uncertainty: {'; '.join(bars)}.", class_="soft") if bars else None
    peak = el("p", where + limit)
    content = (el("p", on, class_="soft"), stack(estimate, memory), peak, parts, sure, _step_messages(estimate))
    return el("section", head, *content, aria_labelledby="memory" if alone else None)


def stack(estimate: Estimate, memory: int = 0, scale: int = 0) -> Safe:
    """Return one bar. `scale`: the bytes of its full width."""
    most = max(scale, memory, estimate.peak, 1) * 1.02
    x = 0.0
    drawn: list[Safe] = []
    for n, name, size in _parts(estimate):
        width = size / most * _WIDTH
        title = el("title", f"{PARTS[name]}: {bytes_text(size)}")
        bar = el("rect", title, x=f"{x:.2f}", y=4, width=f"{width:.2f}", height=18, class_=f"bar {tone_of(n)}")
        wide = width > 10 * len(str(n + 1))
        drawn += [bar, *([el("text", str(n + 1), x=f"{x + 2:.2f}", y=17, class_="t11")] if wide else [])]
        x += width
    if memory:
        at = f"{memory / most * _WIDTH:.2f}"
        drawn.insert(0, el("rect", x=0, y=4, width=at, height=18, class_="room"))
        drawn.append(el("line", x1=at, x2=at, y1=0, y2=_HEIGHT, class_="limit"))
    label = f"{bytes_text(estimate.peak)} at the peak" + (f", of {bytes_text(memory)}" if memory else "")
    view = {"viewBox": f"0 0 {_WIDTH:.0f} {_HEIGHT:.0f}", "width": _WIDTH, "height": _HEIGHT}
    return el("svg", *drawn, **view, role="img", class_="stack", aria_label=label)


def _parts(estimate: Estimate) -> list[tuple[int, str, int]]:
    sizes = [(part.name, getattr(estimate.parts, part.name)) for part in fields(MemoryParts)]
    return [(n, name, size) for n, (name, size) in enumerate(sizes) if size]


def _step_messages(estimate: Estimate) -> Safe:
    rows = [(sent.dim, sent.kind, str(sent.number), bytes_text(sent.bytes)) for sent in estimate.messages]
    sent = table(("over", "message", "number", "bytes"), rows, "Messages of a step") if rows else None
    if estimate.time is None:
        return join([sent])
    bar = next((f" ± {bar:.0%}" for name, bar, _ in estimate.bars if name == "time"), "")
    speed = f"{estimate.tokens_per_second:,.0f} tokens per second"
    sentence = f"A step takes about {estimate.time.total:.3g} s{bar} on {estimate.device}: {speed}."
    return join([sent, el("p", sentence)])


WIDTH = 342.0  # of a block's drawing: a phone's 390 less margins; wider screens show blocks side by side
_SHOWN = 30


def verdict(proof: Proof) -> Safe:
    """Return what was proven, how, at which size; and what was not tried."""
    state = "bad" if proof.failed else "ok" if proof.ok else "open"
    tried = {
        "passed": "A tiny clone gave the same results on simulated ranks.",
        "unasked": "No trial on simulated ranks was requested.",
    }.get(proof.trial.outcome, "")
    text = f"{proof_text(proof).plain.removesuffix('.')}."
    return el("p", text, " ", tried, class_=f"verdict {state}", role="status")


def facts(plan: Plan) -> Safe:
    size, whole = rank_weights(plan)
    texts = [*plan_facts(plan), f"{bytes_text(size)} of weights per rank, {bytes_text(whole)} of it replicated"]
    return el("ul", *(el("li", text) for text in texts if text), class_="facts")


def drawing_section(scene: Scene, drawn: Safe | None = None) -> Safe:
    """Return blocks beside each other, in the order in which they run. `drawn`: pictures of several cases."""
    about = (
        "Data flow from top to bottom, branches side by side. A box's colour and letter name its sharded axis; grey is "
        "replicated. A dashed red edge carries partial sums, all-reduced where it says so."
    )
    turned = el("label", el("input", type="checkbox", id="gradients"), " show communication of gradients")
    search = el("label", "Search ", el("input", type="search", id="search"))
    searching = el("span", search, " ", el("span", id="hits", aria_live="polite"), id="searching", hidden=True)
    tools = el("p", turned, searching, class_="noprint explore")
    shown = picture(scene) if drawn is None else drawn
    return section("One block of each kind", "drawing", legend(scene.axes), tools, shown, about=about)


def picture(scene: Scene) -> Safe:
    return el("div", *(block_figure(block) for block in scene.blocks), class_="blocks")


def legend(axes: Iterable[Axis]) -> Safe:
    items = [el("li", el("span", axis.letter, class_=f"chip {tone_of(axis.number)}"), " ", axis.units) for axis in axes]
    return el("ul", *items, class_="legend", aria_label="Sharded axes")


def block_figure(block: Block, side: str = "") -> Safe:
    """Draw one block. `side`: its plan, if several are side by side."""
    times = f" ×{block.times}" if block.times > 1 else ""
    return el("figure", el("figcaption", side, el("code", block.title), el("b", times)),
              svg_of(draw_block(block, WIDTH), f"{side}{block.title}{times}", "block"))  # fmt: skip


def switch(plans: Mapping[int, Plan], own: int) -> Safe:
    """Return the sizes between which the page can be switched, by style alone."""
    held = {n: bytes_text(rank_weights(plan)[0]) for n, plan in plans.items()}
    sizes = [el("span", f"{size} of weights per rank", class_=f"tp tp-{n}") for n, size in held.items()]
    return join([chooser({n: f"tp {n}" for n in plans}, own, "What if: a rank at"), el("p", *sizes)])


def weights_section(plans: Mapping[int, Plan], own: int) -> Safe:
    drawn = {}
    for n, plan in plans.items():
        axes, weights = axes_of(plan.entries), weights_of(plan)
        longest = max((size for weight in weights for size in weight.sides), default=1)
        figures = [weight_figure(weight, axes.get(weight.entry.pattern), longest, (n,)) for weight in weights]
        drawn[n] = el("div", *figures, class_="weights")
    about = (
        "Shaded: what rank 0 holds; lines separate packed segments, which are sharded separately. Side lengths are "
        "square roots of the sizes."
    )
    return section("Weights, to scale", "weights", cases(drawn, list(plans), own), about=about)


def _messages(traffic: Sequence[Traffic]) -> Safe:
    if not traffic:
        return el("p", "No block communicates.", class_="soft")
    most = max((max(block.moved, block.least) for block in traffic), default=1)
    rows = [_traffic_row(block, most) for block in equal_blocks(traffic)]
    return table(("block", "forward", "backward", "moved", "least", ""), rows, "Bytes per token")


def _traffic_row(traffic: Traffic, most: int) -> list[Content]:
    moved, least = traffic.moved, traffic.least
    ratio = "" if traffic.ratio is None else f"{traffic.ratio:.2f} × the minimum"
    bars = [el("rect", x=0, y=y, width=f"{size / max(most, 1) * 160:.1f}", height=8, class_=f"bar {tone}")
            for y, size, tone in ((1, moved, "a1"), (11, least, "a2"))]  # fmt: skip
    label, view = f"{moved} of {least} bytes", "0 0 160 20"
    svg = el("svg", *bars, viewBox=view, width=160, height=20, role="img", aria_label=label)
    once = f"; once per step {bytes_text(traffic.once)} of gradients of replicated parameters" if traffic.once else ""
    return [el("code", *breakable(traffic.block)), _kinds(traffic.forward), _kinds(traffic.backward) + once,
            bytes_text(moved), join([bytes_text(least), el("br"), ratio]), svg]  # fmt: skip


def _kinds(kinds: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{number} {kind} ({bytes_text(size)})" for kind, (number, size) in kinds.items()) or "nothing"


def _whole(plan: Plan) -> Safe:
    total = bytes_text(sum(item.bytes for item in plan.replicated))
    rows = [(el("code", *breakable(item.fqn)), bytes_text(item.bytes), item.reason)
            for item in sorted(plan.replicated, key=lambda item: -item.bytes)]  # fmt: skip
    head = ("parameter", "bytes", "why")
    shown = table(head, rows[:_SHOWN], f"{total} on every rank") if rows else el("p", "Nothing.", class_="soft")
    rest = rows[_SHOWN:]
    more = el("details", el("summary", f"{len(rest)} smaller ones"), table(head, rest, "the rest")) if rest else None
    return join([shown, more])


def sizes_section(plans: Mapping[int, Plan], own: int, what_if: Mapping[int, WhatIf]) -> Safe:
    """Return a line for each planned size; its button switches the page to it."""
    peaks = {n: case.estimate.peak for n, case in what_if.items() if case.estimate is not None}
    rows = []
    for n, plan in plans.items():
        size, whole = rank_weights(plan)
        mark = " (this plan)" if n == own else ""
        label = el("label", f"tp {n}{mark}", for_=f"at-{n}")
        peak = [bytes_text(peaks[n]) if n in peaks else "not estimated"] if peaks else []
        share = f"{bytes_text(whole)}, {whole / max(size, 1):.0%}"
        rows.append((label, bytes_text(size), share, messages_of_a_block(plan), *peak))
    others = [str(n) for n in plans[own].legal_tp if n not in plans]
    more = el("p", f"Also valid: {', '.join(others)}.", class_="soft") if others else None
    heads = ("size", "weights per rank", "replicated", "messages of a block", *(["peak of a step"] if peaks else []))
    return section("What if", "sizes", table(heads, rows, "Valid tp sizes"), more)


def findings_section(findings: Sequence[Finding]) -> Safe:
    """Return findings, numbered as in the boxes."""
    if not findings:
        return section("Findings", "findings", about="None.")
    items = [
        el("li", el("b", finding.level), f" {finding.check} · ", el("code", ", ".join(finding.about)),
           f" ({bytes_text(finding.bytes)})" if finding.bytes else "", el("br"), finding.message,
           *([el("pre", finding.proof)] if finding.proof else []),
           *([el("br"), f"→ {finding.hint}"] if finding.hint else []), class_=finding.level)
        for finding in findings
    ]  # fmt: skip
    about = f"{count(len(findings), 'finding')}, causes before consequences."
    return section("Findings", "findings", el("ol", *items, class_="findings"), about=about)
