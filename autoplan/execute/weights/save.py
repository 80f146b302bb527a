"""Save the weights of a sharded model."""

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
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.common.conventions import CheckpointWriter, conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.options import check_argument
from autoplan.execute.agreement import Voters, fail_together, meet, same_model
from autoplan.execute.parameters.held import held_parameters, plain_name
from autoplan.execute.parameters.state_dict import gathered
from autoplan.execute.quantised.formats import stored_twice
from autoplan.execute.quantised.modules import kept_beside, stored_tensors

# Replace an older checkpoint so that whoever is killed leaves one of the two, whole. New files get names that the old
# one does not have; then one operation on one name decides, as `files.py` and transformers read a folder:
#
#     to one file           model.safetensors is replaced, or appears
#     to many, from many    the index is replaced
#     to many, from one     the index is written, then model.safetensors is removed

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
                total = len(self.parts)
                taken = {
                    match["save"] or "" for path in self.folder.iterdir() if (match := _SHARD.fullmatch(path.name))
                }
                save = next(
                    tag for tag in ("", *(f"-{number}" for number in range(2, len(taken) + 3))) if tag not in taken
                )
                names = [f"model{save}-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
                for number, name in enumerate(names):
                    os.rename(self.made[number], self.folder / name)
                    self.made[number] = self.folder / name
                where = {tensor: name for name, tensors in zip(names, self.parts, strict=True) for tensor in tensors}
                index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(where.items()))}
                self.made.append(self.folder / _PART.format("index"))
                self.made[-1].write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
                _sync(self.made[-1])
            _sync(self.folder)

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
    """Let `write` fill a folder of its own, then move its files over those in `folder`. `read`: what it looks at."""
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


# One tensor, or the few of one conversion, is gathered at a time, on every rank; the first converts and writes a file
# whenever enough has come together. What fails on one rank is known to all before any goes on.

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_weights(
    model: nn.Module, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB", original_names: bool = True
) -> None:
    """Write the weights as the unsharded model's checkpoint. Every rank calls it; the first rank writes.

    `max_shard_size`: how large a file may grow, and so what the first rank holds at most. `original_names`: the names
    and layouts that the model's checkpoints have, where its library changes them when it loads.
    """
    with fail_together(Voters.everyone(model), "save_weights"):
        check_argument("model", model, nn.Module, "give the model itself, an nn.Module")
        check_argument("folder", folder, (str, os.PathLike), "give the folder to write into")
        model = getattr(model, "_orig_mod", model)
        writer = conventions().checkpoint_writer(model, original_names, stored_tensors(model))
        headers, twice = kept_beside(model)
        limit = _bytes(max_shard_size)  # refused on every rank
        files = NewFiles(Path(folder), limit, headers) if writes() else None
        try:
            # Gather, convert and write; the new files take the place of the old ones at the end
            meet(same_model(model))  # making a state dict may talk
            state: dict[str, Any] = model.state_dict()
            meet(same_model(model, state))  # what is written of it, too
            for names in writer.groups(_names(model, list(state), writer)):
                tensors = {name: whole_on_writer(state.pop(name), keep=files is not None) for name in names}
                if files is not None:
                    with told_as_unwritten(files.folder):
                        files.add(stored_twice(writer.convert(tensors), twice))
            meet()
            if files is not None:
                files.prepare()
            meet()
            if files is not None:
                files.switch()
        except BaseException:
            if files is not None:
                files.abandon()
            raise


def writes() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def whole_on_writer(value: Any, keep: bool) -> Any:
    """The tensor on the CPU for the rank that writes; the others only take part, if none of them failed before."""
    if isinstance(value, DTensor):
        meet()
        value = gathered(value)
    return value.detach().cpu() if keep and isinstance(value, torch.Tensor) else None


def _names(model: nn.Module, names: list[str], writer: CheckpointWriter) -> Iterator[str]:
    """Every tensor once: of tied ones, the name that the library reads."""
    owner = {name: id(parameter) for name, parameter, _ in held_parameters(model)}
    shared: dict[int, list[str]] = {}
    for name in names:
        if plain_name(name) in owner:
            shared.setdefault(owner[plain_name(name)], []).append(name)
    kept = {next((n for n in group if n not in writer.copies), group[0]) for group in shared.values()}
    for name in names:
        if (plain_name(name) not in owner or name in kept) and name not in writer.left_out:
            yield name


def _bytes(size: int | str) -> int:
    """A number of bytes, or "5GB"."""
    if isinstance(size, int):
        return size
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMG]i?B)\s*", size, re.IGNORECASE)
    if match is None:
        raise AutoplanError(f"max_shard_size={size!r}", hint='give a number of bytes, or "200MB", "5GB", "2GiB"')
    return int(float(match[1]) * _UNITS[match[2].upper()])
