"""head-counts: an integer in the model's own code and the split disagree.

`view(b, t, self.num_heads, head_dim)` on a rank with half of the heads raises, or runs and is wrong; so do heads that
were halved although the projection stayed whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import EXACT_ALONE, Audited, Weight
from autoplan.common.patterns import matches
from autoplan.values import Finding, IntegerEdit

NAME = "head-counts"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    if subject.plan.plan is not None:
        yield from _ours(subject)
        return
    groups: dict[tuple[str, str, int, int], list[Weight]] = {}
    for edit in subject.solution.runtime.of(IntegerEdit):
        for weight in subject.weights:
            line = weight.said.line
            near = edit.pattern in (weight.module, weight.module.rpartition(".")[0])
            if near and line is not None and weight.said.dim is not None and line.style not in EXACT_ALONE:
                groups.setdefault((line.pattern, edit.name, edit.old, edit.new), []).append(weight)
    told: set[tuple[str, int]] = set()
    for (pattern, attribute, old, new), weights in groups.items():
        if (attribute, old) not in told:  # once, at the first line that splits what the number counts
            told.add((attribute, old))
            module = weights[0].module.rpartition(".")[0]
            text = f"{module} computes with {attribute}={old}, but a rank holds {new}"
            hint = f"set {attribute} to {new} on this module when sharding it"
            yield subject.suspect(NAME, pattern, text, hint, names=[weight.name for weight in weights])


def _ours(subject: Audited) -> Iterator[Finding]:
    """A plan of ours carries its edits: they must be those that its own choices need."""
    if subject.right is None or subject.plan.plan is None:
        return
    have, need = (_by_place(subject, plan.runtime.of(IntegerEdit)) for plan in (subject.plan.plan, subject.right))
    for place in dict.fromkeys([*have, *need]):
        mine, right = have.get(place), need.get(place)
        if mine == right:
            continue
        module, attribute, _ = place
        says = "leaves it unchanged" if mine is None else f"sets it to {mine}"
        must = "it must stay unchanged" if right is None else f"it must be {right}"
        yield subject.suspect(NAME, module, f"{attribute} of {module}: the plan {says}; {must}", "plan again")


def _by_place(subject: Audited, edits: tuple[IntegerEdit, ...]) -> dict[tuple[str, str, int | None], object]:
    return {
        (module, edit.name, edit.index): edit.per_rank or edit.new
        for edit in edits
        for module in subject.modules
        if matches(edit.pattern, module)
    }
