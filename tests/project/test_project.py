"""What holds for the project as a whole: who may import whom, which names are public, what the wheel carries.

Each check is shown able to fail, on a small example of what it is there to catch.
"""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "autoplan"

# The pure part of the path: plain data in, plain data out.
PURE = (
    "values",
    "common/layout",
    "common/errors",
    "common/patterns",
    "common/files/rule_files",
    "common/files/decode",
    "version",
    "common/conventions",
    "hf/conventions",
    "conveniences",
    "axes",
    "ops",
    "analyse",
    "decide",
    "emit",
    "cli",
)
HEAVY = ("torch", "transformers", "numpy")

PUBLIC = (
    "Applied",
    "AutoplanError",
    "CaptureError",
    "Change",
    "Checkpointing",
    "Choice",
    "Cost",
    "CutsOf",
    "DataParallel",
    "Device",
    "Drawn",
    "DryRun",
    "Entry",
    "Estimate",
    "ExportError",
    "Exported",
    "Fed",
    "Finding",
    "FlowPart",
    "IndivisibleError",
    "Keywords",
    "MadeFor",
    "MegatronCall",
    "MemoryParts",
    "Model",
    "Obstacle",
    "Options",
    "OutsideError",
    "PackedWeight",
    "Plan",
    "PlanFileError",
    "PlanMismatchError",
    "PlanRefusedError",
    "PlanSource",
    "Proof",
    "RankGroup",
    "Ranks",
    "Replicated",
    "Report",
    "Runtime",
    "Sent",
    "SourceError",
    "Stack",
    "StepTime",
    "TensorParallel",
    "TopLogits",
    "Traffic",
    "Trial",
    "UnprovenPlanWarning",
    "UntestedVersionWarning",
    "WhatIf",
    "Wish",
    "__version__",
    "applied",
    "audit",
    "choose",
    "clip_gradients",
    "dry_run",
    "estimate",
    "full_tensors",
    "fx_graph",
    "gather_logits",
    "global_norm",
    "hand_over",
    "layers",
    "load_plan",
    "load_weights",
    "megatron_call",
    "packed_model",
    "parallelize",
    "plan",
    "plan_once",
    "rebuild_buffers",
    "register_plan",
    "save_weights",
    "shard_batch",
    "to_local",
    "unshard",
    "verify",
    "vocab_parallel_argmax",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_entropy",
    "vocab_parallel_gather",
    "vocab_parallel_logprobs",
    "vocab_parallel_logprobs_from_hidden",
    "vocab_parallel_sample",
    "vocab_parallel_topk",
)
COMMANDS = (
    "audit", "calibrate", "choose", "compare", "doctor", "dryrun", "estimate", "explain", "export", "layers", "plan",
    "report", "rules", "scoreboard", "verify",
)  # fmt: skip


def modules_of(*names: str) -> list[str]:
    """Dotted names of all modules in these packages or files of autoplan."""
    found: list[str] = []
    for name in names:
        folder, file = PACKAGE / name, PACKAGE / f"{name}.py"
        paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [file]
        found += [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths]
    return found


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=ROOT)


def import_without(blocked: tuple[str, ...], modules: list[str]) -> subprocess.CompletedProcess[str]:
    """Import `modules` in a Python where importing any of `blocked` raises."""
    block = f"import sys; sys.modules.update(dict.fromkeys({blocked!r}))"  # None in sys.modules means: not to be had
    return python(f"{block}\nimport importlib\nfor name in {modules!r}: importlib.import_module(name)")


# ------------------------------------------------------------------------------------------------ layering


def test_the_pure_core_imports_no_torch() -> None:
    done = import_without(HEAVY, ["autoplan", *modules_of(*PURE)])
    assert done.returncode == 0, done.stderr


def test_the_check_above_can_fail() -> None:
    done = import_without(HEAVY, ["autoplan.capture.recorder"])
    assert done.returncode != 0 and "torch" in done.stderr


# ------------------------------------------------------------------------------------------------ frozen lists


