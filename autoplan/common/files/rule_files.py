"""Find rule files: the call's `rules=` folder, those of AUTOPLAN_RULES, then ours; the first that has a document
counts. A folder has any of `roles/`, `plans/`, `inputs/`, `quantised/`, `kernels/` and `defaults.toml`.

The documents of `quantised/` say how each scheme stores a weight, and by which words others ask for it. No code names a
scheme by its id.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoplan.common.errors import AutoplanError, SourceError
from autoplan.common.files.decode import misshapen
from autoplan.common.files.plain import NotPlain, read_plain

VARIABLE = "AUTOPLAN_RULES"
_PARTS = ("roles", "plans", "inputs", "quantised", "kernels", "defaults.toml")
_of_the_call: list[Path] = []


def rules_folders() -> tuple[Path, ...]:
    """Return all folders of rules, in order of precedence."""
    named = [Path(text) for text in os.environ.get(VARIABLE, "").split(os.pathsep) if text]
    for path in named:
        _refuse_other(path, f"{VARIABLE} names")
    return (*reversed(_of_the_call), *named, rules_folder())


@contextmanager
def with_rules(folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Put a folder of rules before all others, for one call."""
    if folder is None:
        yield
        return
    _refuse_other(Path(folder), "rules is")
    _of_the_call.append(Path(folder).absolute())
    try:
        yield
    finally:
        _of_the_call.pop()


def _refuse_other(path: Path, what: str) -> None:
    if not any((path / part).exists() for part in _PARTS):
        hint = f"such a folder has some of {', '.join(_PARTS)}"
        raise AutoplanError(f"{what} {path}, which is not a folder of rules", hint=hint)


@lru_cache(maxsize=1)
def rules_folder() -> Path:
    """Return the folder that comes with autoplan."""
    package = Path(__file__).resolve().parents[2]
    places = (package / "_rules", package.parent / "rules")
    for place in places:
        if (place / "inputs").is_dir():
            return place
    raise AutoplanError(
        f"autoplan's rule files are missing: looked in {places[0]} and {places[1]}",
        hint="reinstall autoplan; the wheel contains them",
    )


# Modules that a user names are found where Python finds them, and in the current folder.


def from_here() -> list[str]:
    """Return `sys.path` with the current folder."""
    folder = os.getcwd()
    return [*sys.path] if folder in sys.path or "" in sys.path else [folder, *sys.path]


@contextmanager
def importable_here() -> Iterator[None]:
    """Make modules of the current folder importable, as `python -m` does."""
    before, inside = sys.path[:], from_here()
    added = inside[0] if inside != before else None
    if added is not None:
        sys.path.insert(0, added)
    try:
        yield
    finally:
        if added is not None and added in sys.path:
            sys.path.remove(added)


_NEEDED = {"title", "method", "tensors"}
_KEYS = _NEEDED | {"form", "dequantise", "state", "transposed_stacks", "linears_only"}
_TENSOR_KEYS = {"name", "dtype", "dims", "when", "stacked"}


def scheme_files() -> Mapping[str, Mapping[str, Any]]:
    """Return all schemes, by their ids: the names of their files."""
    return _files(rules_folder())


@lru_cache(maxsize=4)
def _files(folder: Path) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {}
    for path in sorted((folder / "quantised").glob("*.toml")):
        data = read_plain(path, NotPlain(error=SourceError, hint="fix the TOML"), notation="toml")
        if problem := misshapen(data, {"tensors": [{}]}):
            raise SourceError(f"{path}: {problem}", hint="see rules/quantised")
        missing = _NEEDED - set(data)
        odd = missing | set(data) - _KEYS | {key for t in data.get("tensors", ()) for key in set(t) - _TENSOR_KEYS}
        if odd:
            raise SourceError(f"{path}: unknown or missing {', '.join(sorted(odd))}", hint="see rules/quantised")
        files[path.stem] = data
    return files
