"""An audit names the culprit: the cause is the first finding, in the words of the plan's dialect, and its fix works.

Wrong plans are made of right ones (`helpers/wrong_plans.py`). The sample here is quick; `long` does all of them.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from wrong_plans import DIALECTS, MUTATIONS, Mutation, wrong_plan

import autoplan
from autoplan.values import Report

CASES = [
    pytest.param(dialect, mutation, id=f"{dialect}-{mutation.name.replace(' ', '_')}", marks=pytest.mark.long)
    for dialect in DIALECTS
    for mutation in MUTATIONS
    if dialect in mutation.dialects
]
QUICK = ("o_proj the other way", "w3 missing", "two mistakes")


def audited(dialect: str, mutation: Mutation) -> tuple[Report, Any]:
    plan, model = wrong_plan(mutation, dialect), mutation.model()
    return autoplan.audit(model, plan, mutation.tp_size), model


def is_about(report: Report, number: int, cause: str) -> bool:
    """Is a finding about these modules? DeepSpeed's keys are expressions on parameters."""
    plain = {
        re.sub(r"\\[.d]\+?|\[0-9\]\+|[\^$]", "", place).replace(".*", "") for place in report.findings[number].about
    }
    wanted = cause.replace(".*", "").replace(".", "")
    return any(place == cause or place.replace(".", "") in (wanted, f"{wanted}weight") for place in [
        *report.findings[number].about, *plain])  # fmt: skip


@pytest.mark.parametrize(("dialect", "mutation"), CASES)
def test_the_cause_is_first_and_its_fix_works(dialect: str, mutation: Mutation) -> None:
    report, model = audited(dialect, mutation)
    shown = [(f.level, f.check, f.where, f.message[:80], f.hint[:120]) for f in report.findings[:4]]
    assert any(is_about(report, 0, cause) for cause in mutation.causes), shown
    if mutation.name.startswith("two"):
        assert all(is_about(report, 0, cause) or is_about(report, 1, cause) for cause in mutation.causes), shown
    assert report.fixed is not None, shown
    again = autoplan.audit(model, report.fixed, mutation.tp_size)
    assert again.ok and again.details["outcome"] == "exact", again


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", QUICK)
def test_causes_in_each_dialect(dialect: str, name: str) -> None:
    (mutation,) = [mutation for mutation in MUTATIONS if mutation.name == name]
    test_the_cause_is_first_and_its_fix_works(dialect, mutation)
