"""The documents of `rules/quantised`: how each scheme stores a weight, and by which words others ask for it. No code
names a scheme by its id."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoplan.common.errors import SourceError
from autoplan.common.files.decode import misshapen
from autoplan.common.files.plain import NotPlain, read_plain
from autoplan.common.rules_folder import rules_folder

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
