"""No plan that somebody wrote is applied before it was audited.

A dict of styles says little of what its author meant. So what their own library would make of it is tried on simulated
ranks first (`auditor.py`), and a plan that is wrong there, or cannot run, is refused with the proof, before anything of
the model is touched. Plans of ours are not foreign: they say themselves how they did when they were made.
"""

from __future__ import annotations

import warnings
from typing import Any

from autoplan.check.audit.auditor import audit_source
from autoplan.check.audit.lines import read_foreign
from autoplan.check.prove import TRIED
from autoplan.common.errors import PlanRefusedError, UnprovenPlanWarning
from autoplan.values import Finding, Plan

_SHOWN = 5


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
        hint="fix it (autoplan.audit(model, plan, tp_size) says all), or give check=False: then only its choice of "
        "what is cut is taken, and sums, integers and segments come from analysis",
    )


def refuse_disproven(plan: Plan) -> None:
    """A plan of ours says itself whether it failed verification when it was made."""
    errors = [f for f in plan.findings if f.level == "error"]
    if plan.proof.failed or any(f.check == TRIED for f in errors):
        errors = errors or [Finding(TRIED, "error", "", plan.proof.trial.why or plan.proof.text)]
        raise PlanRefusedError(
            f"the plan for {plan.model} at tp={plan.tp_size} failed verification when it was made; nothing was applied:"
            + "".join(f"\n    {_line(finding)}" for finding in errors[:_SHOWN]),
            hint="keep the modules named here whole (overrides={pattern: 'replicate'}), or give check=False",
        )


def refuse_unproven(plan: Plan) -> None:
    """For who wants proven plans only."""
    if plan.ranks > 1 and not plan.proof.ok:
        why, hint = _why_unproven(plan)
        text = f"the plan for {plan.model} at tp={plan.tp_size} is not proven, and strict=True was given: {why}"
        raise PlanRefusedError(f"{text}; nothing was applied", hint=hint)


def warn_unproven(plan: Plan) -> None:
    """A plan that could not be proven is applied with a warning that it is unproven.

    One that nobody asked to prove (`prove="none"`) passes in silence: who made it knows.
    """
    unasked = plan.proof.method == "none" and plan.proof.trial.outcome == "unasked"
    if plan.ranks > 1 and not (plan.proof.ok or unasked or plan.proof.failed):
        why, hint = _why_unproven(plan)
        text = f"the plan for {plan.model} at tp={plan.tp_size} is not proven: {why}"
        warnings.warn(
            f"{text}\n  → {hint}; check=False applies it without this warning", UnprovenPlanWarning, stacklevel=3
        )


def _why_unproven(plan: Plan) -> tuple[str, str]:
    trial = plan.proof.trial
    if trial.outcome == "skipped":
        return f"not verified on simulated ranks: {trial.why}", f"to verify it: {trial.hint}"
    if trial.outcome == "unasked" and plan.proof.method == "none":
        return "nobody asked for a proof when it was made", 'make it with prove="graph" (the default) or "ranks"'
    why = trial.why or plan.proof.text or "nothing says how it did"
    return why, 'see its findings; autoplan.plan(…, prove="ranks") tries more'


def _line(finding: Finding) -> str:
    where = f"{finding.where}: " if finding.where else ""
    proof = f" [{finding.proof.splitlines()[0][:160]}]" if finding.proof else ""
    return f"{finding.check}: {where}{finding.message}{proof}"
