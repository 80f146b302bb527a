"""Print the size of the package: `python tools/house.py [FOLDER …]`, a row for each folder (default: autoplan's rooms).

lines and files: of Python. functions: how many, and how many of five lines or fewer (decorators and docstrings not
counted). once: private functions whose name is used at one other place of their file. filler: assignments to names that
do not say what they hold.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from dataclasses import astuple, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILLER = frozenset({"found", "one", "known", "held", "told", "said"})
SHORT = 5


@dataclass(frozen=True)
class Size:
    files: int = 0
    lines: int = 0
    functions: int = 0
    short: int = 0
    private: int = 0
    once: int = 0
    assigned: int = 0
    filler: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(*map(sum, zip(astuple(self), astuple(other), strict=True)))


def size_of(source: str) -> Size:
    """Measure one file."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    private = [node.name for node in functions if node.name.startswith("_") and not node.name.startswith("__")]
    uses = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    uses += Counter(node.attr for node in nodes if isinstance(node, ast.Attribute))
    assigned = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return Size(
        files=1,
        lines=len(source.splitlines()),
        functions=len(functions),
        short=sum(length_of(node) <= SHORT for node in functions),
        private=len(private),
        once=sum(uses[name] == 1 for name in private),
        assigned=len(assigned),
        filler=sum(name in FILLER for name in assigned),
    )


def length_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, the docstring left out."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def size_of_folder(folder: Path) -> Size:
    return sum((size_of(path.read_text("utf-8")) for path in sorted(folder.rglob("*.py"))), Size())


def main() -> None:
    folders = [Path(name) for name in sys.argv[1:]] or sorted(
        path for path in (ROOT / "autoplan").iterdir() if path.is_dir() and any(path.rglob("*.py"))
    )
    names = [field.name for field in fields(Size)]
    print(f"{'':28}", *(f"{name:>9}" for name in names))
    for folder in folders:
        print(f"{folder.name:28}", *(f"{number:9,}" for number in astuple(size_of_folder(folder))))
    if not sys.argv[1:]:
        print(f"{'autoplan':28}", *(f"{number:9,}" for number in astuple(size_of_folder(ROOT / "autoplan"))))


if __name__ == "__main__":
    main()
