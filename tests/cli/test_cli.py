"""The command line: where output goes, what the exit code says, how errors look.

The commands are tried on plans made by hand (making real ones is tested where it is done); what is tested here is all
that stands between a shell and `autoplan.plan`.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_plans import llama_plan

import autoplan
from autoplan.cli.app import main
from autoplan.common.errors import SourceError
from autoplan.decide.rulebook import rule_tests
from autoplan.decide.rulebook.read import load_rules
from autoplan.decide.rulebook.rule_tests import RuleResult
from autoplan.decide.written_plans.plan_file import load_plan
from autoplan.forecast import choose
from autoplan.values import Finding, Proof, Report, replace
from autoplan.values.estimate import Estimate, MemoryParts, Sent


class Asked:
    """Stands in for `autoplan.plan` and `autoplan.verify`: answers with `plan` or `report`, notes what it was asked."""

    plan = llama_plan()
    report = Report(ok=True, tp_size=2, gradients={"w": 1e-15}, details={"checked": ("forward",)})
    sizes = choose.Sizes(why="nobody estimates here")
    error: BaseException | None = None
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]]

    def __init__(self) -> None:
        self.calls = []

    def _answer(self, name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append((name, args, kwargs))
        if self.error:
            raise self.error
        return value

    def make(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer("plan", self.plan, args, kwargs)

    def estimate(self, *_: Any, **__: Any) -> choose.Sizes:
        return self.sizes

    def check(self, *args: Any, **kwargs: Any) -> Any:
        return self._answer("verify", self.report, args, kwargs)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Asked]:
    stand_in = Asked()
    monkeypatch.setattr(autoplan, "plan", stand_in.make, raising=False)
    monkeypatch.setattr(autoplan, "verify", stand_in.check, raising=False)
    monkeypatch.setattr(choose, "estimated_sizes", stand_in.estimate)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.chdir(tmp_path)
    yield stand_in


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


OFF = {"sequence_parallel": False, "trust_remote_code": False}
PLANNED = OFF | {"trial_seconds": 300.0, "uneven": "never", "rules": None, "cache": None}


def test_plan_prints_the_table(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "llama", "--tp", "8") == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{llama_plan()}\n") and "Valid tp: " in out
    assert err == ""  # no progress where nobody watches
    assert asked.calls == [("plan", ("llama",), {"tp_size": 8, "source": "auto", "prove": "graph", **PLANNED})]


def test_plan_says_what_a_step_takes(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    parts = MemoryParts(weights=20 * 2**30, optimizer=40 * 2**30, overhead=2**30)
    sent = (Sent("tp", "all-reduce", 65, 2**31),)
    one = Estimate("m", (("tp", 8),), 1, 2048, "full", parts, "the head", "forward", sent, 0)
    four = replace(llama_plan(), tp_size=4)
    asked.sizes = choose.Sizes(
        {4: four, 8: llama_plan()}, {8: one, 4: replace(one, parts=MemoryParts(weights=80 * 2**30))}
    )
    assert run("plan", "llama", "--tp", "8", "--gpu", "h100") == 0
    out = capsys.readouterr().out
    assert "Memory per rank [WWWWWWWWWWOOOOOOOOOOOOOOOOOOO·······] 61.0 of 74.5 GiB\n" in out
    assert "Weights 20.0, Optimizer 40.0, Context 1.0\n  a step of 1 × 2,048 tokens on tp 8" in out
    assert "65, 2.00 GiB" in out and "80.00 GiB, does not fit" in out
    assert run("plan", "llama", "--tp", "8") == 0
    assert "Memory per rank" not in capsys.readouterr().out


def test_plan_options_arrive(asked: Asked) -> None:
    run("plan", "x/y", "--tp", "4", "--source", "hf", "--prove", "ranks", "--trust-remote-code")
    assert asked.calls[0][2] == {**PLANNED, "tp_size": 4, "source": "hf", "prove": "ranks", "trust_remote_code": True}


def test_inputs_rules_and_a_cache_arrive(asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fed_by_hand.py").write_text("def inputs():\n    return {'x': 3}\n\ndef number():\n    return 3\n")
    assert run("plan", "x/y", "--tp", "4", "--inputs", "fed_by_hand:inputs", "--rules", "mine", "--cache", "plans") == 0
    named = {"inputs": {"x": 3}, "rules": Path("mine"), "cache": Path("plans")}
    assert {name: value for name, value in asked.calls[0][2].items() if name in named} == named
    for text, error in (("fed_by_hand", "is not 'package.module:function'"), ("fed_by_hand:number", "returned int")):
        assert run("plan", "x/y", "--tp", "4", "--inputs", text) == 2
        assert error in capsys.readouterr().err


def test_hints_name_options_that_the_command_has(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked.error = SourceError("no", hint="pass inputs={'x': tensor}, or plan with prove='none'")
    assert run("plan", "x/y", "--tp", "4") == 2
    assert (
        "pass --inputs MODULE:FUNCTION (it returns {'x': tensor}), or plan with --prove none" in capsys.readouterr().err
    )
    assert run("verify", "x/y") == 2
    assert "pass inputs={'x': tensor}" in capsys.readouterr().err  # it has no such option


def test_plan_json_is_the_plan_file(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "llama", "--tp", "8", "--json") == 0
    assert json.loads(capsys.readouterr().out) == llama_plan().to_dict()


@pytest.mark.parametrize("name", ["plan.yaml", "plan.json"])
def test_plan_writes_a_file(name: str, asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "llama", "--tp", "8", "-o", name) == 0
    out, err = capsys.readouterr()
    assert out == "" and err == f"written to {name}\n"
    assert load_plan(name) == llama_plan()


def test_a_bad_file_name_is_said_before_the_work(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "llama", "--tp", "8", "-o", "plan.txt") == 2
    assert "plan files end in .yaml, .yml or .json" in capsys.readouterr().err
    assert asked.calls == []


WARNING = Finding("coverage", "warn", "h", "half stays whole")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, 0),  # llama_plan has a note: notes inform
        ({"findings": (WARNING,)}, 1),
        ({"findings": (replace(WARNING, level="error"),)}, 1),
        ({"proof": Proof("graph", 2, False)}, 1),
        ({"proof": Proof("none", 1, False)}, 0),
    ],
)
def test_plan_exit_codes(changes: dict[str, Any], code: int, asked: Asked) -> None:
    asked.plan = replace(llama_plan(), **changes)
    assert run("plan", "llama", "--tp", "8") == code


def test_verify(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "llama", "--tp", "2", "--engine", "gloo") == 0
    assert capsys.readouterr().out.startswith("llama · tp 2 · passed\n")
    wanted = {"tp_size": 2, "engine": "gloo", "rounding": False, **OFF}
    assert asked.calls == [("verify", ("llama", None), wanted)]
    run("verify", "llama", "--rounding")
    assert asked.calls[-1][2]["rounding"] is True
    capsys.readouterr()
    asked.report = replace(asked.report, ok=False, findings=(replace(WARNING, level="error"),))
    assert run("verify", "llama", "--json") == 1
    assert json.loads(capsys.readouterr().out) == asked.report.to_dict()


def test_verify_a_saved_plan(asked: Asked) -> None:
    llama_plan().save("plan.yaml")
    assert run("verify", "llama", "--plan", "plan.yaml") == 0
    assert asked.calls[0][1] == ("llama", llama_plan())


def test_explain_runs_nothing_on_a_plan_file(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    llama_plan().save("plan.yaml")
    assert run("explain", "plan.yaml", "lm_head") == 0
    assert capsys.readouterr().out == llama_plan().explain("lm_head") + "\n"
    assert asked.calls == []
    assert run("explain", "plan.yaml", "lm_head", "--json", "-o", "why.json") == 0
    assert json.loads(Path("why.json").read_text())["path"] == "lm_head"


def test_explain_a_model(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "llama", "lm_head", "--tp", "8") == 0
    assert asked.calls[0][2]["tp_size"] == 8
    capsys.readouterr()
    assert run("explain", "llama", "lm_head") == 2
    assert "--tp" in capsys.readouterr().err


def test_rules_list_and_show_print_the_rule_files(capsys: pytest.CaptureFixture[str]) -> None:
    rules = load_rules()
    assert run("rules", "list") == 0
    listed = capsys.readouterr().out
    for rule in rules:
        assert rule.id in listed
        assert run("rules", "show", rule.id) == 0
        shown = " ".join(capsys.readouterr().out.split())
        for words in (rule.summary, rule.why, rule.limits, *(example.because for example in rule.examples)):
            assert " ".join(words.split()) in shown
    assert run("rules", "list", "--json") == 0
    assert [rule["id"] for rule in json.loads(capsys.readouterr().out)] == [rule.id for rule in rules]


@pytest.mark.parametrize(("ok", "code", "words"), [(True, 0, "2 of 2 checks of 1 rule passed"), (False, 1, "1 of 2")])
def test_rules_test_exits_1_on_a_failure(
    ok: bool, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = (RuleResult("r", "example: a", True), RuleResult("r", "example: b", ok, "claims nothing"))
    monkeypatch.setattr(rule_tests, "test_rules", lambda strict: results)
    assert run("rules", "test") == code
    out = capsys.readouterr().out
    assert words in out and ("claims nothing" in out) is not ok


FAILURES = {
    "unknown rule": (("rules", "show", "no-such-rule"), "there is no rule 'no-such-rule'"),
    "unknown path": (("explain", "plan.yaml", "lm_hat"), "nearest paths: lm_head"),
    "no such plan": (("explain", "gone.yaml", "lm_head"), "cannot read plan file gone.yaml: No such file"),
    "corrupt plan": (("explain", "cut.yaml", "lm_head"), "cannot parse"),
    "corrupt plan to verify": (("verify", "llama", "--plan", "cut.yaml"), "cannot parse"),
    "no tp": (("plan", "llama"), "--tp"),
    "tp of zero": (("plan", "llama", "--tp", "0"), "--tp"),
    "unknown command": (("plam",), "plam"),
    "unknown option": (("plan", "llama", "--tp", "2", "--fast"), "--fast"),
    "unknown proof": (("plan", "llama", "--tp", "2", "--prove", "all"), "--prove"),
    "unknown engine": (("verify", "llama", "--engine", "mpi"), "--engine"),
    "unwritable": (("explain", "plan.yaml", "lm_head", "-o", "no/where"), "cannot write"),
}


@pytest.mark.parametrize("case", FAILURES)
def test_what_cannot_be_answered_exits_2(case: str, asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    llama_plan().save("plan.yaml")
    Path("cut.yaml").write_text("autoplan: [1")
    arguments, words = FAILURES[case]
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and "Traceback" not in err


def test_an_error_of_ours_is_one_message(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked.error = SourceError("no model 'lama' is known", hint="did you mean 'llama'?")
    assert run("plan", "lama", "--tp", "2") == 2
    assert capsys.readouterr() == ("", "error: no model 'lama' is known\n  → did you mean 'llama'?\n")


def test_a_bug_is_not_mistaken_for_findings(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked.error = ZeroDivisionError("oops")
    assert run("plan", "llama", "--tp", "2") == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and "oops" in err and "a bug in autoplan" in err


def test_packages_that_do_not_fit_are_no_bug(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    asked.error = ImportError("tokenizers>=0.22 is required, but 0.21 was found", name="transformers")
    assert run("plan", "llama", "--tp", "2") == 2
    out, err = capsys.readouterr()
    assert out == "" and "tokenizers>=0.22" in err and "reinstall it" in err and "Traceback" not in err


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("plan", "--help"), ("explain", "--help")])
def test_help_answers_without_torch(arguments: tuple[str, ...]) -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"from autoplan.cli.app import main; main({list(arguments)!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "autoplan" in done.stdout


def test_module_and_narrow_encodings() -> None:
    """`python -m autoplan` is the same program, and a terminal without × or → still gets its answer."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "autoplan", "explain", "gone.yaml", "lm_head"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2
    assert "cannot read plan file gone.yaml" in done.stderr and "Traceback" not in done.stderr


def test_what_loads_torch_is_imported_where_progress_is_shown() -> None:
    """Importing torch and transformers takes seconds, in which a terminal must not be silent."""
    heavy = (
        "autoplan.check",
        "autoplan.hf",
        "autoplan.capture",
        "autoplan.execute",
        "autoplan.forecast.dry_run",
        "torch",
    )
    early = []
    for file in sorted(Path(autoplan.__path__[0], "cli").glob("*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef) or "with progress(" not in ast.unparse(function):
                continue
            imports = [step for step in function.body if isinstance(step, (ast.Import, ast.ImportFrom))]
            names = [
                (step.module or "") if isinstance(step, ast.ImportFrom) else step.names[0].name for step in imports
            ]
            early += [f"{file.name}: {function.name}: {name}" for name in names if name.startswith(heavy)]
    assert early == []
