"""No plan that somebody wrote or edited is applied unchecked: one is audited first, the other is derived once more.

A dict of styles says little of what its author meant. So what their own library would make of it is tried on simulated
ranks first (`auditor.py`), and a plan that is wrong there, or cannot run, is refused with the proof, before anything of
the model is touched. Plans of ours are not foreign: they say themselves how they did when they were made.

The problem: a plan file is edited, by hand or by accident, or the model that it was made for is another one by now.
Most such plans load, match and run, and some give other numbers. No look at the plan alone can tell. So a plan says
what it was when it was made (`made_for.content`), and for which model (`made_for.model`). Where one of the two is not
so, only what follows from the model now is applied: the plan is made once more, under the choices that it holds, and
must be the same in everything that steers the model.
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
from autoplan.common.options import Wish
from autoplan.decide.plan.chosen import choices_of_plan
from autoplan.execute.fits import made_anew, made_with, model_hash
from autoplan.execute.tensor_parallel import check_matches
from autoplan.hf.source import Source, resolve
from autoplan.values import Finding, Plan
from autoplan.values.plan import digest, steering

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
            f"the plan for {plan.model} at {plan.over} failed verification when it was made; nothing was applied:"
            + "".join(f"\n    {_line(finding)}" for finding in errors[:_SHOWN]),
            hint="keep the modules named here whole (overrides={pattern: 'replicate'}), or give check=False",
        )


def refuse_unproven(plan: Plan) -> None:
    """For who wants proven plans only."""
    if plan.ranks > 1 and not plan.proof.ok:
        why, hint = _why_unproven(plan)
        text = f"the plan for {plan.model} at {plan.over} is not proven, and strict=True was given: {why}"
        raise PlanRefusedError(f"{text}; nothing was applied", hint=hint)


def warn_unproven(plan: Plan) -> None:
    """A plan that could not be proven is applied with a warning that it is unproven.

    One that nobody asked to prove (`prove="none"`) passes in silence: who made it knows.
    """
    unasked = plan.proof.method == "none" and plan.proof.trial.outcome == "unasked"
    if plan.ranks > 1 and not (plan.proof.ok or unasked or plan.proof.failed):
        why, hint = _why_unproven(plan)
        text = f"the plan for {plan.model} at {plan.over} is not proven: {why}"
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


_SHOWN_PLACES = 3


def held_against_model(model: nn.Module, plan: Plan, source: Source | None = None) -> Plan:
    """The plan, if nothing has changed since it was made, or if what is made now is the same; raises else.

    One that was put together in Python says nothing of how it was made, and passes.
    """
    if not plan.made_for.content:
        return plan
    changed = _changed(model, plan)
    if not changed:
        return plan
    check_matches(model, plan)
    try:
        source = resolve(model) if source is None else source
        wish = Wish(plan.tp_size, plan.ep_size, plan.sequence_parallel, uneven=plan.uneven, cp_size=plan.cp_size)
        derived = proven_plan(source, wish, choices_of_plan(plan), source.module())
    except AutoplanError as error:
        raise PlanMismatchError(
            f"{changed}, and it cannot be derived once more: {error.message}", hint=_remedy(plan, error.hint)
        ) from error
    apart = list(_apart(_comparable(plan), _comparable(derived)))
    if apart:
        more = f" (and {len(apart) - _SHOWN_PLACES} more)" if len(apart) > _SHOWN_PLACES else ""
        raise PlanMismatchError(
            f"{changed}, and it is not what follows from {type(model).__name__}: "
            f"{'; '.join(apart[:_SHOWN_PLACES])}{more} ({made_with(plan)})",
            hint=_remedy(plan),
        )
    return replace(derived, model=plan.model)


def _changed(model: nn.Module, plan: Plan) -> str:
    """What is not as it was; "" if nothing."""
    if digest(plan) != plan.made_for.content:
        return f"the plan for {plan.model} was edited since it was made"
    if plan.made_for.model != model_hash(model) and not plan.packed:  # which its library builds of other modules
        return f"the plan for {plan.model} was made for other code or other numbers than {type(model).__name__} has"
    return ""


def _remedy(plan: Plan, hint: str = "") -> str:
    told = f"{hint}; or " if hint else ""
    return (
        f"{told}make it anew: {made_anew(plan)}; another choice of what is cut is overrides={{pattern: style}} of "
        "autoplan.plan; check=False applies the plan as it is"
    )


def _comparable(plan: Plan) -> dict[str, Any]:
    """What steers the model, without what says how it was made."""
    return {name: value for name, value in steering(plan).items() if name != "made_for"}


def _apart(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two pieces of plain data differ, each place once."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in dict.fromkeys((*one, *other)):
            path = f"{where}.{name}" if where else str(name)
            if name not in one:
                yield f"{path} is left out, where {other[name]!r:.80} follows"
            elif name not in other:
                yield f"{path} is {one[name]!r:.80}, where nothing follows"
            else:
                yield from _apart(one[name], other[name], path)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (mine, its) in enumerate(zip(one, other, strict=True)):
            yield from _apart(mine, its, f"{where}[{number}]")
    elif isinstance(one, list) and isinstance(other, list):
        yield f"{where} has {len(one)} items, where {len(other)} follow"
    elif one != other or type(one) is not type(other):
        yield f"{where} is {one!r:.80}, where {other!r:.80} follows"
