"""runtime: a plan of ours does something else than its choices need.

All that a Plan does on a rank follows from which weights are cut: it is derived again from the plan's own choices, and
what is missing, added or changed (an edited file, another release of the model) is listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from autoplan.check.audit.rows import row_text
from autoplan.check.audit.subject import Audited
from autoplan.common.patterns import matches
from autoplan.values import Boundary, CallRewrite, Finding, ParallelBlock, ParameterRule, SplitLogits, VocabularyTable

NAME = "runtime"
_SAID: dict[type[Any], str] = {
    ParameterRule: "its layout on ranks does not follow from the plan's choices",
    Boundary: "different collectives at module boundaries",
    ParallelBlock: "branches of a block are summed differently",
    VocabularyTable: "the vocabulary's table or head is handled differently",
    SplitLogits: "the vocabulary's table or head is handled differently",
    CallRewrite: "calls inside the module are rewritten differently",
}  # integers have a check of their own (head_counts.py)


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    plan, right = subject.plan.plan, subject.right
    if plan is None:
        return
    if right is None:
        yield Finding(NAME, "warn", "", "no plan can be made from this plan's own choices on this model", "plan again")
        return
    for kind, text in _SAID.items():
        names = dict(subject.parameters if kind is ParameterRule else subject.modules)
        names |= dict(subject.model.named_buffers(remove_duplicate=False))
        items = [p.runtime.parameters if kind is ParameterRule else p.runtime.of(kind) for p in (plan, right)]
        have, need = (_expanded(own, names) for own in items)
        groups: dict[str, list[str]] = {}
        for name in dict.fromkeys([*have, *need]):
            has, needs = have.get(name, set()), need.get(name, set())
            extra, missing = has - needs, needs - has
            if extra or missing:
                parts = [f"it has {item}" for item in sorted(extra)] + [f"it lacks {item}" for item in sorted(missing)]
                groups.setdefault("; ".join(parts[:3]).replace("pattern: '', ", ""), []).append(name)
        for difference, places in groups.items():
            yield subject.suspect(NAME, subject.patterns(places), f"{text}: {difference}", "plan again", names=places)
    for field in ("random", "random_whole", "draws"):
        have, need = getattr(plan.runtime, field), getattr(right.runtime, field)
        if have != need and (field == "draws" or _modules(subject, have) != _modules(subject, need)):
            yield subject.suspect(NAME, "", "random numbers are not drawn as the sharding requires", "plan again")


def _expanded(items: tuple[Any, ...], names: dict[str, Any]) -> dict[str, set[Any]]:
    """Return what is said of each name, by whatever pattern."""
    said: dict[str, set[Any]] = {}
    for item in items:
        for name in names if "*" in item.pattern else (item.pattern,):
            if matches(item.pattern, name):
                text, known = row_text(replace(item, pattern="")), said.setdefault(name, set())
                known.add(f"{text} twice" if text in known else text)
    return said


def _modules(subject: Audited, patterns: tuple[str, ...]) -> set[str]:
    return {name for name in subject.modules for pattern in patterns if matches(pattern, name)}
