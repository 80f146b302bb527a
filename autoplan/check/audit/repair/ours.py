"""A plan of ours that is wrong: what it should have said, from the model, and where it says otherwise.

Everything in such a plan follows from its choices, so it is made again under them; where they cannot be kept, under
those of analysis. Of the plans that pass, the one that differs in the fewest places is the correction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoplan.check.audit.subject import Audited, few
from autoplan.common.errors import AutoplanError
from autoplan.common.options import Wish
from autoplan.common.patterns import best_match, matches
from autoplan.values import Finding, Plan


def candidates(subject: Audited, source: Any) -> tuple[Plan, ...]:
    """Plans that could be meant: the same choices again, and what analysis chooses."""
    from autoplan.planning import draft_plan

    plan = subject.plan.plan
    assert plan is not None
    try:
        wish = Wish(plan.tp_size, plan.ep_size, plan.sequence_parallel, uneven=plan.uneven)
        inferred = draft_plan(source, wish, module=subject.model, captured=subject.extra.get("captured")).plan
    except AutoplanError:
        inferred = None
    return tuple(
        sorted(
            (other for other in (subject.right, inferred) if other is not None and differences(subject, other)),
            key=lambda other: len(differences(subject, other)),
        )
    )


def differences(subject: Audited, other: Plan) -> dict[str, str]:
    """Each module or parameter that the two plans treat otherwise, and how."""
    plan = subject.plan.plan
    assert plan is not None
    apart: dict[str, str] = {}
    for name in subject.modules:
        mine, its = (best_match(p.entries, name) for p in (plan, other))
        if (mine and mine.style) != (its and its.style):
            says, must = mine.style if mine else "whole", its.style if its else "whole"
            apart[name] = f"the plan says {says}, and {must} follows from the model"
    for name in subject.parameters:
        mine_rule, its_rule = (best_match(p.runtime.parameters, name) for p in (plan, other))
        cuts = [(rule.dim, rule.layout) if rule is not None else (None, None) for rule in (mine_rule, its_rule)]
        module = name.rpartition(".")[0]
        if cuts[0] != cuts[1] and module not in apart:
            says, must = ("whole" if dim is None else f"dim {dim}: {layout}" for dim, layout in cuts)
            apart[name] = f"the plan cuts it as {says}, and {must} follows from the model"
    for name in subject.modules:
        done, needed = (_instructions(p, name) for p in (plan, other))
        if done != needed and not any(known == name or known.rpartition(".")[0] == name for known in apart):
            extra, missing = sorted(done - needed), sorted(needed - done)
            parts = [f"it has {text}" for text in extra[:1]] + [f"it lacks {text}" for text in missing[:1]]
            apart[name] = "; ".join(parts)
    return apart


def _instructions(plan: Plan, name: str) -> frozenset[str]:
    return frozenset(
        repr(replace(one, pattern="")).replace("pattern='', ", "")
        for one in plan.runtime.instructions
        if matches(one.pattern, name)
    )


def with_differences(subject: Audited, findings: Sequence[Finding], other: Plan) -> tuple[Finding, ...]:
    """The places in which the plan is wrong, then all else, which follows from them."""
    groups: dict[str, list[str]] = {}
    for name, text in differences(subject, other).items():
        groups.setdefault(text, []).append(name)
    hint = "plan again, or let `autoplan audit --fix -o FILE` write it"
    causes = []
    for text, names in groups.items():
        places = subject.patterns(names)
        causes.append(Finding("runtime", "error", few(places), text, hint, 0, subject.proof(names), places=places))
    rest = [replace(f, kind="follows", hint="") if f.level == "error" and not f.is_consequence else f for f in findings]
    return (*causes, *rest)
