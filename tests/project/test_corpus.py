"""The 25 published failures: each bad case is caught by the check named for it, no good one has an error."""

from __future__ import annotations

import importlib
import pkgutil

import corpus
import pytest
from corpus.case import Case, Setting

import autoplan
from autoplan.values import Report

CASES: list[Case] = [
    importlib.import_module(f"corpus.{found.name}").CASE
    for found in sorted(pkgutil.iter_modules(corpus.__path__), key=lambda found: found.name)
    if found.name.startswith("row_")
]


def audited(setting: Setting) -> Report:
    model = setting.model()
    return autoplan.audit(model, setting.plan(model), setting.tp_size, **setting.options)


def test_every_row_is_there() -> None:
    assert [case.row for case in CASES] == list(range(1, 26))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row}: {case.what}")
def test_the_bad_case_is_caught(case: Case) -> None:
    report = audited(case.bad)
    caught = [f for f in report.findings if f.check == case.check and f.level in ("error", "warn")]
    assert caught, f"{case.check} said nothing:\n{report}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row}: {case.what}")
def test_the_good_case_has_no_error(case: Case) -> None:
    report = audited(case.good)
    assert report.ok, f"\n{report}"
    assert case.check not in {f.check for f in report.findings if f.level != "note"}, f"\n{report}"
