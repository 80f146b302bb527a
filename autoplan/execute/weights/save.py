"""Write a sharded model as a checkpoint of the unsharded one: its names, layouts and shapes, in safetensors files.

The problem: whoever gathers a model to save it holds all of it on one rank. Here one tensor (or the few that one
conversion of the library takes together) is gathered at a time, on every rank; the first rank converts it and writes a
file whenever enough has come together. No rank ever holds more than a file's worth beside its own shards, and what
fails on the writing rank is known to all before anybody goes on: nobody is left waiting.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
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
from autoplan.execute.parameters.held import held_parameters, plain_name
from autoplan.execute.parameters.state_dict import gathered
from autoplan.execute.quantised.modules import kept_beside, stored_tensors
from autoplan.execute.quantised.twice import stored_twice

__all__ = ["finish_writing", "save_weights", "whole_on_writer", "writes"]

_FILE = "model.safetensors"
_PART = ".part-{:05d}.safetensors"
_OLD = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|\.part-\d{5}\.safetensors")
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def save_weights(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    original_names: bool = True,
) -> None:
    """Write the weights as the unsharded model's checkpoint. Every rank calls it; the first rank writes.

    `max_shard_size`: how large a file may grow, and so what the first rank holds at most. `original_names`: the names
    and layouts that the model's checkpoints have, where its library changes them when it loads.
    """
    check_argument("model", model, nn.Module, "give the model itself, an nn.Module")
    check_argument("folder", folder, (str, os.PathLike), "give the folder to write into")
    model = getattr(model, "_orig_mod", model)
    writer = conventions().checkpoint_writer(model, original_names, stored_tensors(model))
    limit = _bytes(max_shard_size)  # refused on every rank
    headers, twice = kept_beside(model)
    files = _Files(Path(folder), limit, headers) if writes() else None
    state: dict[str, Any] = model.state_dict()
    trouble: Exception | None = None
    for names in writer.groups(_names(model, list(state), writer)):
        tensors = {name: whole_on_writer(state.pop(name), keep=files is not None) for name in names}
        if files is None or trouble is not None:
            continue
        try:
            files.add(stored_twice(writer.convert(tensors), twice))
        except (OSError, RuntimeError, ValueError, LookupError) as error:
            trouble = error  # the other ranks are on their way to the next gather
    finish_writing(files, trouble, Path(folder), model)


def finish_writing(files: _Files | None, trouble: Exception | None, folder: Path, model: nn.Module) -> None:
    """Close the files; every rank learns whether that went well."""
    if files is not None and trouble is None:
        try:
            files.close()
        except OSError as error:
            trouble = error
    if not _agree(trouble is None, model):
        told = f": {type(trouble).__name__}: {trouble}" if trouble is not None else "; the first rank says why"
        raise AutoplanError(f"{folder} could not be written{told}") from trouble


def writes() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _agree(well: bool, model: nn.Module) -> bool:
    """Is all well on every rank? Ranks wait for each other here."""
    if not dist.is_initialized():
        return well
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    bad = torch.tensor(0 if well else 1, device="cpu" if dist.get_backend() == "gloo" else device)
    dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return not int(bad)


def whole_on_writer(value: Any, keep: bool) -> Any:
    """The tensor on the CPU for the rank that writes; the others only take part."""
    value = gathered(value) if isinstance(value, DTensor) else value
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
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMG]i?B)\s*", size, re.IGNORECASE)
    if found is None:
        raise AutoplanError(f"max_shard_size={size!r}", hint='give a number of bytes, or "200MB", "5GB", "2GiB"')
    return int(float(found[1]) * _UNITS[found[2].upper()])


@dataclass
class _Files:
    """Files that grow until they are full; named when it is known how many there are."""

    folder: Path
    limit: int
    headers: dict[str, str] = field(default_factory=dict)
    pending: dict[str, torch.Tensor] = field(default_factory=dict)
    held: int = 0
    parts: list[tuple[str, ...]] = field(default_factory=list)
    total: int = 0

    def add(self, tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            if not isinstance(tensor, torch.Tensor):
                raise AutoplanError(f"{name} is a {type(tensor).__name__}: safetensors files hold tensors only")
            size = tensor.numel() * tensor.element_size()
            if self.pending and self.held + size > self.limit:
                self._flush()
            # a view of something larger would keep that alive until its file is full
            self.pending[name] = tensor.clone() if _is_part(tensor) else tensor.contiguous()
            self.held += size
            self.total += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        save_file(self.pending, self.folder / _PART.format(len(self.parts)), metadata={"format": "pt"} | self.headers)
        self.parts.append(tuple(self.pending))
        self.pending, self.held = {}, 0

    def close(self) -> None:
        """Write the rest, take away an older checkpoint, and give the files their names."""
        self._flush()
        count = len(self.parts)
        for old in self.folder.iterdir():
            if _OLD.fullmatch(old.name) and not old.name.startswith(".part-"):
                old.unlink()
        files = [_FILE] if count == 1 else [f"model-{n + 1:05d}-of-{count:05d}.safetensors" for n in range(count)]
        for number, file in enumerate(files):
            (self.folder / _PART.format(number)).rename(self.folder / file)
        if count > 1:
            where = {name: file for file, names in zip(files, self.parts, strict=True) for name in names}
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(where.items()))}
            (self.folder / f"{_FILE}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _is_part(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
