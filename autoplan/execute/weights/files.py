"""Read a folder of safetensors files by ranges of rows. Pickle files are never opened: they run code."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from autoplan.common.conventions import conventions
from autoplan.common.errors import SourceError

_MANY_RUNS = 64  # beyond this, one read of the whole span and an index are faster than a read per run


class CheckpointFiles:
    """The tensors of a folder by their names in the files."""

    def __init__(self, folder: str | Path) -> None:
        if not isinstance(folder, str | PathLike):
            raise SourceError(f"{folder!r} is no folder", hint="pass the folder that holds the .safetensors files")
        self.folder = Path(folder)
        self._open: dict[str, Any] = {}
        self._file_of = _find(self.folder)
        self._stored_as: dict[str, str] = {}  # renamed tensors: name -> key in the file
        # Every file must open and hold the tensors that the index lists.
        keys_in = {file: set(_opened(self.folder / file).keys()) for file in dict.fromkeys(self._file_of.values())}
        absent = [key for key, file in self._file_of.items() if key not in keys_in[file]]
        if absent:
            raise SourceError(
                f"the index of {self.folder} lists {absent[0]} in {self._file_of[absent[0]]}, which does not contain it"
                + (f" (and {len(absent) - 1} more)" if len(absent) > 1 else ""),
                hint="the files and the index belong to different downloads",
            )

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self._file_of)

    def call(self, names: Mapping[str, str]) -> None:
        """Rename tensors from now on; those renamed to "" are left out."""
        self._stored_as |= {new: self._stored_as.get(old, old) for old, new in names.items() if new}
        self._file_of = {name: file for key, file in self._file_of.items() if (name := names.get(key, key))}

    def headers(self) -> dict[str, str]:
        """Return the metadata of all files: a quantisation method may describe its tensors there."""
        files = dict.fromkeys(self._file_of.values())
        return {key: text for file in files for key, text in (_opened(self.folder / file).metadata() or {}).items()}

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._slice(key).get_shape())

    def dtype(self, key: str) -> torch.dtype:
        source = self._slice(key)  # an empty slice has the dtype of the tensor
        return (source[:0] if source.get_shape() else self.read(key)).dtype

    def says_nothing(self, key: str) -> bool:
        """Return whether a tensor may be left out without a loss."""
        return False

    def form(self, key: str) -> torch.Tensor:
        """Return a meta tensor of the same shape and dtype: enough to try a conversion."""
        return torch.empty(self.shape(key), dtype=self.dtype(key), device="meta")

    def read(self, key: str, rows: Mapping[int, Sequence[int]] | None = None) -> torch.Tensor:
        """Return the tensor, or the part of it with these rows along these dims."""
        if not rows:
            return self._handle(key).get_tensor(self._stored_as.get(key, key))
        source = self._slice(key)
        index: list[Any] = [slice(None)] * len(source.get_shape())
        scattered: list[int] = []
        for dim, wanted in rows.items():
            index[dim] = slice(min(wanted), max(wanted) + 1) if len(wanted) else slice(0, 0)
            scattered += [dim] if len(list(runs(wanted))) > 1 else []
        if not scattered:
            return source[tuple(index)]
        first, ranges = scattered[0], list(runs(rows[scattered[0]]))
        if len(ranges) <= _MANY_RUNS:
            before, after = index[:first], index[first + 1 :]
            pieces = [source[tuple([*before, slice(run.start, run.stop), *after])] for run in ranges]
            rows_read = torch.cat(pieces, first)
            scattered = scattered[1:]
        else:
            rows_read = source[tuple(index)]
        for dim in scattered:
            rows_read = rows_read.index_select(dim, torch.tensor(rows[dim]) - min(rows[dim]))
        return rows_read

    def _slice(self, key: str) -> Any:
        return self._handle(key).get_slice(self._stored_as.get(key, key))

    def _handle(self, key: str) -> Any:
        file = self._file_of[key]
        if file not in self._open:
            self._open[file] = _opened(self.folder / file)
        return self._open[file]


def runs(rows: Sequence[int]) -> Iterator[range]:
    """Yield maximal ranges of consecutive rows.

    >>> list(runs([0, 1, 4, 5, 6]))
    [range(0, 2), range(4, 7)]
    """
    cuts = [0, *(i for i, (a, b) in enumerate(pairwise(rows), 1) if b != a + 1), len(rows)]
    for start, stop in pairwise(cuts):
        if stop > start:
            yield range(rows[start], rows[stop - 1] + 1)


def _find(folder: Path) -> dict[str, str]:
    """Map tensors to files as transformers does: model.safetensors alone, else what an index says, else all files
    (`save.py` relies on that order)."""
    if not folder.is_dir():
        raise SourceError(f"no folder {folder}", hint="pass the folder that holds the .safetensors files")
    indexes, single = sorted(folder.glob("*.safetensors.index.json")), folder / "model.safetensors"
    # Beside an index, that file may be damaged, or one of several.
    if single.is_file() and (not indexes or _is_whole(single, indexes)):
        return _from_files([single])
    if len(indexes) > 1:
        raise SourceError(f"{folder} has {len(indexes)} index files: {', '.join(path.name for path in indexes)}")
    if indexes:
        return _from_index(indexes[0])
    files = sorted(file for file in folder.glob("*.safetensors") if not file.name.startswith("."))
    if files:
        return _from_files(files)
    pickles = sorted(path.name for suffix in ("bin", "pt", "pth", "ckpt") for path in folder.glob(f"*.{suffix}"))
    if pickles:
        raise SourceError(
            f"{folder} holds only pickle files ({pickles[0]}), which can run code when opened",
            hint=f"convert them to safetensors, for instance with {conventions().saving}",
        )
    raise SourceError(f"{folder} holds no .safetensors files")


def _is_whole(single: Path, indexes: list[Path]) -> bool:
    try:
        _opened(single)
    except SourceError:
        return False
    return not any(single.name in _weight_map(index).values() for index in indexes)


def _opened(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except (SafetensorError, OSError, ValueError) as error:  # OSError: an empty file cannot be mapped
        raise SourceError(
            f"{file} is damaged or not a safetensors file: {error}", hint="complete the download, or save it again"
        ) from error


def _from_index(index: Path) -> dict[str, str]:
    files = _weight_map(index)
    for key, file in files.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise SourceError(f"{index} lists {key} in {file!r}, which is not a .safetensors file")
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts or "\\" in file or "\0" in file:
            raise SourceError(
                f"{index} lists {key} in {file!r}, outside its folder",
                hint="a checkpoint is one folder; load this one only if you trust its source",
            )
    absent = sorted({file for file in files.values() if not (index.parent / file).is_file()})
    if absent:
        raise SourceError(
            f"{index.name} lists {len(set(files.values()))} files, of which {len(absent)} are missing: {absent[0]}",
            hint="complete the download",
        )
    return files


def _weight_map(index: Path) -> dict[str, str]:
    """Return the weight map of an index: {name of a tensor: file}."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        weight_map = dict(pairs)
        if len(weight_map) != len(pairs):
            raise ValueError("duplicate key")
        return weight_map

    try:
        data = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=once)
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{index} is not a safetensors index: {error}", hint="complete the download") from error
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f'{index} is not a safetensors index: it has no "weight_map" of tensors to files')
    return weight_map


def _from_files(files: list[Path]) -> dict[str, str]:
    file_of: dict[str, str] = {}
    for file in files:
        keys = list(_opened(file).keys())
        twice = next((key for key in keys if key in file_of), None)
        if twice is not None:
            raise SourceError(f"{twice} is in both {file_of[twice]} and {file.name}", hint="keep one, or add an index")
        file_of.update((key, file.name) for key in keys)
    if not file_of:
        raise SourceError(f"{', '.join(file.name for file in files)}: contains no tensors")
    return file_of
