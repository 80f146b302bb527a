"""Who may import whom. One table, and every import of every file is read against it, those inside functions too.

Rooms stand in the order of the table: an import goes down or stays in its room, never up, and no files import each
other in a circle. Some rooms see less than all that lies below them. Each check is shown able to fail.
"""

from __future__ import annotations

import ast
import re
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
    "capture": ("values", "common", "patches", "ops"),
    "hf": ("values", "common", "patches", "ops", "capture", "analyse"),
    "execute": ("values", "common", "patches", "ops"),
    "planning": None,
    "plan_cache": None,
    "check": None,
    "api": None,
    "once": None,
    "doctor": ("common", "patches", "hf"),
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


def rooms_of_page(text: str) -> list[str]:
    """The rooms in the order of the first table of architecture.md."""
    rows = re.findall(r"^\| `([\w./]+)` \|", text, re.MULTILINE)
    return [_FRONT.get(name, name) for name in (row.removesuffix("/").removesuffix(".py") for row in rows)]


def test_the_page_has_the_same_table() -> None:
    """And the check can fail."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert rooms_of_page(page) == list(ROOMS)
    assert rooms_of_page(page.replace("| `once.py` |", "| once |")) != list(ROOMS)


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


def folders(package: Path = PACKAGE) -> dict[str, str]:
    """Every room and every folder in one, with what its `__init__` says of it."""
    found = {path.parent for path in package.rglob("*.py") if path.parent != package}
    said = {path: ast.get_docstring(ast.parse((path / "__init__.py").read_text(encoding="utf-8"))) for path in found}
    return {path.relative_to(package).as_posix(): said[path] or "" for path in sorted(found)}


def may(room: str) -> set[str]:
    """The rooms that the table lets a room import, itself left out."""
    named = ROOMS[room]
    order = list(ROOMS)
    return set(order[: order.index(room)] if named is None else named)


def meant(folder: str, text: str) -> set[str]:
    """The rooms that a docstring means by what stands behind `May import:`. A folder stands for its own files."""
    room = folder.split("/")[0]
    found: set[str] = set()
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        words = part.split()
        match words:
            case ["nothing", "of", "ours"]:
                pass
            case ["all", "rooms", "below"]:
                found |= may(room)
            case ["all", "rooms", "below", other]:
                found |= may(other)
            case ["what", other, "may"]:
                found |= may(other) | {other}
            case ["its", "own", "files"]:
                found.add(folder)
            case [other]:
                found.add(other)
            case _:
                raise AssertionError(f"{folder}: 'May import: {text}' is no list of rooms")
    return found


def unsaid(folder: str, text: str) -> list[str]:
    """What a docstring does not say, or says otherwise than the table."""
    flat = " ".join(text.split())
    missing = [part for part in ("In: ", "Out: ", "May import: ") if part not in flat]
    if missing:
        return [f"{folder} does not say {part.strip()}" for part in missing]
    room, rooms = folder.split("/")[0], meant(folder, re.findall(r"May import: ([^.;]*)", flat)[0])
    if folder == room and rooms != may(room):
        return [f"{folder} says it may import {sorted(rooms)}, the table {sorted(may(room))}"]
    over = rooms - may(room) - {room, folder}
    return [f"{folder} says it may import {sorted(over)}: {room} may not"] if over else []


def overstepped(folder: str, text: str, found: list[tuple[str, str]]) -> list[str]:
    """Imports of a folder that its own docstring does not allow, where that is narrower than the table."""
    rooms = meant(folder, re.findall(r"May import: ([^.;]*)", " ".join(text.split()))[0])
    inside = f"autoplan.{folder.replace('/', '.')}"
    return [
        f"{source} imports {target}: {folder} says otherwise"
        for source, target in found
        if f"{source}.".startswith(f"{inside}.")
        and not f"{target}.".startswith(f"{inside}.")
        and room_of(target) not in rooms
    ]


def test_rooms_say_what_comes_in_what_goes_out_and_what_they_import() -> None:
    said = folders()
    assert [fault for folder, text in said.items() for fault in unsaid(folder, text)] == []
    nested, found = {folder: text for folder, text in said.items() if "/" in folder}, arrows()
    assert [fault for folder, text in nested.items() for fault in overstepped(folder, text, found)] == []


@pytest.mark.parametrize(
    ("folder", "text", "what"),
    [
        ("emit", "In: a Plan. Out: text.", "does not say May import:"),
        ("emit", "Out: text. May import: values, common, decide.", "does not say In:"),
        ("emit", "In: a Plan. Out: text. May import: values, common.", "the table"),
        ("emit/tables", "In: a Plan. Out: text. May import: what emit may,\ncheck.", "emit may not"),
        ("check", "In: a Plan. Out: a Report. May import: all rooms below api.", "the table"),
    ],
)
def test_the_check_of_docstrings_can_fail(folder: str, text: str, what: str) -> None:
    assert any(what in fault for fault in unsaid(folder, text))


def test_the_check_of_what_folders_import_can_fail() -> None:
    found = [("autoplan.forecast.recording.record", "autoplan.forecast.choose")]
    assert overstepped("forecast/recording", folders()["forecast/recording"], found)
    assert not overstepped("forecast/recording", "May import: what forecast may.", found)


def test_rooms_are_small() -> None:
    """At most about 15 files on one level."""
    for folder in folders():
        files = [path for path in (PACKAGE / folder).glob("*.py") if path.name != "__init__.py"]
        assert len(files) <= 17, f"{folder} holds {len(files)} files"
