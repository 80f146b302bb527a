"""A check for a project's own tests: a written plan must not be wrong.

from autoplan.testing import assert_plan_ok

def test_our_plan():
    assert_plan_ok("llama", OUR_PLAN, tp_size=4)
"""

from __future__ import annotations

from typing import Any, Literal

from autoplan.values import Report


def assert_plan_ok(
    model: Any, plan: Any, tp_size: int = 2, *, fail_on: Literal["error", "warn"] = "error", **settings: Any
) -> Report:
    """Audit `plan` (`settings` are those of `autoplan.audit`) and raise AssertionError, with the findings, if it fails.

    `fail_on="warn"` also refuses dead keys, poor coverage and needless cost. Return the report for further checks.
    """
    from autoplan.check.audit import audit

    report = audit(model, plan, tp_size, **settings)
    levels = ("error",) if fail_on == "error" else ("error", "warn")
    assert not any(finding.level in levels for finding in report.findings), f"\n{report}"
    return report
