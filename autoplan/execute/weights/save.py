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
from autoplan.common.options import bytes_in, check_argument
from autoplan.common.patterns import grouped
from autoplan.common.torch_internals import uncompiled
from autoplan.execute.agreement import Voters, fail_together, meet, same_model
from autoplan.execute.parameters.held import held_parameters, plain_name
from autoplan.execute.parameters.state_dict import gathered
from autoplan.execute.quantised.formats import stored_twice
from autoplan.execute.quantised.modules import kept_beside, stored_tensors

# Replace an older checkpoint so that a killed process leaves one of the two complete. New files get names that the old
# one does not have; then one operation on one name switches, given how `files.py` and transformers read a folder:
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
    """Turn any error of a disk, a folder or the writing library into one AutoplanError."""
    from safetensors import SafetensorError

    try:
        yield
    except AutoplanError:
        raise
    except (OSError, RuntimeError, ValueError, LookupError, SafetensorError) as error:
        raise AutoplanError(
            f"{folder} could not be written: {type(error).__name__}: {error}",
            hint="is the disk full, or not writable? The folder's previous contents are unchanged",
        ) from error


@dataclass
class NewFiles:
    """Files that are written when full, and named once their number is known."""

    folder: Path
    limit: int
    headers: dict[str, str] = field(default_factory=dict)
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    pending_bytes: int = 0
    parts: list[tuple[str, ...]] = field(default_factory=list)
    total: int = 0
    written: list[Path] = field(default_factory=list)  # files to remove again on failure

    def add(self, tensors: Mapping[str, Any]) -> None:
        """Keep these tensors for the next file, and write it when it is full."""
        with told_as_unwritten(self.folder):
            for name, tensor in tensors.items():
                if not isinstance(tensor, torch.Tensor):
                    raise AutoplanError(f"{name} is a {type(tensor).__name__}: safetensors files hold tensors only")
                size = tensor.numel() * tensor.element_size()
                if self.pending and self.pending_bytes + size > self.limit:
                    self._write()
                # a view would keep its larger storage alive until the file is full
                is_part = tensor.is_contiguous() and tensor.untyped_storage().nbytes() > size
                self.pending[name] = tensor.clone() if is_part else tensor.contiguous()
                self.pending_bytes += size
                self.total += size

    def _write(self) -> None:
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.parts:
            _clear(self.folder)
        place = self.folder / _PART.format(f"{len(self.parts):05d}")
        self.written.append(place)
        save_file(self.pending, place, metadata={"format": "pt"} | self.headers)
        _sync(place)
        self.parts.append(tuple(self.pending))
        self.pending, self.pending_bytes = {}, 0

    def prepare(self) -> None:
        """Write the rest, and sync everything to the disk; the old checkpoint is unchanged."""
        with told_as_unwritten(self.folder):
            self._write()
            if len(self.parts) > 1:
                total = len(self.parts)
                shards = (_SHARD.fullmatch(path.name) for path in self.folder.iterdir())
                taken = {match["save"] or "" for match in shards if match}
                tags = ("", *(f"-{number}" for number in range(2, len(taken) + 3)))
                save = next(tag for tag in tags if tag not in taken)
                names = [f"model{save}-{number:05d}-of-{total:05d}.safetensors" for number in range(1, total + 1)]
                for number, name in enumerate(names):
                    os.rename(self.written[number], self.folder / name)
                    self.written[number] = self.folder / name
                where = {tensor: name for name, tensors in zip(names, self.parts, strict=True) for tensor in tensors}
                index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(where.items()))}
                self.written.append(self.folder / _PART.format("index"))
                self.written[-1].write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
                _sync(self.written[-1])
            _sync(self.folder)

    def switch(self) -> None:
        """Switch from the old checkpoint to the new one, after `prepare`; then remove the old files."""
        single, index, new = self.folder / _FILE, self.folder / _INDEX, set(self.written)
        with told_as_unwritten(self.folder):
            if len(self.parts) == 1:
                os.replace(self.written[-1], single)
                self.written = []
                _sync(self.folder)
                index.unlink(missing_ok=True)
            else:
                os.replace(self.written[-1], index)
                self.written = [*self.written[:-1], index] if single.exists() else []
                _sync(self.folder)
                single.unlink(missing_ok=True)
                self.written = []
            _sync(self.folder)
            for path in list(self.folder.iterdir()):
                if _SHARD.fullmatch(path.name) and path not in new:
                    path.unlink()

    def abandon(self) -> None:
        """Remove what was written, as far as the disk permits."""
        for path in self.written:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        self.written = []


def replace_files(folder: Path, write: Callable[[Path], Any], read: Sequence[str] = ()) -> None:
    """Let `write` fill a temporary folder, then move its files over those in `folder`. `read`: files that it reads."""
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
    """Remove the temporary files of a killed process."""
    for path in list(folder.iterdir()):
        if _LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name == "nt":
        return  # folders cannot be opened on Windows
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# One tensor, or the few of one conversion, is gathered at a time, on every rank; the first rank converts them and
# writes a file when it is full. A failure on one rank is known to all before any goes on.


def save_weights(
    model: nn.Module, folder: str | os.PathLike[str], *, max_shard_size: int | str = "5GB", original_names: bool = True
) -> None:
    """Write the weights as the unsharded model's checkpoint. Every rank calls it; the first rank writes.

    `max_shard_size`: the largest size of a file, and so of what the first rank buffers. `original_names`: the names and
    layouts of the model's published checkpoints, where its library changes them on loading.
    """
    with fail_together(Voters.everyone(model), "save_weights"):
        check_argument("model", model, nn.Module, "pass the model itself, an nn.Module")
        check_argument("folder", folder, (str, os.PathLike), "pass the folder to write to")
        model = uncompiled(model)
        writer = conventions().checkpoint_writer(model, original_names, stored_tensors(model))
        headers, twice = kept_beside(model)
        limit = _bytes(max_shard_size)  # an error is raised on every rank
        files = NewFiles(Path(folder), limit, headers) if writes() else None
        try:
            # Gather, convert and write; the new files replace the old ones at the end.
            meet(same_model(model))  # making a state dict may communicate
            state: dict[str, Any] = model.state_dict()
            meet(same_model(model, state))  # the state dicts must agree, too
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
    """Return the full tensor on the CPU of the writing rank; the others only take part, if no rank failed before."""
    if isinstance(value, DTensor):
        meet()
        value = gathered(value)
    return value.detach().cpu() if keep and isinstance(value, torch.Tensor) else None


def _names(model: nn.Module, names: list[str], writer: CheckpointWriter) -> Iterator[str]:
    """Yield the name of every tensor once: of tied ones, the name that the library reads."""
    owner = {name: id(parameter) for name, parameter, _ in held_parameters(model)}
    shared = grouped((owner[plain_name(name)], name) for name in names if plain_name(name) in owner)
    chosen = {next((n for n in group if n not in writer.copies), group[0]) for group in shared.values()}
    for name in names:
        if (plain_name(name) not in owner or name in chosen) and name not in writer.left_out:
            yield name


def _bytes(size: int | str) -> int:
    """Return the bytes of a size such as 5000 or "5GB"."""
    limit = size if isinstance(size, int) else bytes_in(size)
    if limit is None:
        raise AutoplanError(f"max_shard_size={size!r}", hint='pass a number of bytes, or "200MB", "5GB", "2GiB"')
    return limit
