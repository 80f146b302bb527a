"""What the documents show is what comes out: their Python runs, their links lead somewhere, their commands exist."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
from host_table import ROWS, with_table

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
SESSIONS = [path for path in DOCS if ">>>" in path.read_text(encoding="utf-8")]
SCRIPTS = [path for path in DOCS if "```python\nimport torch" in path.read_text(encoding="utf-8")]


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SESSIONS, ids=named)
def test_sessions_print_what_they_show(path: Path) -> None:
    """Every `>>>` of a document, top to bottom in one session."""
    text = re.sub(r"^```.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, named(path), str(path), 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("path", SCRIPTS, ids=named)
def test_scripts_run(path: Path) -> None:
    """Python blocks that import what they need are whole scripts; several of one document share their names."""
    names: dict[str, object] = {"__name__": "docs"}
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    for block in blocks:
        exec(compile(block, named(path), "exec"), names)
    assert blocks


@pytest.mark.parametrize("path", DOCS, ids=named)
def test_links_and_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (path.parent / link).exists(), f"{named(path)} links to {link}"
    for file in re.findall(r"`((?:autoplan|tests|rules|examples|docs)/[\w./-]+)`", text):
        assert (ROOT / file).exists(), f"{named(path)} names {file}"


def test_the_check_of_sessions_can_fail() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", "wrong", 0)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed


def test_reference_pages_hold_every_public_name(tmp_path: Path) -> None:
    """What `make docs` runs, and what comes out."""
    import subprocess
    import sys

    import autoplan

    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "-m pdoc" in line)
    words = [word.strip("'") for word in line.split("-m pdoc")[1].split("-o")[0].split()]
    made = subprocess.run([sys.executable, "-m", "pdoc", *words, "-o", tmp_path], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    page = (tmp_path / "autoplan.html").read_text(encoding="utf-8")
    missing = [name for name in autoplan.__all__ if f'id="{name}"' not in page and not name.startswith("__")]
    assert not missing


def test_the_frameworks_table_is_what_its_list_says_and_every_row_names_a_test() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    assert page == with_table(page), "run: PYTHONPATH=tests/helpers python -m host_table docs/frameworks.md"
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "autoplan").rglob("*.py"))
    named = {row.shown_by for row in ROWS} | set(re.findall(r"`(test_\w+\.py::test_\w+)`", page))
    for name in named:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (ROOT / "tests" / "execute" / file).read_text(encoding="utf-8"), name
    for row in ROWS:
        assert (row.verdict == "cannot") == bool(row.error) and row.error in source, row
