"""What an audit's reader sees: causes first and what follows from them beneath, the plan's own lines, and no verdict
"failed" on two plans that are both exact."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from corpus.toys import ATTENTION, GOOD, MLP, TABLES, FusedAttention, decoder

import autoplan
from autoplan.check.audit.auditor import compare_plans
from autoplan.check.audit.lines import lines_of, plan_file_of
from autoplan.cli.app import main
from autoplan.emit.tables.audit_report import audit_view, sarif
from autoplan.emit.tables.terminal import plain_text, report_view
from autoplan.hf.source import resolve
from autoplan.values import Finding, Report

BLIND = {**ATTENTION, **MLP}


def fused():
    return decoder(FusedAttention)


def test_causes_come_first_and_consequences_beneath_them(capfd: pytest.CaptureFixture[str]) -> None:
    report = autoplan.audit(fused(), {**TABLES, **BLIND, "layers.*.attention.qkv": "colwise"}, 2)
    errors = [finding for finding in report.findings if finding.level == "error"]
    kinds = [finding.is_consequence for finding in errors]
    assert kinds == sorted(kinds) and False in kinds and True in kinds, "the run's outcome is the last of the errors"
    shown = plain_text(audit_view(report), 400)
    assert shown.index("Findings") < shown.index("What follows")
    followed = shown[shown.index("What follows") :].strip().splitlines()
    wheres = {finding.where for finding in report.findings if finding.is_consequence}
    assert len(set(followed)) == len(followed) <= 1 + sum(finding.is_consequence for finding in report.findings)
    assert len(followed) > len({re.sub(r"\d+", "*", where) for where in wheres}), "a sentence each, layers in one"
    failure = next(f.proof for f in report.findings if f.check == "numbers").splitlines()[0]
    assert shown.count(failure) == 1, "what the run showed is told once"
    assert capfd.readouterr().err == "", "torch says nothing of its own"


def test_an_outcome_without_a_cause_is_a_finding() -> None:
    outcome = Finding("numbers", "error", "", "cannot run on 2 simulated ranks", proof="x\ny", kind="cannot-run")
    details = {"model": "m", "plan": "p", "ran": "", "verdicts": {}, "bytes_per_rank": 0, "bytes_per_rank_inferred": 0}
    shown = plain_text(audit_view(Report(False, (outcome,), details=details)), 200)
    assert "error numbers" in shown and "What follows" not in shown


def test_sarif_points_at_the_line_of_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    plan = {**TABLES, **BLIND, "layers.*.attention.qkv": "colwise"}
    Path("plan.yaml").write_text("# by hand\n" + "\n".join(f'"{key}": {style}' for key, style in plan.items()))
    report = autoplan.audit(fused(), "plan.yaml", 2)
    lines = lines_of("plan.yaml", report.details["verdicts"])
    assert lines == {key: number for number, key in enumerate(plan, 2)}
    (run,) = sarif(report, {}, "plan.yaml", lines)["runs"]
    for finding, result in zip(report.findings, run["results"], strict=True):
        place = result["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "plan.yaml"
        if finding.where in plan:
            assert place["region"]["startLine"] == lines[finding.where]
    assert any(finding.where in plan for finding in report.findings)


def test_a_dotted_plan_is_in_its_modules_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from autoplan.decide.written_plans.dialects import plan_at

    (tmp_path / "plans_of_mine.py").write_text('PLAN = {\n    "up": "colwise",\n}\n')
    monkeypatch.chdir(tmp_path)
    plan_at("plans_of_mine:PLAN", None)
    assert plan_file_of("plans_of_mine:PLAN") == "plans_of_mine.py"
    assert lines_of("plans_of_mine.py", ["up"]) == {"up": 2}
    assert plan_file_of("hf") == "" and lines_of("", ["up"]) == {}


def test_two_exact_plans_that_differ_have_not_failed(capsys: pytest.CaptureFixture[str]) -> None:
    report = compare_plans(resolve(decoder()), GOOD, {**TABLES, **ATTENTION}, 2)
    assert report.ok and report.details["verdict"] == "they differ" and report.findings
    shown = plain_text(report_view(report))
    assert "they differ" in shown.splitlines()[0] and "failed" not in shown
    with pytest.raises(SystemExit) as ended:
        main(["compare", "corpus.toys:decoder", "--a", "inferred", "--b", "inferred"])
    assert ended.value.code == 0 and "alike" in capsys.readouterr().out.splitlines()[0]
