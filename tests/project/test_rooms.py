"""Who may import whom. One table, and every import of every file is read against it, those inside functions too.

Rooms stand in the order of the table: an import goes down or stays in its room, never up, and no files import each
other in a circle. Some rooms see less than all that lies below them. Each check is shown able to fail.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "autoplan"

# From the ground up. What a room may import: all rooms before it, or those that are named.
ROOMS: dict[str, tuple[str, ...] | None] = {
    "values": (),
    "common": None,
    "patches": None,
    "axes": ("values", "common"),
    "ops": ("values", "common", "axes"),
    "analyse": ("values", "common", "axes", "ops"),
    "decide": ("values", "common", "axes", "ops", "analyse"),
    "emit": ("values", "common", "decide"),
    "capture": ("values", "common", "patches"),
    "hf": ("values", "common", "patches", "capture", "analyse"),
    "execute": ("values", "common", "patches", "ops"),
    "planning": None,
    "plan_cache": None,
    "check": None,
    "api": None,
    "once": None,
    "frameworks": None,
    "forecast": None,  # plans for a mesh, and shards a copy without storage as parallelize does
    "deprecated": (),
    "testing": ("values", "common", "check"),
    "conveniences": None,
    "the package": None,
    "cli": None,
}
_FRONT = {"__init__": "the package", "__main__": "cli", "version": "values"}


def module_name(path: Path, package: Path = PACKAGE) -> str:
    return ".".join((package.name, *path.relative_to(package).with_suffix("").parts)).removesuffix(".__init__")


def room_of(module: str) -> str:
    parts = module.split(".")
    name = parts[1] if len(parts) > 1 else "__init__"
    return _FRONT.get(name, name)


def imports_of(path: Path, modules: set[str]) -> Iterator[str]:
    """Every module of ours that a file imports, at any depth."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "autoplan":
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in modules else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "autoplan")


def arrows(package: Path = PACKAGE) -> list[tuple[str, str]]:
    paths = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    return [(name, target) for name, path in paths.items() for target in imports_of(path, set(paths))]


def faults(found: list[tuple[str, str]]) -> list[str]:
    """What the table does not allow, and circles."""
    order = list(ROOMS)
    said = []
    for source, target in found:
        room, other = room_of(source), room_of(target)
        if room == other:
            continue
        allowed = ROOMS[room] if ROOMS[room] is not None else order[: order.index(room)]
        if other not in allowed:
            said.append(f"{source} imports {target}: {room} may not know {other}")
    graph = nx.DiGraph(found)
    said += [f"a circle: {sorted(c)}" for c in nx.strongly_connected_components(graph) if len(c) > 1]
    return said


def test_no_import_runs_up_and_there_is_no_circle() -> None:
    assert faults(arrows()) == []


PURE = ("values", "axes", "ops", "analyse", "decide", "emit")
HEAVY = {"torch", "transformers"}


def heavy_imports(path: Path) -> list[str]:
    """Imports of torch and its like in a file, those inside functions and for type checkers too."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return [name for name in named if name.split(".")[0] in HEAVY]


def test_the_core_names_no_torch() -> None:
    found = {str(p.relative_to(PACKAGE)): heavy_imports(p) for room in PURE for p in (PACKAGE / room).rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize("text", ["def f():\n    from torch import nn\n", "if TYPE_CHECKING:\n    import torch.fx\n"])
def test_the_check_of_the_core_can_fail(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(text)
    assert heavy_imports(tmp_path / "a.py")


def test_every_room_is_in_the_table() -> None:
    there = {room_of(module_name(path)) for path in PACKAGE.rglob("*.py")}
    assert there == set(ROOMS)


@pytest.mark.parametrize(
    ("file", "text", "what"),
    [
        ("values/plan.py", "def save():\n    from autoplan.emit.explain import explain\n", "values may not know emit"),
        ("execute/apply.py", "import autoplan.analyse.solve\n", "execute may not know analyse"),
        ("decide/a.py", "from autoplan.decide import b\n", "a circle"),
    ],
)
def test_the_check_can_fail(tmp_path: Path, file: str, text: str, what: str) -> None:
    package = tmp_path / "autoplan"
    for name in ("emit/explain.py", "analyse/solve.py", "decide/b.py", file):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text if name == file else "")
    (package / "decide/b.py").write_text("if True:\n    from autoplan.decide import a\n")
    if file != "decide/a.py":
        (package / "decide/b.py").write_text("")
    assert any(what in said for said in faults(arrows(package)))


def test_rooms_are_small_and_say_what_they_are() -> None:
    """At most about 15 files on one level, and a docstring that says what comes in and what goes out."""
    for folder in (path for path in PACKAGE.rglob("*") if path.is_dir() and list(path.glob("*.py"))):
        files = [path for path in folder.glob("*.py") if path.name != "__init__.py"]
        limit = 40 if folder.name == "checks" else 17  # one file for each check of the audit
        assert len(files) <= limit, f"{folder.relative_to(PACKAGE)} holds {len(files)} files"
        said = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
        assert len(said) > 60, f"{folder.relative_to(PACKAGE)} does not say what it is"
