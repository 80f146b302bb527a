"""New files of a checkpoint next to the old ones, and one switch from these to those.

The problem: whoever is killed while a checkpoint is written over an older one must be left with one of the two, whole.
So new files are written under names that nothing reads, brought to the disk, and given names that the old checkpoint
does not have. Then one operation on one name decides what the folder holds, as `files.py` and transformers read it
(`model.safetensors` if it is there, else the files that the index names):

    to one file           model.safetensors is replaced, or appears
    to many, from many    the index is replaced
    to many, from one     the index is written, then model.safetensors is removed

Only afterwards is what the old checkpoint had removed. What a killed run left over is removed by the next one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from autoplan.common.errors import AutoplanError

__all__ = ["NewFiles", "replace_files", "told_as_unwritten"]

_FILE = "model.safetensors"
_INDEX = f"{_FILE}.index.json"
_PART = ".autoplan-{}.part"
_SHARD = re.compile(r"model(?P<save>-\d+)?-\d{5}-of-\d{5}\.safetensors")
_LEFT_OVER = re.compile(r"\.autoplan-.*\.part|\.part-\d{5}\.safetensors")


@contextmanager
def told_as_unwritten(folder: Path) -> Iterator[None]:
    """Whatever a disk, a folder or the library that writes has against it, as one error."""
    from safetensors import SafetensorError

    try:
        yield
    except AutoplanError:
        raise
    except (OSError, RuntimeError, ValueError, LookupError, SafetensorError) as error:
        raise AutoplanError(
            f"{folder} could not be written: {type(error).__name__}: {error}",
            hint="is the disk full, and may this process write there? What the folder held before is as it was",
        ) from error


@dataclass
class NewFiles:
    """Files that grow until they are full; named when it is known how many there are."""

    folder: Path
    limit: int
    headers: dict[str, str] = field(default_factory=dict)
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    held: int = 0
    parts: list[tuple[str, ...]] = field(default_factory=list)
    total: int = 0
    made: list[Path] = field(default_factory=list)  # what is removed again if it comes to nothing

    def add(self, tensors: Mapping[str, Any]) -> None:
        """Keep these tensors for the next file, or write it."""
        with told_as_unwritten(self.folder):
            for name, tensor in tensors.items():
                if not isinstance(tensor, torch.Tensor):
                    raise AutoplanError(f"{name} is a {type(tensor).__name__}: safetensors files hold tensors only")
                size = tensor.numel() * tensor.element_size()
                if self.pending and self.held + size > self.limit:
                    self._write()
                # a view of something larger would keep that alive until its file is full
                self.pending[name] = tensor.clone() if _is_part(tensor) else tensor.contiguous()
                self.held += size
                self.total += size

    def _write(self) -> None:
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.parts:
            _clear(self.folder)
        place = self.folder / _PART.format(f"{len(self.parts):05d}")
        self.made.append(place)
        save_file(self.pending, place, metadata={"format": "pt"} | self.headers)
        _sync(place)
        self.parts.append(tuple(self.pending))
        self.pending, self.held = {}, 0

    def prepare(self) -> None:
        """Write the rest, and bring everything to the disk; nothing of the old checkpoint has changed."""
        with told_as_unwritten(self.folder):
            self._write()
            if len(self.parts) > 1:
                self._name_shards()
            _sync(self.folder)

    def _name_shards(self) -> None:
        total = len(self.parts)
        taken = {match["save"] or "" for path in self.folder.iterdir() if (match := _SHARD.fullmatch(path.name))}
        save = next(tag for tag in ("", *(f"-{number}" for number in range(2, len(taken) + 3))) if tag not in taken)
        names = [f"model{save}-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
        for number, name in enumerate(names):
            os.rename(self.made[number], self.folder / name)
            self.made[number] = self.folder / name
        where = {tensor: name for name, tensors in zip(names, self.parts, strict=True) for tensor in tensors}
        index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(where.items()))}
        self.made.append(self.folder / _PART.format("index"))
        self.made[-1].write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        _sync(self.made[-1])

    def switch(self) -> None:
        """From the old checkpoint to the new one, after `prepare`; then remove what was the old one's."""
        single, index, new = self.folder / _FILE, self.folder / _INDEX, set(self.made)
        with told_as_unwritten(self.folder):
            if len(self.parts) == 1:
                os.replace(self.made[-1], single)
                self.made = []
                _sync(self.folder)
                index.unlink(missing_ok=True)
            else:
                os.replace(self.made[-1], index)
                self.made = [*self.made[:-1], index] if single.exists() else []
                _sync(self.folder)
                single.unlink(missing_ok=True)
                self.made = []
            _sync(self.folder)
            for path in list(self.folder.iterdir()):
                if _SHARD.fullmatch(path.name) and path not in new:
                    path.unlink()

    def abandon(self) -> None:
        """Take away what was written, as far as the disk lets us."""
        for path in self.made:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self.made = []


def replace_files(folder: Path, write: Callable[[Path], Any], read: Sequence[str] = ()) -> None:
    """Let `write` write files into a folder of its own, and move each over its namesake in `folder`.

    `read`: files of `folder` that it looks at.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unread = folder / _PART.format("settings")
    with told_as_unwritten(folder):
        _clear(folder)
        unread.mkdir()
        try:
            for name in read:
                if (folder / name).is_file():
                    shutil.copy(folder / name, unread / name)
            write(unread)
            for path in sorted(unread.rglob("*")):
                if path.is_file():
                    place = folder / path.relative_to(unread)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    _sync(path)
                    os.replace(path, place)
        finally:
            _clear(folder)
        _sync(folder)


def _clear(folder: Path) -> None:
    """Remove what a run left over that was killed here."""
    for path in list(folder.iterdir()):
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name == "nt":
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
