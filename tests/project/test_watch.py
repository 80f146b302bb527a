"""The watch over versions: what it reads from pytest and pyproject.toml, and what it writes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def watch() -> Any:
    spec = importlib.util.spec_from_file_location("watch", ROOT / "tests" / "versions" / "watch.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_lower_bounds_are_read_from_pyproject(watch: Any) -> None:
    constraints = watch.lowest(watch._dependencies())
    assert any(one.startswith("torch==2.11") for one in constraints)
    assert watch.lowest(["rich>=13.7", "plain"]) == ["rich==13.7.*"]


def test_the_page_tells_failures_apart(watch: Any) -> None:
    parts = {
        "canaries": {"tests/a.py::x": "PASSED", "tests/a.py::y[1 2]": "FAILED"},
        watch.REST: {"tests/b.py::z": "ERROR"},
    }
    here = {name: "2.0" for name in ("torch", "transformers", "networkx", "typer", "rich", "pyyaml")}
    there = {**here, "torch": "1.0+cpu"}
    again = {"tests/a.py::y[1 2]": "PASSED", "tests/b.py::z": "FAILED"}
    text = watch.section("newest", parts, [watch.REST], here, there, again)
    assert "| canaries | 1 | 1 | 0 | yes |" in text and f"| {watch.REST} | 0 | 1 | 0 | no |" in text
    assert "`tests/a.py::y[1 2]`: passes under the lock" in text
    assert "`tests/b.py::z`: fails under the lock too" in text
    assert text.endswith("Versions that differ from the lock: torch 1.0 → 2.0.")


def test_a_run_leaves_the_other_part_of_the_page(watch: Any) -> None:
    page = watch.written(watch.PAGE.read_text(encoding="utf-8"), "oldest", "All new.")
    assert "All new." in page and page.count("<!-- newest:") == page.count("<!-- end of oldest -->") == 1
    assert watch.written(page, "oldest", "All new.") == page


def test_pytest_is_read_as_it_prints(watch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_two.py").write_text(
        "import pytest\n@pytest.mark.parametrize('text', ['a b', 'c'])\ndef test_of(text): assert text == 'c'\n"
    )
    (tmp_path / "tests" / "test_broken.py").write_text("import no_such_module\n")
    monkeypatch.setattr(watch, "ROOT", tmp_path)
    ended, complete = watch.run(sys.executable, ["tests"], 100.0)
    assert complete
    broken = {"tests/test_broken.py": "ERROR"}
    assert ended == {"tests/test_two.py::test_of[a b]": "FAILED", "tests/test_two.py::test_of[c]": "PASSED", **broken}
