"""Pages to look at: nothing overlaps, nothing of a model is markup, everything that is linked is there.

The plans are files of six kinds of model, so that no model is built here; `test_pages_in_a_browser.py` opens the pages.
"""

from __future__ import annotations

import json
import time
from functools import cache
from html.parser import HTMLParser
from itertools import combinations
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
from example_plans import llama_plan

import autoplan
from autoplan.common.errors import AutoplanError
from autoplan.common.layout import Layout
from autoplan.emit.pages.drawing import Drawing, Words, cells, draw_block, runs, segments, weights_of, wrapped
from autoplan.emit.pages.markup import WhatIf
from autoplan.emit.pages.others import choice_page, report_page
from autoplan.emit.pages.page import NO_ESTIMATE, cause_first, links_of, plan_page
from autoplan.emit.pages.picture import scene_of
from autoplan.values import CutsOf, Drawn, Finding, FlowPart, Plan, Report, replace
from autoplan.values.estimate import Estimate, MemoryParts, Row, Sent, StepTime

PLANS = Path(__file__).parent / "plans"
KINDS = {
    "llama": "dense",
    "deepseek_v3": "experts",
    "jamba": "hybrid",
    "qwen2_5_vl": "several modalities",
    "t5": "encoder and decoder",
    "plain_torch": "not of transformers",
}
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</script><b>",
    "a&b",
    "\x00\x1b[31m",
    "層" * 90,
)


@cache
def plan_of(name: str) -> Plan:
    return autoplan.load_plan(PLANS / f"{name}.json")


@cache
def page_of(name: str) -> str:
    plan = plan_of(name)
    return plan_page(plan, plan.to_dict())


class Read(HTMLParser):
    """A page as a reader of HTML has it: elements that close in order, their attributes, scripts."""

    VOID = ("meta", "input", "br")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append((self.elements[-1][1], data))

    @property
    def data(self) -> dict:
        return json.loads(next(text for how, text in self.scripts if how.get("type") == "application/json"))


def overlapping(drawing: Drawing) -> list[str]:
    """What stands on something else, or out of its box."""
    boxes = [shape for shape in drawing.shapes if not shape.frame]
    found = [f"{a.box.name} on {b.box.name}" for a, b in combinations(boxes, 2) if _meet(_box(a), _box(b))]
    found += [f"{a.text!r} on {b.text!r}" for a, b in combinations(drawing.words, 2) if _meet(_text(a), _text(b))]
    for words in drawing.words:
        left, top, right, bottom = _text(words)
        if left < 0 or right > drawing.width or top < 0 or bottom > drawing.height:
            found.append(f"{words.text!r} out of the drawing")
        own = [shape for shape in boxes if shape.box is words.box and _holds(_box(shape), _text(words))]
        if words.box is not None and not own:
            found.append(f"{words.text!r} out of its box")
        if words.box is None and any(_meet(_box(shape), _text(words)) for shape in boxes):
            found.append(f"{words.text!r} on a box")
    return found


def _box(shape) -> tuple[float, float, float, float]:
    return shape.x, shape.y, shape.x + shape.width, shape.y + shape.height


def _text(words: Words) -> tuple[float, float, float, float]:
    return words.x, words.y - 0.8 * words.size, words.x + words.width, words.y + 0.2 * words.size


def _meet(a, b) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _holds(outer, inner) -> bool:
    return outer[0] <= inner[0] and outer[1] <= inner[1] and inner[2] <= outer[2] and inner[3] <= outer[3]


@pytest.mark.parametrize("width", [342.0, 700.0])
@pytest.mark.parametrize("name", KINDS, ids=KINDS.get)
def test_nothing_in_a_drawing_overlaps(name: str, width: float) -> None:
    plan = plan_of(name)
    scene = scene_of(plan, links_of(plan), plan.findings)
    drawn = [draw_block(block, width) for block in scene.blocks]
    assert [found for drawing in drawn for found in overlapping(drawing)] == []


def test_the_check_of_overlaps_can_fail() -> None:
    plan = plan_of("llama")
    drawing = draw_block(scene_of(plan, {}).blocks[1], 342.0)
    drawing.words.append(replace(drawing.words[0], x=drawing.words[0].x + 1))
    assert overlapping(drawing)


