"""Write a sharded model as a checkpoint of the unsharded one: its names, layouts and shapes, in safetensors files.

The problem: whoever gathers a model to save it holds all of it on one rank. Here one tensor (or the few that one
conversion of the library takes together) is gathered at a time, on every rank; the first rank converts it and writes a
file whenever enough has come together. No rank ever holds more than a file's worth beside its own shards, and what
fails on one rank is known to all before anybody goes on: nobody is left waiting, and the files that were there stay.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
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
from autoplan.execute.quantised.modules import kept_beside, stored_tensors
from autoplan.execute.quantised.twice import QuantisedTwice, stored_twice
from autoplan.execute.weights.switch import NewFiles, told_as_unwritten

__all__ = ["save_weights", "whole_on_writer", "writes"]

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
    with fail_together(Voters.everyone(model), "save_weights"):
        check_argument("model", model, nn.Module, "give the model itself, an nn.Module")
        check_argument("folder", folder, (str, os.PathLike), "give the folder to write into")
        model = getattr(model, "_orig_mod", model)
        writer = conventions().checkpoint_writer(model, original_names, stored_tensors(model))
        headers, twice = kept_beside(model)
        limit = _bytes(max_shard_size)  # refused on every rank
        files = NewFiles(Path(folder), limit, headers) if writes() else None
        try:
            _write_all(model, writer, files, twice)
        except BaseException:
            if files is not None:
                files.abandon()
            raise


def _write_all(
    model: nn.Module, writer: CheckpointWriter, files: NewFiles | None, twice: dict[str, QuantisedTwice]
) -> None:
    """Gather what is converted together, hand it to the files, and at the end let them take the old ones' place."""
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
    found = re.fullmatch(r"\s*([\d.]+)\s*([KMG]i?B)\s*", size, re.IGNORECASE)
    if found is None:
        raise AutoplanError(f"max_shard_size={size!r}", hint='give a number of bytes, or "200MB", "5GB", "2GiB"')
    return int(float(found[1]) * _UNITS[found[2].upper()])
