"""How transformers writes a checkpoint: which names, which layouts, and the settings that lie beside the weights.

A model in memory is not what its checkpoint holds: experts are stacked, projections are packed, names have changed.
transformers reverses that with a whole state dict in hand. Here the same reversal is asked for group by group: the
tensors that one conversion needs, so that nobody has to hold the others.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from autoplan.common.conventions import CheckpointWriter
from autoplan.hf.checkpoints import listed
from autoplan.hf.quantised.schemes import Plain, is_for_linears, packed_weight, state_of
from autoplan.values.quantised import PackedTensor, PackedWeight

__all__ = ["checkpoint_writer"]


Stored = Mapping[str, tuple[PackedWeight, PackedTensor]]


def checkpoint_writer(
    model: nn.Module, original: bool = True, stored: Stored = MappingProxyType({})
) -> CheckpointWriter:
    """Of any model; one that is not transformers' own is written under its own names, and has no settings.

    `stored`: the packed tensors among those to write.
    """
    if not _is_theirs(model):
        return CheckpointWriter(lambda names: [(name,) for name in names], lambda tensors: tensors)
    group_of = _group_names(model) if original else None
    return CheckpointWriter(
        groups=lambda names: _groups(names, group_of),
        convert=(lambda tensors: _as_checkpoints(model, tensors, stored)) if original else lambda tensors: tensors,
        settings=lambda folder, cls: _write_settings(model, folder, cls),
        copies=frozenset(getattr(model, "all_tied_weights_keys", None) or ()),
        left_out=frozenset(getattr(model, "_keys_to_ignore_on_save", None) or ()),
    )


def _is_theirs(model: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)


def _reverted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(model, tensors))


def _as_checkpoints(model: Any, tensors: dict[str, torch.Tensor], stored: Stored) -> dict[str, torch.Tensor]:
    found = _reverted(model, {name: tensor for name, tensor in tensors.items() if name not in stored})
    for name, whole in tensors.items():
        if name in stored:
            weight, tensor = stored[name]
            if len(weight.shape) == 3:
                found |= _apart(model, name, whole, weight, tensor)
            else:
                found |= _alone(model, name, whole, weight, tensor)
    return found


def _alone(
    model: Any, name: str, whole: torch.Tensor, weight: PackedWeight, tensor: PackedTensor
) -> dict[str, torch.Tensor]:
    """A packed tensor of one matrix, and what its method says of it in a tensor of bytes."""
    ((entry, value),) = _reverted(model, {name: whole}).items()
    entry = entry.removesuffix(tensor.attribute) + tensor.name
    state = state_of(weight)
    if state is None or tensor is not weight.tensors[0]:
        return {entry: value}
    kind, block = weight.scheme.value("kind"), weight.scheme.value("block")
    said = {"quant_type": kind, "blocksize": block, "dtype": str(model.dtype).removeprefix("torch."),
            "shape": list(weight.shape)}  # fmt: skip
    bytes_ = torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)
    return {entry: value, f"{entry}.{state}": bytes_}


def _apart(
    model: Any, name: str, whole: torch.Tensor, weight: PackedWeight, tensor: PackedTensor
) -> dict[str, torch.Tensor]:
    """A packed stack as checkpoints hold it: an entry for each expert and each matrix that was quantised for itself.

    Which entries there are, and what they are called, is asked with numbers in place of the plain stack.
    """
    experts, segments = weight.shape[0], max(1, len(weight.segments))
    plain = name.removesuffix(tensor.attribute) + weight.parameter
    asked = _reverted(model, {plain: torch.arange(experts * segments).reshape(experts, segments, 1)})
    if any(numbers.numel() != 1 for numbers in asked.values()):
        (entry,) = asked
        owner = entry.removesuffix(weight.parameter)
        if not is_for_linears(weight.scheme) or not weight.parameter.endswith("_proj"):
            return {owner + tensor.name: whole}  # it is written as a stack
        names = listed(weight.parameter)
        asked = {
            f"{owner}{expert}.{part}.weight": torch.tensor(expert * segments + place)
            for expert in range(experts)
            for place, part in enumerate(names)
        }
    rows = weight.shape[weight.rows] // segments
    one = packed_weight(Plain("weight", (rows, weight.shape[weight.contracted])), weight.scheme)
    mine = one.tensors[weight.tensors.index(tensor)]
    place = next((place for place, dim in enumerate(tensor.dims) if weight.rows in dim.of), 1)
    parts = whole.chunk(segments, place) if whole.dim() > 1 else (whole,) * segments
    found = {}
    for entry, number in asked.items():
        expert, segment = divmod(int(number), segments)
        found[entry.removesuffix("weight") + mine.name] = parts[segment][expert].reshape(mine.shape)
    return found


def _group_names(model: Any) -> Callable[[str], str]:
    """What the names of all tensors have in common that one reversed conversion takes together."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    loaded = getattr(model, "_weight_conversions", None)
    known = get_model_conversion_mapping(model, add_legacy=False) if loaded is None else loaded
    reverse = [one.reverse_transform() for one in known[::-1]]
    converters = [one for one in reverse if isinstance(one, WeightConverter)]

    def group(name: str) -> str:
        tried = (converter.rename_source_key(name) for converter in converters)
        return next((f"converted to {renamed}" for renamed, pattern in tried if pattern is not None), name)

    return group


def _groups(names: Iterable[str], group_of: Callable[[str], str] | None) -> list[tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name if group_of is None else group_of(name), []).append(name)
    return [tuple(members) for members in found.values()]


def _write_settings(model: Any, folder: str | os.PathLike[str], cls: type) -> None:
    """What `save_pretrained` writes besides weights."""
    model.config.dtype = str(model.dtype).removeprefix("torch.")
    model.config.architectures = [cls.__name__]
    if model.is_remote_code():
        from transformers.dynamic_module_utils import custom_object_save

        custom_object_save(model, folder, config=model.config)
    model.config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
