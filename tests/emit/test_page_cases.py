"""Pages that switch between cases, by style alone: sizes of tp, and rows of a choice."""

from __future__ import annotations

from types import SimpleNamespace

from test_pages import Read, estimate, page_of, plan_of

from autoplan.emit.pages.markup import WhatIf
from autoplan.emit.pages.others import choice_page
from autoplan.emit.pages.page import plan_page
from autoplan.values import replace
from autoplan.values.estimate import Row


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
