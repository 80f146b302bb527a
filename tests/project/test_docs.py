"""What the documents show is what comes out: their Python runs, their links lead somewhere, their commands exist."""

from __future__ import annotations

import doctest
import re
import textwrap
from pathlib import Path

import pytest
from apart import run_apart, script
from doc_preludes import LONG, SETTINGS, Setting, lists_as_they_were, run
from host_table import ROWS, with_table

import autoplan

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
SESSIONS = [path for path in DOCS if ">>>" in path.read_text(encoding="utf-8")]
RUN_BY = {"docs/howto/add-a-check.md": "tests/check/test_add_a_check.py"}  # reads the page and runs its block


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def python_of(name: str) -> list[str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return [
        textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    ]


SCRIPTS = [
    pytest.param(name, marks=pytest.mark.long if name in LONG else ())
    for name in map(named, DOCS)
    if python_of(name) and name not in RUN_BY
]


@pytest.mark.parametrize("path", SESSIONS, ids=named)
def test_sessions_print_what_they_show(path: Path) -> None:
    """Every `>>>` of a document, top to bottom in one session."""
    text = re.sub(r"^```.*$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, named(path), str(path), 0)
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert result.attempted and not result.failed


@pytest.mark.filterwarnings("ignore::autoplan.UnprovenPlanWarning")  # a plan made on simulated ranks is not tried there
@pytest.mark.parametrize("name", SCRIPTS)
def test_python_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of Python, top to bottom; several of one document share their names."""
    monkeypatch.setattr("autoplan.decide.written_plans.read._registered", [])  # a page registers one
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    names: dict[str, object] = {"__name__": "docs"}
    with lists_as_they_were():
        for number, block in enumerate(python_of(name)):
            run(block, f"{name}, block {number}", names, SETTINGS.get((name, number), Setting)())


def test_every_block_of_python_is_run_and_every_setting_used() -> None:
    there = {(named(path), number) for path in DOCS for number, _ in enumerate(python_of(named(path)))}
    assert set(SETTINGS) <= there
    run_here = {param.values[0] for param in SCRIPTS}
    assert {name for name, _ in there} == run_here | set(RUN_BY)
    for name, test in RUN_BY.items():
        assert Path(name).name in (ROOT / test).read_text(encoding="utf-8")


@pytest.mark.parametrize("code", ["autoplan.plan(modle, 2)", "autoplan.plan(model, 2, no_such=1)", "import nothing_is"])
def test_the_check_of_python_can_fail(code: str) -> None:
    with pytest.raises((NameError, TypeError, ImportError)):
        run(code, "wrong", {}, SETTINGS["docs/howto/feed-a-model.md", 0]())
    with pytest.raises(Exception, match=r"nothing_is|modle|no_such"):
        run(f"mesh\n{code}", "wrong", {}, Setting({}, 2, lambda _: {"mesh": 1, "model": 1, "autoplan": autoplan}))


@pytest.mark.parametrize("path", DOCS, ids=named)
def test_links_and_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (path.parent / link).exists(), f"{named(path)} links to {link}"
    for file in re.findall(r"`((?:autoplan|tests|rules|examples|docs)/[\w./-]+)`", text):
        assert (ROOT / file).exists(), f"{named(path)} names {file}"


def test_the_readme_shows_the_path_as_it_is_in_the_code() -> None:
    """The picture in README is the one of api.py, and the steps are what api.py calls."""
    import inspect

    from autoplan import api
    from autoplan.check import pipeline

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for line in re.findall(r"^    (\w+:.*──.*)$", api.__doc__ or "", re.MULTILINE):
        assert line in readme, line
    steps = {api: ("resolve", "read_source", "proven_plan", "read_mesh", "_plan_for_mesh", "shard_model")}
    steps[pipeline] = ("settle_capabilities", "draft_plan", "prove_graph", "prove_ranks")
    for module, names in steps.items():
        code = inspect.getsource(module).partition('"""\n\n')[2]
        assert [name for name in names if f"{name}(" not in code] == []


ELSEWHERE = {"inference/model.py"}  # in DeepSeek's repository
NAMED_FILE = re.compile(r"`((?:[\w-]+/)*[\w-]+(?:\.py|/))`")


def missing_files(text: str, place: Path) -> list[str]:
    """Files and folders that docstrings and comments name, and that are not there: below the root, or beside."""
    tops = (ROOT, ROOT / "autoplan", ROOT / "rules", ROOT / "tests", *place.parents)
    names = set(NAMED_FILE.findall(text)) - ELSEWHERE
    return sorted(name for name in names if not any((top / name).exists() for top in tops))


@pytest.mark.parametrize("folder", ["autoplan", "tests", "examples"])
def test_code_names_files_that_are_there(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        assert not missing_files(path.read_text(encoding="utf-8"), path), named(path)


def test_the_check_of_named_files_can_fail() -> None:
    text = "as ~dialects/~ and ~tests/layer_law.py~ say, and ~docs/~".replace("~", "`")
    assert missing_files(text, Path(__file__)) == ["dialects/", "tests/layer_law.py"]


def test_the_check_of_sessions_can_fail() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", "wrong", 0)
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed


def test_reference_pages_hold_every_public_name(tmp_path: Path) -> None:
    """What `make docs` runs, and what comes out."""
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "-m pdoc" in line)
    words = [word.strip("'") for word in line.split("-m pdoc")[1].split("-o")[0].split()]
    made = run_apart(tmp_path, (script, "pdoc", *words, "-o", str(tmp_path)))
    assert made.returncode == 0, made.stderr
    page = (tmp_path / "autoplan.html").read_text(encoding="utf-8")
    missing = [name for name in autoplan.__all__ if f'id="{name}"' not in page and not name.startswith("__")]
    assert not missing


def test_the_frameworks_table_is_what_its_list_says_and_every_row_names_a_test() -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8")
    assert page == with_table(page), "run: PYTHONPATH=tests/helpers python -m host_table docs/frameworks.md"
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "autoplan").rglob("*.py"))
    named = {row.shown_by for row in ROWS} | set(re.findall(r"`(test_\w+\.py::test_\w+)`", page))
    files = {path.name: path for path in (ROOT / "tests" / "execute").rglob("test_*.py")}
    for name in named:
        file, _, function = name.partition("::")
        assert f"def {function}(" in files[file].read_text(encoding="utf-8"), name
    for row in ROWS:
        assert (row.verdict == "not supported") == bool(row.error) and row.error in source, row
