"""Every fuzzer of tests/fuzz, shortly: no raw exception, nothing slow, no hang. `make fuzz` runs them for longer.

Each runs in a process of its own: a fuzzer may change what it likes. Fuzzers that need long are left to `make fuzz`.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from apart import run_apart, script

ROOT = Path(__file__).resolve().parents[2]
FUZZ = ROOT / "tests" / "fuzz"
SHORT = {"plan_files": 60, "rule_files": 60, "foreign_plans": 60, "safetensors_headers": 60, "configs": 6}


def loaded(name: str):
    spec = importlib.util.spec_from_file_location(f"fuzz_{name.strip('_')}", FUZZ / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
@pytest.mark.parametrize("name", SHORT)
def test_hostile_cases_end_in_one_clear_error(name: str, tmp_path: Path) -> None:
    done = run_apart(tmp_path, (script, FUZZ / f"{name}.py", "--count", str(SHORT[name]), "--seed", "1"))
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"cases={SHORT[name]} " in done.stdout


def test_make_fuzz_runs_every_fuzzer_and_adds_up() -> None:
    runner = loaded("__main__")
    assert {path.stem for path in runner.fuzzers()} >= SHORT.keys()
    assert runner.counts_of("name=plan files cases=2 raw=0") == {"name": "plan files", "cases": "2", "raw": "0"}


def test_a_fuzzer_tells_its_outcomes_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """The judge can fail: raw, slow, wrong and hanging cases are counted as such."""
    from autoplan.common.errors import AutoplanError

    fuzzing = loaded("fuzzing")
    fuzzing.PATIENCE = fuzzing.SECONDS = 0.2

    def attempt(case: str) -> None:
        if case == "clear":
            raise AutoplanError("said")
        if case == "raw":
            raise KeyError(case)
        if case == "wrong":
            raise fuzzing.Wrong
        while case == "hangs":
            pass

    kinds = iter(("clear", "raw", "wrong", "hangs", "exact"))
    counts = fuzzing.fuzz("judge", lambda chance: next(kinds), attempt, 5, 0)
    assert (counts.clear, counts.raw, counts.wrong, counts.hangs, counts.exact) == (1, 1, 1, 1, 1)
    assert not counts.ok and "KeyError" in capsys.readouterr().err
