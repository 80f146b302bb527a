"""What an audit's reader sees: causes first and what follows from them beneath, the plan's own lines, and no verdict
"failed" on two plans that are both exact."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus.toys import ATTENTION, GOOD, MLP, TABLES, FusedAttention, decoder
from torch import nn
from wrong_plans import as_torch

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


# ------------------------------------------------------------------------------------------------ what --fix writes


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def residuals() -> nn.Module:
    """A model whose names begin with numbers."""
    return nn.Sequential(*(Residual() for _ in range(3)))


def fixed(model: nn.Module, plan: dict[str, Any], **options: Any) -> tuple[Report, dict[str, Any]]:
    """The audit, and its corrected plan, which passes."""
    report = autoplan.audit(model, plan, 2, **options)
    assert not report.ok and report.findings[0].level == "error" and not report.findings[0].is_consequence
    assert report.fixed is not None and autoplan.audit(model, report.fixed, 2, **options).ok
    return report, dict(report.fixed)


@pytest.mark.parametrize("down", ["rowwise", "colwise"])
def test_transformers_needs_a_row_for_each_leading_number(down: str) -> None:
    plan = {"*.up": "colwise", "*.down": down}
    report, right = fixed(residuals(), plan, inputs={"input": torch.randn(2, 3, 8)})
    assert right == {f"{n}.{name}": f"{kind}wise" for name, kind in (("up", "col"), ("down", "row")) for n in range(3)}
    cause, *others = report.findings
    assert {"*.up", "*.down"} <= set(cause.about) and all(f"'{n}.down': 'rowwise'" in cause.hint for n in range(3))
    assert not any(finding.level == "error" and not finding.is_consequence for finding in others)
    assert any("never looks up * in the first place" in finding.message for finding in others)


def test_a_row_that_matches_nothing_is_not_in_the_corrected_plan() -> None:
    report, right = fixed(decoder(), {**GOOD, "layers.*.mlp.w2": "colwise", "layers.*.mlp.bias_gate": "colwise"})
    assert report.findings[0].about == ("layers.*.mlp.w2",) and right == GOOD
    (dead,) = [finding for finding in report.findings if finding.check == "dead-keys"]
    assert dead.hint.startswith("remove it")


def test_a_wrong_row_of_one_layer_beside_a_right_one_for_all() -> None:
    plan = as_torch({**MLP, "layers.0.mlp.w2": "colwise"})
    report, right = fixed(decoder(), plan)
    assert report.findings[0].about == ("layers.0.mlp.w2",) and list(right) == list(MLP)
    assert report.findings[0].hint == "remove 'layers.0.mlp.w2'"


def test_rows_that_miss_in_the_same_way_are_one_finding() -> None:
    wrong_path = {key.replace("layers", "blocks"): style for key, style in MLP.items()}
    report, right = fixed(decoder(), {**TABLES, **ATTENTION, **wrong_path, "layers.*.attn.o_proj": "colwise"})
    causes = [finding for finding in report.findings if finding.level == "error" and not finding.is_consequence]
    assert right == GOOD and len(causes) == 2
    assert causes[0].about == ("layers.*.attn.o_proj",) and set(wrong_path) <= set(causes[1].about)


def test_a_plan_of_another_model_is_replaced_in_its_dialect() -> None:
    report, right = fixed(decoder(), as_torch({"blocks.*.query": "colwise", "blocks.*.output": "rowwise"}))
    assert "no row matches the model" in report.findings[0].message and "--fix" in report.findings[0].hint
    assert {*ATTENTION, *MLP} <= set(right)
