"""What a page shows in one case of several (a size of tp, a row of a choice): all stand in it, and a style shows one.

The cases are the ends of radio buttons, so switching needs no script. What is the same in two cases stands once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoplan.emit.pages.markup import Content, Safe, el, join, written_here
from autoplan.values import Plan
from autoplan.values.estimate import Estimate


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