@pytest.mark.parametrize("name", KINDS, ids=KINDS.get)
def test_a_drawing_shows_every_module_that_is_split_in_the_order_of_the_run(name: str) -> None:
    plan = plan_of(name)
    boxes = [box for block in scene_of(plan, links_of(plan)).blocks for row in block.rows for box in row.boxes]
    linked = {box.link for box in boxes}
    missing = [entry.pattern for entry in plan.entries if links_of(plan)[entry.pattern] not in linked]
    shown = {line for box in boxes for line in box.lines}
    assert [one for one in missing if not any(e.role in shown for e in plan.entries if e.pattern == one)] == []
    ran = [".".join(filter(None, (part.block, step))) for part in plan.flow for step in part.steps]
    assert [box.path for box in boxes] == ran


def test_queries_keys_and_values_stand_side_by_side_and_the_sum_is_marked_with_its_bytes() -> None:
    _, block, _ = scene_of(plan_of("llama"), {}).blocks
    assert block.times == 32
    assert ["q_proj", "k_proj", "v_proj"] in [[box.name for box in row.boxes] for row in block.rows]
    row = next(row for row in block.rows if row.boxes[0].name == "o_proj")
    assert [mark.text for mark in row.marks] == [
        "sum of parts: all-reduce · 32.0 KiB per token"
    ]  # 4096 × 4 bytes, twice


@pytest.mark.parametrize("name", KINDS, ids=KINDS.get)
def test_every_sum_has_its_bytes(name: str) -> None:
    marks = [mark for block in scene_of(plan_of(name), {}).blocks for row in block.rows for mark in row.marks]
    sums = [mark.text for mark in marks if mark.partial and not mark.backward]
    assert sums and [text for text in sums if "B per token" not in text] == []


def test_a_module_with_weights_of_its_own_stands_among_its_modules_and_what_it_makes_is_drawn_as_cut() -> None:
    plan = llama_plan()
    up = next(entry for entry in plan.entries if entry.pattern.endswith("up_proj"))
    scan = [
        replace(up, pattern="layers.*.mixer.inward"),
        replace(up, pattern="layers.*.mixer", parameters=("decay",), style="local"),
        replace(up, pattern="layers.*.mixer.norm", style="distributed_norm"),
        replace(up, pattern="layers.*.mixer.outward", style="rowwise"),
    ]
    part = FlowPart("layers.0", 4, ("mixer.inward", "mixer", "mixer.norm", "mixer.outward"))
    scene = scene_of(replace(plan, entries=tuple(scan), flow=(part,)), {})
    rows = scene.blocks[0].rows
    assert [row.parent for row in rows] == ["mixer"] * 4
    assert [row.boxes[0].gives for row in rows] == ["cut", "cut", "cut", "partial"]


def test_branches_stand_side_by_side_each_above_what_it_alone_feeds() -> None:
    steps = ("norm", "a.q", "a.q_norm", "a.k", "a.k_norm", "a.v", "a.o")
    reads = ((-1,), (0,), (1,), (0,), (3,), (0,), (2, 4, 5))
    plan = replace(plan_of("llama"), entries=(), replicated=(), flow=(FlowPart("layers.0", 2, steps, reads),))
    (block,) = scene_of(plan, {}).blocks
    shown = [[[box.name for box in column] for column in row.columns] for row in block.rows]
    assert shown == [[["norm"]], [["q", "q_norm"], ["k", "k_norm"], ["v"]], [["o"]]]
    drawing = draw_block(block, 342.0)
    assert not overlapping(drawing)
    places = {shape.box.name: (shape.x, shape.y) for shape in drawing.shapes if shape.box}
    assert places["q"][0] == places["q_norm"][0] < places["k"][0] == places["k_norm"][0] < places["v"][0]
    assert places["q"][1] == places["v"][1] < places["q_norm"][1] == places["k_norm"][1] < places["o"][1]


