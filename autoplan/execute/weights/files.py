"""A folder of safetensors files, read by pieces.

The problem: a rank needs a few rows of each weight, and reading whole weights to cut them makes every rank read the
whole model. safetensors can read ranges; a packed layout is a handful of ranges. Pickle files are never opened: they
run code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from autoplan.common.conventions import conventions
from autoplan.common.errors import SourceError

__all__ = ["CheckpointFiles", "runs"]

_MANY_RUNS = 64  # beyond this, one read of the whole span and an index are faster than a read per run


class CheckpointFiles:
    """The tensors of a folder by their names in the files."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file_of = _find(self.folder)
        self._open: dict[str, Any] = {}

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._handle(key).get_slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """As safetensors calls it."""
        return str(self._handle(key).get_slice(key).get_dtype())

    def read(self, key: str, rows: Mapping[int, Sequence[int]] | None = None) -> torch.Tensor:
        """The tensor, or the part of it with these rows along these dims (at most one of them not one range)."""
        if not rows:
            return self._handle(key).get_tensor(key)
        source = self._handle(key).get_slice(key)
        index: list[Any] = [slice(None)] * len(source.get_shape())
        scattered: int | None = None
        for dim, wanted in rows.items():
            ranges = list(runs(wanted))
            if len(ranges) == 1:
                index[dim] = slice(ranges[0].start, ranges[0].stop)
            elif not ranges:
                index[dim] = slice(0, 0)
            else:
                assert scattered is None, f"{key}: two dims with scattered rows"
                scattered = dim
        if scattered is None:
            return source[tuple(index)]
        return _read_scattered(source, index, scattered, rows[scattered])

    def _handle(self, key: str) -> Any:
        from safetensors import safe_open

        file = self._file_of[key]
        if file not in self._open:
            self._open[file] = safe_open(str(self.folder / file), framework="pt", device="cpu")
        return self._open[file]


def runs(rows: Sequence[int]) -> Iterator[range]:
    """Maximal ranges of consecutive rows.

    >>> list(runs([0, 1, 4, 5, 6]))
    [range(0, 2), range(4, 7)]
    """
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(rows), 1) if b != a + 1), len(rows)]
    for start, stop in pairwise(cuts):
        if stop > start:
            yield range(rows[start], rows[stop - 1] + 1)


def _read_scattered(source: Any, index: list[Any], dim: int, rows: Sequence[int]) -> torch.Tensor:
    ranges = list(runs(rows))
    if len(ranges) <= _MANY_RUNS:
        pieces = [source[tuple(index[:dim] + [slice(r.start, r.stop)] + index[dim + 1 :])] for r in ranges]
        return torch.cat(pieces, dim)
    first = min(rows)
    span = source[tuple(index[:dim] + [slice(first, max(rows) + 1)] + index[dim + 1 :])]
    return span.index_select(dim, torch.tensor([row - first for row in rows]))


# ---------------------------------------------------------------------------------------------------- which files


def _find(folder: Path) -> dict[str, str]:
    """Name of each tensor -> file that has it. An index file is believed; else model.safetensors; else all files."""
    if not folder.is_dir():
        raise SourceError(f"no folder {folder}", hint="give the folder that holds the .safetensors files")
    indexes = sorted(folder.glob("*.safetensors.index.json"))
    if len(indexes) > 1:
        raise SourceError(f"{folder} has {len(indexes)} index files: {', '.join(path.name for path in indexes)}")
    if indexes:
        return _from_index(indexes[0])
    files = sorted(folder.glob("*.safetensors"))
    if any(file.name == "model.safetensors" for file in files):
        files = [folder / "model.safetensors"]
    if not files:
        raise _no_files(folder)
    return _from_files(files)


def _from_index(index: Path) -> dict[str, str]:
    try:
        found = json.loads(index.read_text())["weight_map"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise SourceError(f"{index} is not a safetensors index: {error!r}") from error
    absent = sorted({file for file in found.values() if not (index.parent / file).is_file()})
    if absent:
        raise SourceError(
            f"{index.name} lists {len(set(found.values()))} files, of which {len(absent)} are absent: {absent[0]}",
            hint="complete the download",
        )
    return dict(found)


def _from_files(files: list[Path]) -> dict[str, str]:
    from safetensors import SafetensorError, safe_open

    found: dict[str, str] = {}
    for file in files:
        try:
            with safe_open(str(file), framework="pt") as opened:
                keys = list(opened.keys())
        except SafetensorError as error:
            raise SourceError(f"{file} is not a safetensors file: {error}") from error
        twice = next((key for key in keys if key in found), None)
        if twice is not None:
            raise SourceError(f"{twice} is in both {found[twice]} and {file.name}", hint="keep one, or add an index")
        found.update((key, file.name) for key in keys)
    return found


def _no_files(folder: Path) -> SourceError:
    pickles = sorted(path.name for suffix in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{suffix}"))
    if pickles:
        return SourceError(
            f"{folder} holds only pickle files ({pickles[0]}), which run code when opened",
            hint=f"convert them to safetensors, for instance with {conventions().saving}",
        )
    return SourceError(f"{folder} holds no .safetensors files")
