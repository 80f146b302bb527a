"""Fill a sharded model from a folder of safetensors, each rank reading only its own shards.

Keys and shapes are checked first (`key_matching.py`), so that a checkpoint of another model changes nothing. Buffers
that no checkpoint holds are rebuilt. A model with adapters may be filled from a checkpoint of its base model: adapters
on meta are then initialised, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys

from autoplan.common.conventions import BaseName, conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.layout import chunk
from autoplan.common.options import check_argument
from autoplan.common.torch_internals import own_buffers, own_parameters, transient_buffers
from autoplan.execute import random_streams
from autoplan.execute.agreement import Alike, Voters, fail_together, meet, voters_of
from autoplan.execute.collectives import like, mesh_device
from autoplan.execute.parameters.buffers import new_adapters, rebuilt_passing_tensors
from autoplan.execute.parameters.held import Held, fsdp_placements, plain_name, record_of
from autoplan.execute.parameters.state_dict import local_piece, renew_units
from autoplan.execute.quantised.modules import DequantisedFiles, StoredFiles, keep_beside
from autoplan.execute.random_streams import state_of_the_first
from autoplan.execute.weights.files import CheckpointFiles
from autoplan.execute.weights.key_matching import Make, Matched, Moved, follow, match_keys, refuse_unmatched


def load_weights(
    model: nn.Module, folder: str | Path, *, strict: bool = True, dequantise: bool = False
) -> _IncompatibleKeys:
    """Fill `model`, on meta or materialised, from the safetensors files in `folder`; return missing and unexpected
    names.

    `strict` makes these an error. Shapes must agree in any case. Existing adapters are unchanged. `dequantise` fills a
    plain model from a quantised checkpoint.
    """
    check_argument("model", model, nn.Module, "pass the model itself, an nn.Module")
    with fail_together(voters_of(model), "load_weights"):
        check_argument("folder", folder, (str, PathLike), "pass the folder that holds the .safetensors files")
        return _load(model, folder, strict, dequantise)


def _load(model: nn.Module, folder: str | Path, strict: bool, dequantise: bool) -> _IncompatibleKeys:
    files: CheckpointFiles = DequantisedFiles(folder) if dequantise else StoredFiles(folder)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the root stays unsharded between forwards
    base = {plain_name(name): inside for name, inside in conventions().base_names(model).items()}
    tensors = list(_saved_tensors(model, base))
    places = {name: tensor for tensor in tensors for name in tensor.names}
    groups = [tensor.names for tensor in tensors]
    passing = [
        alias
        for path, module in model.named_modules()
        for name in transient_buffers(module)
        for alias in _aliases(plain_name(f"{path}.{name}" if path else name), base)
    ]
    matched = match_keys(model, groups, passing, files.keys, files.read, files.shape)
    of_adapters = {name for name, inside in base.items() if inside.copied or inside.name is None}
    adapters = [saved for saved in tensors if of_adapters.issuperset(saved.names)]
    if any(name in matched.direct for tensor in adapters for name in tensor.names):
        adapters = []  # the folder has adapters, so it must have all of them
    matched.missing = [name for name in matched.missing if places[name] not in adapters]
    for saved in adapters:
        original = base[saved.names[0]].name
        if saved.tensor.is_meta and original is not None:
            places[original].copies.append(saved)
    new = [saved for saved in adapters if saved.tensor.is_meta and base[saved.names[0]].name is None]
    matched.unexpected = [key for key in matched.unexpected if not files.says_nothing(key)]
    wrong = [misfit for name, key in matched.direct.items() if (misfit := _misfit(name, files.form(key), places[name]))]
    if strict or wrong:
        refuse_unmatched(matched if strict else Matched(), wrong, str(folder))
    with torch.no_grad():
        _refuse_joins(matched, places, files.form)
        conversions = _conversions(model, files, places, matched)
        rebuilt = rebuilt_passing_tensors(model, _device(tensors))
        adapter_values = _new_adapters(model, new)
        meet()
        _fill(files, tensors, matched, conversions)  # the model changes from here on
        for saved in new:
            saved.fill(saved.cut(adapter_values[saved.names[0]]))
        for where, name, value in rebuilt:
            where[name] = value
    twice = files.quantised_twice() if isinstance(files, StoredFiles) else {}
    twice |= {name: value for key, value in twice.items() if key in places for name in places[key].names}
    keep_beside(model, files.headers(), twice)
    for module in model.modules():
        renew_units(module)
    return _IncompatibleKeys(matched.missing, matched.unexpected)


@dataclass(eq=False)
class _Saved:
    """One parameter or saved buffer, with every place that holds it. `copies`: tensors that get the same values."""

    tensor: torch.Tensor
    held: Held | None
    names: list[str] = field(default_factory=list)
    places: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    copies: list[_Saved] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape in the checkpoint."""
        return self.held.shape if self.held is not None else tuple(self.tensor.shape)

    def rows(self) -> dict[int, Sequence[int]]:
        """Return the checkpoint rows that this rank holds, by dim; absent dims are full."""
        rows: dict[int, Sequence[int]] = {}
        if self.held is not None and self.held.dim is not None:
            rows[self.held.dim] = self.held.rows[self.held.group.rank]
        read = None if self.held is None or isinstance(self.tensor, nn.Parameter) else self.held.read
        if read is not None and read.dim is not None:
            held_here = rows.get(read.dim, range(self.shape[read.dim]))
            rows[read.dim] = [held_here[row] for row in read.rows[read.group.rank]]
        if isinstance(self.tensor, DTensor):
            mesh = self.tensor.device_mesh
            for mesh_dim, placement in enumerate(fsdp_placements(self.tensor.placements, self.held)):
                dim = getattr(placement, "dim", None)
                if dim is not None:
                    rows_held = rows.get(dim, range(self.shape[dim]))
                    is_roomy = self.held is not None and self.held.has_spare_room and self.held.dim == dim
                    room = self.held.room[0] if self.held is not None and is_roomy else len(rows_held)
                    mine = chunk(room, mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
                    rows[dim] = rows_held[mine.start : mine.stop]
        return rows

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a tensor that could not be read in pieces."""
        if self.held is None:
            for dim, rows in self.rows().items():
                whole = whole.narrow(dim, rows[0], len(rows)) if len(rows) else whole.narrow(dim, 0, 0)
            return whole
        if isinstance(self.tensor, DTensor):
            return local_piece(whole, self.held, self.tensor.device_mesh, self.tensor.placements)
        return self.held.cut(whole) if isinstance(self.tensor, nn.Parameter) else self.held.buffer(whole)

    def fill(self, piece: torch.Tensor) -> None:
        """Copy into existing memory; on meta, put a new tensor at every place."""
        local = self.tensor.to_local() if isinstance(self.tensor, DTensor) else self.tensor
        if local.shape != piece.shape:  # spare room stays zero
            wide = piece.new_zeros(local.shape)
            wide[tuple(slice(size) for size in piece.shape)] = piece
            piece = wide
        if not local.is_meta:
            local.copy_(piece)
            return
        # copied: a piece of a file is a view of all of its tensor, which the model would keep in memory
        new = piece.to(device=_device([self]), dtype=self.tensor.dtype, copy=True).contiguous()
        old = self.tensor
        if isinstance(old, DTensor):
            new = like(new, old)
        if isinstance(old, nn.Parameter):
            new = nn.Parameter(new, requires_grad=old.requires_grad)
            for name, value in vars(old).items():
                new.__dict__.setdefault(name, value)
        for where, name in self.places:
            where[name] = new
        self.tensor = new


def _aliases(own: str, base: Mapping[str, BaseName]) -> list[str]:
    """Return the names that a tensor may have in files: its own, and before it that in the base model of an adapter."""
    inside = base.get(own)
    return [own] if inside is None or inside.name is None or inside.copied else list(dict.fromkeys((inside.name, own)))


def _new_adapters(model: nn.Module, missing: Sequence[_Saved]) -> dict[str, torch.Tensor]:
    """Return adapters that are on meta, initialised by their library: every rank draws from the first rank's stream."""
    names = [saved.names[0] for saved in missing]
    meet(Alike(" ".join(names), f"adapters on meta are {', '.join(names) or 'none'}", "build the same model"))
    meshes = {saved.tensor.device_mesh for saved in missing if isinstance(saved.tensor, DTensor)}
    voters = Voters.of(*meshes)  # also for a part of a sharded model
    with random_streams.fork():
        for group in voters.groups:
            random_streams.set_state(state_of_the_first(random_streams.get_state(), group, voters.device))
        return new_adapters(model, names)


def _saved_tensors(model: nn.Module, base: Mapping[str, BaseName]) -> Iterator[_Saved]:
    """Yield everything that a checkpoint of the model holds, each tensor once, in the model's order."""
    entries: dict[int, _Saved] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        record = record_of(module)
        saved = [(own_parameters(module), name, False) for name in own_parameters(module)]
        passing = transient_buffers(module)
        saved += [(own_buffers(module), name, True) for name in own_buffers(module) if name not in passing]
        for where, name, buffer in saved:
            tensor = where[name]
            if tensor is None:
                continue
            held = None if record is None else (record.buffers if buffer else record.parameters).get(name)
            entry = entries.setdefault(id(tensor), _Saved(tensor, held))
            entry.names += _aliases(plain_name(f"{path}.{name}" if path else name), base)
            if not any(place is where and key == name for place, key in entry.places):
                entry.places.append((where, name))
    yield from entries.values()


def _device(tensors: Sequence[_Saved]) -> torch.device:
    """Return the device where meta tensors are materialised: the mesh's, else that of the other tensors."""
    for saved in tensors:
        if isinstance(saved.tensor, DTensor):
            return mesh_device(saved.tensor.device_mesh)
    return next((saved.tensor.device for saved in tensors if not saved.tensor.is_meta), torch.device("cpu"))


def _fill(files: CheckpointFiles, tensors: list[_Saved], matched: Matched, conversions: Sequence[_Conversion]) -> None:
    owner = {name: saved for saved in tensors for name in saved.names}
    for saved in tensors:
        key = next((matched.direct[name] for name in saved.names if name in matched.direct), None)
        if key is not None:
            for each in (saved, *saved.copies):
                each.fill(files.read(key, each.rows()))
    for joined in matched.joined:
        for each in (owner[joined.name], *owner[joined.name].copies):
            each.fill(joined.piece(each.shape, each.rows(), each.tensor.dtype))
    for conversion in conversions:
        conversion.fill(files, owner)


def _refuse_joins(matched: Matched, owner: dict[str, _Saved], form: Callable[[str], torch.Tensor]) -> None:
    """Raise unless the joined entries of the checkpoint have the shapes and dtypes of the model."""
    for joined in matched.joined:
        saved = owner[joined.name]
        for form_joined in joined.forms(saved.shape, form):
            if misfit := _misfit(joined.name, form_joined, saved):
                raise AutoplanError(
                    f"{misfit}, built from {len(joined.keys)} tensors ({joined.keys[0]}, …)",
                    hint="does the checkpoint belong to this model?",
                )


@dataclass(frozen=True)
class _Conversion:
    """The names that one conversion fills. `moved`: where its elements come from, if it only moves them."""

    make: Make
    names: tuple[str, ...]
    moved: Mapping[str, Moved] | None

    def fill(self, files: CheckpointFiles, owner: dict[str, _Saved]) -> None:
        targets = [(saved, name) for name in self.names for saved in (owner[name], *owner[name].copies)]
        if self.moved is not None:
            for saved, name in targets:
                saved.fill(self.moved[name].piece(files.read, saved.rows()))
            return
        whole = self.make(files.read)
        for saved, name in targets:
            saved.fill(saved.cut(whole[name]))


class _Whole:
    """A sharded model whose parameters have the checkpoint's shapes, for conversions that ask."""

    def __init__(self, model: nn.Module, owner: dict[str, _Saved]) -> None:
        self._model, self._owner = model, owner

    def get_parameter(self, name: str) -> torch.Tensor:
        if name not in self._owner:
            return self._model.get_parameter(name)
        return torch.empty(self._owner[name].shape, device="meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _conversions(
    model: nn.Module, files: CheckpointFiles, owner: dict[str, _Saved], matched: Matched
) -> list[_Conversion]:
    """Return conversions that make each tensor once; what is read directly is skipped. Raise on what does not fit."""
    conversions, whole = [], _Whole(conventions().base_of(model), owner)
    done = {id(owner[name]) for name in matched.direct}
    for conversion in matched.converted:
        make = partial(conversion.make, whole)
        names = []
        for name, form in make(files.form).items():
            if name not in owner or id(owner[name]) in done:
                continue
            if misfit := _misfit(name, form, owner[name]):
                raise AutoplanError(
                    f"{misfit}, after it was converted from {len(conversion.keys)} tensors ({conversion.keys[0]}, …)",
                    hint="does the checkpoint belong to this version of transformers?",
                )
            done.add(id(owner[name]))
            names.append(name)
        moved = follow(make, {key: files.shape(key) for key in conversion.keys}) if conversion.moves else None
        conversions.append(_Conversion(make, tuple(names), moved))
    promised = {name for conversion in matched.converted for name in conversion.targets()} & set(owner)
    forgotten = sorted(name for name in promised if id(owner[name]) not in done)
    if forgotten:
        raise AutoplanError(f"transformers' conversions did not produce {', '.join(forgotten[:5])}")
    return conversions


def _misfit(name: str, stored: torch.Tensor, wanted: _Saved) -> str:
    """Return why a tensor of the checkpoint does not fit one of the model; "" if it does."""
    if tuple(stored.shape) != wanted.shape:
        return f"{name} is {list(stored.shape)}, but the model expects {list(wanted.shape)}"
    old, new = stored.dtype, wanted.tensor.dtype
    if torch.bool in (old, new) or old.is_floating_point != new.is_floating_point:
        fits = old == new
    elif old.is_floating_point:  # an 8-bit float cannot be cast, since it lacks its scales
        fits = old == new or min(old.itemsize, new.itemsize) > 1
    else:
        fits = old.is_complex == new.is_complex and (old.is_complex or torch.promote_types(old, new) == new)
    if not fits:
        plain = "" if old.itemsize > 1 else " (dequantise=True dequantises it)"
        shown_old, shown_new = (str(dtype).removeprefix("torch.") for dtype in (old, new))
        return f"{name} holds {shown_old}, but the model expects {shown_new}{plain}"
    return ""
