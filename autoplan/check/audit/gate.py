"""Check plans that somebody wrote or edited before they are applied.

A foreign plan is audited first and refused if wrong. A plan of ours that was edited since it was made, or made for
another model (`made_for`), is made once more under its choices, and must be the same in all that steers the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from autoplan.check.audit.auditor import audit_source
from autoplan.check.audit.lines import read_foreign
from autoplan.check.pipeline import TRIED, proven_plan
from autoplan.common.errors import AutoplanError, PlanMismatchError, PlanRefusedError, UnprovenPlanWarning
from autoplan.decide.plan.chosen import choices_of_plan, wish_of_plan
from autoplan.execute.fits import made_anew, made_with, model_hash
from autoplan.execute.tensor_parallel import check_matches
from autoplan.hf.source import Source, resolve
from autoplan.values import Finding, Plan
from autoplan.values.plan import digest, steering

_SHOWN, _SHOWN_PLACES = 5, 3  # findings, and places of a plan


def refuse_wrong(source: Any, plan: Any, tp_size: int) -> tuple[Finding, ...]:
    """Audit a plan in a foreign dialect; raise on errors, return what else was found. Plans of ours pass unseen."""
    foreign = read_foreign(plan, source.module(), source.name)
    if isinstance(foreign, str) or foreign.plan is not None:
        return ()
    report = audit_source(source, plan, tp_size)
    errors = [finding for finding in report.findings if finding.level == "error"]
    if not errors:
        return tuple(finding for finding in report.findings if finding.level == "warn")
    lines = [f"\n    {_line(finding)}" for finding in errors[:_SHOWN]]
    more = f"\n    and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
    raise PlanRefusedError(
        f"{foreign.name} is wrong for {source.name} at tp={tp_size} ({report.details['ran']}); nothing was applied:"
        f"{''.join(lines)}{more}",
        hint="fix it (autoplan.audit(model, plan, tp_size) lists all), or pass check=False: then only its choice "
        "of what to shard is used, and sums, integers and segments come from analysis",
    )


def refuse_disproven(plan: Plan) -> None:
    """A plan of ours says itself whether it failed verification when it was made."""
    errors = [f for f in plan.findings if f.level == "error"]
    if plan.proof.failed or any(f.check == TRIED for f in errors):
        errors = errors or [Finding(TRIED, "error", "", plan.proof.trial.why or plan.proof.text)]
        raise PlanRefusedError(
            f"the plan for {plan.model} at {plan.over} failed verification when it was made; nothing was applied:"
            + "".join(f"\n    {_line(finding)}" for finding in errors[:_SHOWN]),
            hint="replicate the modules named here (overrides={pattern: 'replicate'}), or pass check=False",
        )


def refuse_unproven(plan: Plan) -> None:
    """Raise if the plan is unproven (`strict=True`)."""
    if plan.ranks > 1 and not plan.proof.ok:
        why, hint = _why_unproven(plan)
        text = f"the plan for {plan.model} at {plan.over} is unproven, and strict=True was given: {why}"
        raise PlanRefusedError(f"{text}; nothing was applied", hint=hint)


def warn_unproven(plan: Plan) -> None:
    """Warn that a plan is unproven, unless nobody asked to prove it (`prove="none"`)."""
    if plan.ranks > 1 and plan.proof.was_asked and not (plan.proof.ok or plan.proof.failed):
        why, hint = _why_unproven(plan)
        text = f"the plan for {plan.model} at {plan.over} is unproven: {why}\n  → {hint}"
        warnings.warn(f"{text}; check=False applies it without this warning", UnprovenPlanWarning, stacklevel=3)


def _why_unproven(plan: Plan) -> tuple[str, str]:
    trial = plan.proof.trial
    if trial.outcome == "skipped":
        return f"not verified on simulated ranks: {trial.why}", f"to verify it: {trial.hint}"
    if not plan.proof.was_asked:
        return 'it was made with prove="none"', 'plan with prove="graph" (the default) or "ranks"'
    why = trial.why or plan.proof.text or "the reason was not recorded"
    return why, 'see its findings; autoplan.plan(…, prove="ranks") verifies more'


def _line(finding: Finding) -> str:
    where = f"{finding.where}: " if finding.where else ""
    proof = f" [{finding.proof.splitlines()[0][:160]}]" if finding.proof else ""
    return f"{finding.check}: {where}{finding.message}{proof}"


def held_against_model(model: nn.Module, plan: Plan, source: Source | None = None) -> Plan:
    """Return the plan if nothing has changed since it was made, or the same is made now; raise else. Plans put together
    in Python pass."""
    if not plan.made_for.content:
        return plan
    if digest(plan) != plan.made_for.content:
        changed = f"the plan for {plan.model} was edited after it was made"
    elif plan.made_for.model != model_hash(model) and not plan.packed:  # which its library builds of other modules
        changed = f"the plan for {plan.model} was made for other code or other sizes than {type(model).__name__} has"
    else:
        return plan
    check_matches(model, plan)
    try:
        source = resolve(model) if source is None else source
        derived = proven_plan(source, wish_of_plan(plan), choices_of_plan(plan), source.module())
    except AutoplanError as error:
        hint = _remedy(plan, error.hint)
        raise PlanMismatchError(f"{changed}, and it cannot be planned again: {error.message}", hint=hint) from error
    # What steers the model, without how it was made
    ours, other = ({n: v for n, v in steering(each).items() if n != "made_for"} for each in (plan, derived))
    apart = list(_apart(ours, other))
    if apart:
        more = f" (and {len(apart) - _SHOWN_PLACES} more)" if len(apart) > _SHOWN_PLACES else ""
        raise PlanMismatchError(
            f"{changed}, and planning {type(model).__name__} again gives another plan: "
            f"{'; '.join(apart[:_SHOWN_PLACES])}{more} ({made_with(plan)})",
            hint=_remedy(plan),
        )
    return replace(derived, model=plan.model)


def _remedy(plan: Plan, hint: str = "") -> str:
    remedy = f"{hint}; or plan again" if hint else "plan again"
    more = "to shard differently, pass overrides={pattern: style} to autoplan.plan"
    return f"{remedy}: {made_anew(plan)}; {more}; check=False applies the plan unchanged"


def _apart(ours: Any, other: Any, where: str = "") -> Iterator[str]:
    """Yield where two pieces of plain data differ, each place once."""
    if isinstance(ours, dict) and isinstance(other, dict):
        for name in dict.fromkeys((*ours, *other)):
            path = f"{where}.{name}" if where else str(name)
            if name not in ours:
                yield f"{path} is missing, should be {other[name]!r:.80}"
            elif name not in other:
                yield f"{path} is {ours[name]!r:.80}, should be absent"
            else:
                yield from _apart(ours[name], other[name], path)
    elif isinstance(ours, list) and isinstance(other, list) and len(ours) != len(other):
        yield f"{where} has {len(ours)} items, should have {len(other)}"
    elif isinstance(ours, list) and isinstance(other, list):
        for number, (mine, its) in enumerate(zip(ours, other, strict=True)):
            yield from _apart(mine, its, f"{where}[{number}]")
    elif ours != other or type(ours) is not type(other):
        yield f"{where} is {ours!r:.80}, should be {other!r:.80}"
