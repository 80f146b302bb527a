"""Which private names of other packages autoplan's own files use: read from the source, so that no list can forget one.

Seen are dotted names that begin with another package (`torch._C.x`, whatever it was imported as), attributes that begin
with an underscore and are not defined in the same file, and the same as text in `getattr`, `hasattr`, `vars(x)[...]`
and `x.__dict__`. Names of ops ("_softmax") are data and no private names.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

__all__ = ["FOREIGN", "PACKAGE", "dotted_name", "files", "foreign_names", "private_uses"]

PACKAGE = Path(__file__).resolve().parents[3] / "autoplan"
FOREIGN = ("torch", "transformers", "peft", "huggingface_hub", "megatron_fsdp", "safetensors", "multiprocessing")
_DOCUMENTED = frozenset(("_fields", "_getframe", "_current_frames"))  # of Python's own
_BY_TEXT = ("getattr", "hasattr", "setattr", "delattr")


@cache
def files() -> dict[str, str]:
    """Every source file of the package, by its path from the repository's root, but for those that hold canaries.

    To try a private name a canary needs others, that nothing else relies on.
    """
    return {
        path.relative_to(PACKAGE.parent).as_posix(): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.name.startswith("private_")
    }


@cache
def private_uses(source: str) -> set[str]:
    """Private names in one file: dotted where it is known whose they are, else the attribute alone."""
    tree = ast.parse(source)
    names, own = foreign_names(tree), _own_names(tree)
    found = {name for name in names.values() if _is_private(name)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = dotted_name(node, names)
            if dotted is None and _private_word(node.attr) and node.attr not in own:
                found.add(node.attr)
            elif dotted is not None and id(node) not in inner and _is_private(dotted):
                found.add(dotted)
    return found | {text for text in _texts(tree) if _private_word(text)}


def foreign_names(tree: ast.AST) -> dict[str, str]:
    """What each name that is imported from another package means, in full."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in FOREIGN:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            for alias in node.names:
                top = alias.name.split(".")[0]
                if top in FOREIGN:
                    found[alias.asname or top] = alias.name if alias.asname else top
    return found


def dotted_name(node: ast.AST, names: dict[str, str]) -> str | None:
    """The full name of an expression that begins with another package; None for any other."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        base = dotted_name(node.value, names)
        return f"{base}.{node.attr}" if base is not None else None
    return None


def _own_names(tree: ast.AST) -> set[str]:
    """Attributes with an underscore that the file's own classes have."""
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            for one in ast.walk(target):
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
                    found.add(one.attr)
                elif isinstance(one, ast.Name):
                    found.add(one.id)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name | ast.Attribute):
            found.add(node.target.id if isinstance(node.target, ast.Name) else node.target.attr)
    return found


def _texts(tree: ast.AST) -> Iterator[str]:
    """Names of attributes that are given as text."""
    for node in ast.walk(tree):
        given: ast.AST | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _BY_TEXT:
            given = node.args[1]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_namespace(node.func.value):
            given = node.args[0] if node.args else None
        elif isinstance(node, ast.Subscript) and _is_namespace(node.value):
            given = node.slice
        if isinstance(given, ast.Constant) and isinstance(given.value, str):
            yield given.value


def _is_namespace(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "vars"
    return isinstance(node, ast.Attribute) and node.attr == "__dict__"


def _is_private(dotted: str) -> bool:
    return any(_private_word(word) for word in dotted.split("."))


def _private_word(word: str) -> bool:
    ours = word.startswith("_autoplan") or word in _DOCUMENTED
    return word.startswith("_") and not word.startswith("__") and not ours
