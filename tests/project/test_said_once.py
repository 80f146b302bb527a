"""What is done is said once: no two functions of the package have the same arguments and the same body."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "autoplan"
LINES = 3  # shorter ones are alike by chance


def said_twice(files: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Places of functions that are word for word the same, whatever they are called."""
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, source in files:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                text = "\n".join(map(ast.unparse, body))
                if len(text.splitlines()) >= LINES:
                    places[ast.unparse(node.args), text].append(f"{name}:{node.lineno} {node.name}")
    return [found for found in places.values() if len(found) > 1]


def test_nothing_is_said_twice() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    found = said_twice((path.relative_to(PACKAGE).as_posix(), path.read_text("utf-8")) for path in paths)
    assert found == [], "say it once, below both"


def test_the_law_can_fail() -> None:
    one = "def one(x):\n    y = x\n    z = y\n    return z\n"
    other = 'def other(x):\n    "As one."\n    y = x\n    z = y\n    return z\n'
    assert said_twice([("a.py", one), ("b.py", other)]) == [["a.py:1 one", "b.py:1 other"]]
    assert not said_twice([("a.py", one), ("b.py", one.replace("z = y", "z = -y"))])