def test_each_kind_of_block_is_drawn_once() -> None:
    kinds = [(block.title, block.times) for block in scene_of(plan_of("jamba"), {}).blocks if block.times > 1]
    assert sum(times for _, times in kinds) == 32 and len(kinds) == 3


def test_a_plan_file_without_an_order_is_drawn_by_its_entries() -> None:
    plan = replace(plan_of("llama"), flow=())
    blocks = scene_of(plan, links_of(plan)).blocks
    assert [block.times for block in blocks] == [1, 32, 1]
    assert not any(overlapping(draw_block(block, 342.0)) for block in blocks)


@pytest.mark.parametrize("name", KINDS, ids=KINDS.get)
def test_a_page_is_one_sound_file_without_network(name: str) -> None:
    page = page_of(name)
    read = Read(page)
    identities = [how["id"] for _, how in read.elements if "id" in how]
    assert len(identities) == len(set(identities))
    for _, how in read.elements:
        assert not {"src", "srcset", "action", "data", "poster"} & set(how)
        if "href" in how:
            assert how["href"].startswith("#") and how["href"][1:] in identities
        if how.get("aria-labelledby"):
            assert how["aria-labelledby"] in identities
        if "for" in how:
            assert how["for"] in identities
    assert "url(" not in page and "@import" not in page and "http://" not in page.replace("http://www.w3.org", "")
    assert read.data["plan"] == json.loads(json.dumps(plan_of(name).to_dict()))


def test_a_large_model_is_a_small_page_made_at_once() -> None:
    plan = plan_of("deepseek_v3")
    start = time.process_time()
    page = plan_page(plan, plan.to_dict())
    assert time.process_time() - start < 2
    assert len(page.encode()) < 500_000


def hostile_plan() -> Plan:
    """A plan all of whose names want to be markup."""
    plan = plan_of("llama")
    entries = tuple(
        replace(entry, pattern=HOSTILE[n % len(HOSTILE)] + str(n), role=HOSTILE[0], units=HOSTILE[1], reason=HOSTILE[2])
        for n, entry in enumerate(plan.entries)
    )
    flow = (FlowPart(HOSTILE[0], 2, HOSTILE), FlowPart("", 1, tuple(entry.pattern for entry in entries)))
    whole = tuple(replace(one, fqn=HOSTILE[0] + str(n), reason=HOSTILE[1]) for n, one in enumerate(plan.replicated))
    told = tuple(Finding(text, "error", text, text, hint=text, proof=text) for text in HOSTILE)
    return replace(plan, model=HOSTILE[0], entries=entries, flow=flow, replicated=whole, findings=told)


def test_what_comes_from_a_model_is_text() -> None:
    plan = hostile_plan()
    page = plan_page(plan, plan.to_dict(), estimate(where=HOSTILE[0]), 80 * 10**9)
    read = Read(page)
    names = {name for name, _ in read.elements}
    assert "img" not in names and not any(key.startswith("on") for _, how in read.elements for key in how)
    assert [how.get("type") for how, _ in read.scripts] == ["application/json", None]
    assert "<script>alert" not in page and "\x00" not in page and "\x1b" not in page
    assert read.data["plan"]["model"] == HOSTILE[0]
    assert not any(overlapping(draw_block(block, 342.0)) for block in scene_of(plan, {}, plan.findings).blocks)
    cell = Read(plan._repr_html_())
    assert [name for name, _ in cell.elements] == ["iframe"]
    assert "<script>alert" not in cell.elements[0][1]["srcdoc"]


@pytest.mark.parametrize(
    "text", ["32!*128", "32!*128|8!*128|8!*128", "(16!|1)*64", "2!2@2*4!2@1*64", "4*8!", "12|4!", "6!*2*3|5"]
)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_stretches_are_the_rows_that_a_rank_holds(text: str, ranks: int) -> None:
    layout = Layout.parse(text)
    for rank in range(ranks):
        found = runs(layout, rank, ranks)
        assert tuple(row for start, stop in found for row in range(start, stop)) == layout.rows(rank, ranks)
    assert segments(layout)[-1][1] == layout.size


def test_a_pattern_finer_than_can_be_drawn_is_said_to_be() -> None:
    assert runs(Layout.parse("4096*2!"), 0, 2) is None


