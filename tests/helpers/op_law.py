"""The law that every op obeys: split along any dim its result is exact, or the dim stays whole and the plan says why.

The plan is what analysis alone derives: nothing is tried on ranks while it is made.
"""

from __future__ import annotations

import copy
import re
import traceback
from dataclasses import dataclass
from unittest.mock import patch

from op_samples import Case, Unusable, depends_on_seed, usable

from autoplan.check.verify.clone import Clone
from autoplan.check.verify.verify import verify_clone
from autoplan.common.errors import AutoplanError, IndivisibleError
from autoplan.common.options import Wish
from autoplan.decide.plan.chosen import solve_chosen
from autoplan.hf.source import Source, resolve
from autoplan.planning import capture_source, draft_plan
from autoplan.values import AllGather, DrawOnShards, Plan

__all__ = ["BROKEN", "KINDS", "Outcome", "judge"]

KINDS = {
    "exact": "the dim is cut through the op, forward and every gradient are exact",
    "gathered": "the dim is cut in the linear before, whose output is gathered for the op; all exact",
    "random": "cut, and each rank draws random numbers for its share: there is nothing to compare with",
    "whole": "the dim stays whole, and the plan says why",
    "refused": "there is no plan, and the error says why",
    "unusable": "not a case: nothing to cut or to compare",
    "wrong": "cut, and not exact",
    "raw": "an error that autoplan did not mean to raise",
}
BROKEN = ("wrong", "raw")


@dataclass(frozen=True)
class Outcome:
    """What became of a case. `reason` is for people, `reason_kind` without the numbers in it."""

    kind: str
    reason: str = ""
    beside: bool = False  # is something else in the module cut, and exact?

    @property
    def reason_kind(self) -> str:
        return re.sub(r"\d+", "N", self.reason.split(": ")[0] if self.kind == "refused" else self.reason)


def judge(case: Case | Unusable) -> Outcome:
    """Plan it, shard it, compare it."""
    if isinstance(case, Unusable):
        return Outcome("unusable", case.reason)
    reason = usable(case.model, case.inputs)
    if reason:
        return Outcome("unusable", reason)
    try:
        return _judged(case)
    except AutoplanError as error:
        return Outcome("refused", str(error).splitlines()[0])
    except Exception as error:  # whatever comes out of here is a finding
        return Outcome("raw", _told(error))


def _judged(case: Case) -> Outcome:
    source = resolve(copy.deepcopy(case.model), inputs=case.inputs)
    try:
        plan = draft_plan(source, Wish(case.tp_size)).plan
    except IndivisibleError:
        return Outcome("whole", _why_nothing_is_cut(source, case.tp_size))
    whole = next((one.reason for one in plan.replicated if one.fqn == "first.weight"), "")
    clone = Clone(case.model, {"forward": case.inputs}, {}, "", {"forward": case.inputs})
    report = verify_clone(clone, plan, checks=("parameters", "forward"))
    errors = [f"{found.check} {found.where} {found.message}" for found in report.findings if found.level == "error"]
    if errors:
        draws = depends_on_seed(case.model, case.inputs) and _draws_for_shares(plan)
        raw = any(re.search(r"\b[A-Z][A-Za-z]*Error\b", text) and "AutoplanError" not in text for text in errors)
        return Outcome("raw" if raw else "random" if draws else "wrong", errors[0] if raw or not draws else "")
    if whole:
        return Outcome("whole", _short(whole), beside=True)
    return Outcome("gathered", _why_nothing_is_cut(source, case.tp_size)) if _is_gathered(plan) else Outcome("exact")


def _draws_for_shares(plan: Plan) -> bool:
    return bool(plan.runtime.random or plan.runtime.of(DrawOnShards))


def _is_gathered(plan: Plan) -> bool:
    return any(one.pattern == "first" for one in plan.runtime.of(AllGather))


def _why_nothing_is_cut(source: Source, tp_size: int) -> str:
    """Why the op does not take shares, were there no gathering."""
    trace = capture_source(source, source.module()).trace
    with patch("autoplan.analyse.solve.products_to_gather", return_value=()):
        solution = solve_chosen(trace, tp_size, None)
    return _short(next(fact.reason for fact in solution.parameters if "first.weight" in fact.names))


def _short(reason: str) -> str:
    """The reason of the features, without that of the linear's input."""
    return reason.split("; ")[0].partition("): ")[2] or reason


def _told(error: Exception) -> str:
    steps = [step for step in traceback.extract_tb(error.__traceback__) if "/autoplan/" in step.filename]
    place = f" (at {steps[-1].filename.rsplit('/autoplan/', 1)[-1]}:{steps[-1].lineno})" if steps else ""
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}{place}"
