"""Audit changed plans of one model, each of them once: the analysis and the tiny clone are those of the first audit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autoplan.check.audit.checks import CHECKS
from autoplan.check.audit.lines import ForeignPlan, read_foreign
from autoplan.check.audit.repair.dialects import Dialect
from autoplan.check.audit.subject import Audited
from autoplan.check.audit.trial import run_on
from autoplan.common.errors import AutoplanError
from autoplan.values import Finding

_MOST = 80  # audits for one repair


@dataclass
class Trials:
    """`passes` audits a plan: on simulated ranks, and by every check."""

    subject: Audited
    dialect: Dialect
    known: dict[str, bool] = field(default_factory=dict)
    proof: str = ""  # what the first plan that failed showed

    def passes(self, rows: Iterable[tuple[Any, Any]]) -> bool:
        """Is a plan of these rows (key, value) without errors? A plan of no rows is."""
        rows = tuple(rows)
        name = repr([(key, repr(self.dialect.key_of(value))) for key, value in rows])
        if not rows:
            return True
        if name not in self.known:
            if len(self.known) >= _MOST:
                return False
            errors = [f for f in self.findings(self.dialect.written(rows)) if f.level == "error"]
            self.known[name] = not errors
            self.proof = self.proof or next((f.proof for f in errors if f.proof), "")
        return self.known[name]

    def findings(self, raw: Mapping[str, Any]) -> tuple[Finding, ...]:
        """What an audit of this plan finds; an error where it cannot be tried."""
        try:
            plan = read_foreign(raw, self.subject.model, self.subject.plan.name)
        except AutoplanError as error:
            return (Finding("dialects", "error", "", error.message),)
        assert isinstance(plan, ForeignPlan)
        plan = replace(plan, dialect=self.subject.plan.dialect)
        run = run_on(self.subject.extra["clone"], self.subject.model, plan, self.subject.tp_size)
        if run.numbers is None:
            return (Finding("numbers", "error", "", f"not tried: {run.reason}"),)
        extra = {**self.subject.extra, "thawed": run.thawed}
        subject = replace(self.subject, plan=plan, numbers=run.numbers, ran_at_full_size=run.full_size, extra=extra)
        found: list[Finding] = []
        for check in CHECKS:
            found += check.run(subject, tuple(found))
        return tuple(found)