def test_public_names() -> None:
    import autoplan

    assert tuple(sorted(autoplan.__all__)) == PUBLIC
    for name in PUBLIC:
        assert getattr(autoplan, name).__doc__, f"autoplan.{name} has no docstring"


def test_commands() -> None:
    import typer

    from autoplan.cli.app import app

    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert tuple(sorted(commands)) == COMMANDS
    assert all(command.help for command in commands.values())


# ------------------------------------------------------------------------------------------------ what is shipped


def test_one_version() -> None:
    from autoplan.version import __version__

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["version"]["path"] == "autoplan/version.py"
    assert "version" in project["project"]["dynamic"]
    assert __version__.count(".") == 2


def built(kind: str, folder: Path) -> Path:
    """A wheel as a user's pip would build it, without network: hatchling is one of the test tools."""
    assert importlib.util.find_spec("hatchling"), "hatchling is missing: pip install -e '.[dev]'"
    done = python(f"from hatchling.build import build_{kind}; print(build_{kind}({str(folder)!r}))")
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("wheel"))


def rules_seen_from(site: Path, cwd: Path) -> Path:
    """Where autoplan finds its rules when `site` is the only place that it is installed in."""
    code = (
        f"import site; site.addsitedir({str(site)!r})\nfrom autoplan.common.files.rule_files import rules_folder\n"
        "print(rules_folder())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=cwd, timeout=60)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


def test_the_wheel_carries_all_rules_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    paths = [path for kind in ("*.py", "*.pyi", "templates/*.*") for path in PACKAGE.rglob(kind)]
    expected = {f"autoplan/{path.relative_to(PACKAGE).as_posix()}" for path in paths}
    expected |= {"autoplan/py.typed"}
    expected |= {f"autoplan/_rules/{p.relative_to(ROOT / 'rules').as_posix()}" for p in (ROOT / "rules").rglob("*.*")}
    assert names == expected


def test_an_installed_wheel_finds_its_rules(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    assert rules_seen_from(tmp_path / "site", tmp_path / "site") == tmp_path / "site" / "autoplan" / "_rules"


def test_an_editable_install_finds_the_rules_of_the_checkout(tmp_path: Path) -> None:
    zipfile.ZipFile(built("editable", tmp_path)).extractall(tmp_path / "site")
    assert rules_seen_from(tmp_path / "site", tmp_path) == ROOT / "rules"


def test_make_targets_and_ci() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test", "lint", "types"):
        assert f"\n{target}:" in makefile
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, ".ci/run is not executable"
    steps = script.read_text()
    assert all(f"make {target}" in steps for target in ("lint", "types", "test", "demo"))


REPORT = """
%:
\t@echo "$@ python=$(PYTHON) path=$(PATH) rest=$(wildcard rest) folder=$(CURDIR)"
"""


@pytest.mark.parametrize("rest", [False, True])
def test_ci_sees_the_commit_and_the_systems_tools_only(rest: bool, tmp_path: Path) -> None:
    """In a repository of its own whose targets tell what they see."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "python3").symlink_to(sys.executable)
    home = tmp_path / "repository"
    (home / ".ci").mkdir(parents=True)
    (home / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    (home / "Makefile").write_text(REPORT)
    git = ["git", "-C", str(home), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "all"]):
        subprocess.run([*git, *command], check=True)
    if rest:
        (home / "rest").touch()
    folders = f"{tmp_path / 'tools'}:{os.environ['PATH']}"
    done = subprocess.run(["bash", str(home / ".ci" / "run")], capture_output=True, text=True, env={"PATH": folders})
    assert done.returncode == 0, done.stderr
    seen = re.findall(r"^(\S+) python=(.*) path=(.*) rest=(.*) folder=(.*)$", done.stdout, re.MULTILINE)
    lint, *both, test, rest_of_tests = (target for target, *_ in seen)
    assert (lint, test, rest_of_tests) == ("lint", "test", "test-rest") and sorted(both) == ["demo", "types"]
    for _, interpreter, path, found, folder in seen:
        assert Path(interpreter).is_absolute() and Path(interpreter).exists()
        assert all(part.startswith(("/usr/", "/bin", "/sbin")) for part in path.split(":"))
        assert found == "" and (Path(folder) == home) != rest and Path(folder).exists() != rest


def bare_calls(path: Path) -> list[str]:
    """Tools that a file starts by a name that the shell's PATH must know."""
    import ast

    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in SHELLS:
            found.append(ast.unparse(node.func))
        if isinstance(node, ast.List) and node.elts and isinstance(node.elts[0], ast.Constant):
            found += [tool for tool in TOOLS if tool == node.elts[0].value]
    return found


SHELLS = ("os.system", "os.popen", "shutil.which")
TOOLS = ("python", "python3", "pip", "ruff", "mypy", "pytest", "torchrun", "hatch", "accelerate")


@pytest.mark.parametrize("folder", ["autoplan", "tests", "examples"])
def test_tools_are_called_through_the_environment(folder: str) -> None:
    for path in sorted((ROOT / folder).rglob("*.py")):
        assert not bare_calls(path), f"{path.relative_to(ROOT)}: call it by sys.executable -m"


def test_calls_by_bare_names_are_seen(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    file.write_text(
        "os.system('ls')\nsubprocess.run(['ruff', 'check'])\nsubprocess.run([sys.executable, '-m', 'ruff'])\n"
    )
    assert bare_calls(file) == ["os.system", "ruff"]


def idle_marks(path: Path) -> list[str]:
    """Functions that bear marks of tests and are none: the marks do nothing there.

    A test's `skipif` lands so on the function that was put in above it.
    """
    import ast

    functions = [n for n in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(n, ast.FunctionDef)]
    marked = [
        n.name for n in functions if any("needs(" in d or "mark." in d for d in map(ast.unparse, n.decorator_list))
    ]
    return [name for name in marked if not name.startswith("test")]


def test_marks_stand_on_tests(tmp_path: Path) -> None:
    """And the check can fail."""
    assert not {p.name: found for p in (ROOT / "tests").rglob("*.py") if (found := idle_marks(p))}
    shown = tmp_path / "test_it.py"
    shown.write_text('@needs("x")\ndef helper(): ...\n\n@pytest.mark.slow\ndef other(): ...\n')
    assert idle_marks(shown) == ["helper", "other"]


# ------------------------------------------------------------------------------------------------ the README


def readme_tree() -> list[Path]:
    """The paths that the file tree in the README names."""
    block = (ROOT / "README.md").read_text(encoding="utf-8").split("## The tree")[1].split("```")[1]
    paths, folder = [], Path()
    for line in block.strip().splitlines():
        name = line.split()[0]
        folder = folder if line.startswith(" ") else Path(name)
        paths.append(folder / name if line.startswith(" ") else folder)
        paths += [folder / other for other in re.findall(r"[\w.]+(?:/|\.py)(?=:)", line)]
    return paths


def test_the_readme_shows_what_is_there() -> None:
    import autoplan

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [path for path in readme_tree() if not (ROOT / path).exists()] == []
    for folder in (PACKAGE, ROOT / "rules"):
        rooms = {path.name for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"}
        named = {path.name for path in readme_tree() if path.parent.name == folder.name}
        assert rooms - named <= {"__pycache__", "__init__.py", "__main__.py", "version.py"}
    assert len(text.splitlines()) <= 150
    commands = set(re.findall(r"^autoplan (\w+) .*(?:MODEL|RULE|MAPPING)", text, re.MULTILINE))
    assert commands == set(COMMANDS)
    for name in re.findall(r"autoplan\.(\w+)\(", text):
        assert name in autoplan.__all__, name


SHOWING = [path for path in sorted(PACKAGE.rglob("*.py")) if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("path", SHOWING, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_docstrings_tell_the_truth(path: Path) -> None:
    name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    result = doctest.testmod(importlib.import_module(name))
    assert result.attempted and not result.failed