def test_lines_are_never_wider_than_their_room() -> None:
    for text in (*HOSTILE, "a" * 300, "model.layers.0.self_attn.q_proj", ""):
        assert all(cells(line) * 11 * 0.62 <= 100 for line in wrapped(text, 100, 11))
        assert "".join(wrapped(text, 100, 11)).replace(" ", "") == text.replace(" ", "")


def estimate(where: str = "model.layers.3") -> Estimate:
    parts = MemoryParts(weights=3 * 2**30, gradients=2**30, kept=2**29)
    sent = (Sent("tp", "all-reduce", 4, 2**20),)
    return Estimate(
        "model", (("tp", 8),), 1, 2048, "full", parts, where, "backward", sent, 10**12, StepTime(0.5), 2048, "a device",
        (("memory", 0.05, "a tracker"),),
    )  # fmt: skip


def test_memory_is_a_stack_against_the_line_or_left_out() -> None:
    plan = plan_of("llama")
    page = plan_page(plan, plan.to_dict(), estimate(), 4 * 2**30)
    assert "it needs 512.0 MiB more" in page and 'class="limit"' in page and "at model.layers.3" in page
    assert "it fits" in plan_page(plan, plan.to_dict(), estimate(), 8 * 2**30)
    assert 'id="memory"' not in page_of("llama") and 'class="limit"' not in page_of("llama")
    cases = {4: WhatIf(replace(plan, tp_size=4), None)}
    assert NO_ESTIMATE in plan_page(replace(plan, tp_size=8), plan.to_dict(), estimate(), what_if=cases)


def audit_report() -> Report:
    drawn = Drawn(
        (FlowPart("layers.0", 4, ("attention.q", "attention.o")),),
        (
            CutsOf(
                "a",
                (("layers.*.attention.q.weight", 0, "cut along dim 0"), ("layers.*.attention.o.weight", None, "whole")),
            ),
        ),
    )
    follows = Finding("numbers", "error", "", "the output differs", kind="wrong-numbers")
    cause = Finding("pairing", "error", "layers.*.attention.o", "o does not sum", hint="cut o", bytes=4)
    details = {"model": "M", "plan": "a plan", "ran": "wrong on 2 ranks", "verdicts": {"layers.*.attention.o": "wrong"},
               "bytes_per_rank": 8, "bytes_per_rank_inferred": 4}  # fmt: skip
    return Report(False, (follows, cause), tp_size=2, details=details, drawn=drawn)


def test_findings_of_an_audit_stand_at_their_boxes_cause_first() -> None:
    report = audit_report()
    assert [one.check for one in cause_first(report.findings)] == ["pairing", "numbers"]
    page = report_page(report)
    Read(page)
    boxes = [how for name, how in Read(page).elements if how.get("data-path") == "layers.0.attention.o"]
    assert "pinned" in boxes[0]["class"] and "bad" in boxes[0]["class"] and "finding 1" in page
    assert "drawn" not in report.to_dict()


def test_two_plans_stand_side_by_side_with_their_differences_lit() -> None:
    report = audit_report()
    one = report.drawn.sides[0]
    other = CutsOf("b", (one.cuts[0], (one.cuts[1][0], 1, "cut along dim 1")))
    page = report_page(replace(report, details={"model": "M"}, drawn=replace(report.drawn, sides=(one, other))))
    found = [how for _, how in Read(page).elements if how.get("data-path")]
    assert [(how["data-path"][-1], "lit" in how["class"]) for how in found] == [
        ("q", False), ("o", True), ("q", False), ("o", True)]  # fmt: skip


def test_a_choice_shows_its_ways_to_one_scale_and_the_plan_of_the_first() -> None:
    rows = (Row(estimate(), True, False, None, 1, True, "operations"),
            Row(estimate(), False, False, None, 1, False, "memory", 2**30))  # fmt: skip
    choice = SimpleNamespace(
        source=SimpleNamespace(name="M"), gpus=8, memory=4 * 2**30, device=SimpleNamespace(name="GPU"), rows=rows,
        fits=True, nearest=rows[1], elsewhere=(), enough=None, dropped=(), notes=(),
    )  # fmt: skip
    page = choice_page(choice, plan_of("llama"))
    read = Read(page)
    assert len(read.data["rows"]) == 2 and read.data["plan"]["model"] == plan_of("llama").model
    assert page.count('class="limit"') == 4 and "1 of 2 configurations fit" in page


def test_values_write_pages_and_refuse_other_names(tmp_path: Path) -> None:
    plan = plan_of("llama")
    plan.report(tmp_path / "plan.html", estimate=estimate(), memory=80 * 10**9)
    Read((tmp_path / "plan.html").read_text(encoding="utf-8"))
    audit_report().report(tmp_path / "audit.html")
    assert (tmp_path / "audit.html").stat().st_size > 1000
    with pytest.raises(AutoplanError, match=r"pages end in \.html"):
        plan.report(tmp_path / "plan.pdf")
    with pytest.raises(AutoplanError):
        plan.report(tmp_path / "plan.html", estimate=3)
    for value in (plan, audit_report(), estimate()):
        assert value._repr_html_().startswith("<iframe")


def test_each_branch_has_an_edge_and_each_weight_its_own_bytes() -> None:
    plan = plan_of("jamba")
    drawings = [draw_block(block, 342.0) for block in scene_of(plan, {}).blocks]
    for drawing in drawings:
        inner = [shape for shape in drawing.shapes if not shape.frame]
        for shape in inner:
            below = [
                e for e in drawing.edges if shape.x <= e.x <= shape.x + shape.width and e.top == shape.y + shape.height
            ]
            assert below, shape
    weights = weights_of(plan)
    for entry in {weight.entry.pattern: weight.entry for weight in weights}.values():
        own = [weight for weight in weights if weight.entry is entry]
        assert sum(weight.bytes for weight in own) in (0, entry.bytes)
        assert len({weight.bytes / (prod(weight.shape) or 1) for weight in own}) == 1


# Pages that switch between cases, by style alone: sizes of tp, and rows of a choice.


def test_a_page_switches_to_other_sizes_without_script() -> None:
    plan = plan_of("llama")
    other = replace(plan, replicated=(), communication=(), flow=())
    known = {16: WhatIf(other, estimate("elsewhere")), 2: WhatIf(plan, estimate("here"))}
    page = plan_page(plan, plan.to_dict(), estimate("here"), 0, known)
    read = Read(page)
    identities = [how["id"] for _, how in read.elements if "id" in how]
    assert len(identities) == len(set(identities)) and {"at-2", "at-16"} <= set(identities)
    shown = [how["class"].split() for _, how in read.elements if "case" in how.get("class", "").split()]
    assert ["case", "case-16"] in shown  # memory, drawing, weights, messages and what is whole
    assert sum("case-16" in one for one in shown) == 5 == sum("case-2" in one for one in shown)
    assert "body:has(#at-16:checked) .case-16{display:block}" in page
    assert page.count("at elsewhere") == 1 and "peak of a step" in page
    assert "case-16" not in page_of("llama").partition("</style>")[2]  # nothing else is known: nothing to switch


def test_a_choice_switches_between_its_rows() -> None:
    rows = (Row(estimate(), True, False, None, 1, True, "operations"),
            Row(estimate("there"), False, False, None, 1, True, "memory"))  # fmt: skip
    choice = SimpleNamespace(
        source=SimpleNamespace(name="M"), gpus=8, memory=4 * 2**30, device=SimpleNamespace(name="GPU"), rows=rows,
        fits=True, nearest=None, elsewhere=(), enough=None, dropped=(), notes=(),
    )  # fmt: skip
    plan = plan_of("llama")
    known = {1: WhatIf(plan, rows[0].estimate), 2: WhatIf(replace(plan, flow=()), rows[1].estimate)}
    page = choice_page(choice, plan, known)
    read = Read(page)
    identities = [how["id"] for _, how in read.elements if "id" in how]
    assert len(identities) == len(set(identities)) and "at-1002" in identities
    shown = [how["class"] for _, how in read.elements if "case" in how.get("class", "").split()]
    assert shown == ["case case-1001", "case case-1002"] * 2
