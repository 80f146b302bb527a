"""How transformers writes a checkpoint: which names, which layouts, and the settings that lie beside the weights.

A model in memory is not what its checkpoint holds: experts are stacked, projections are packed, names have changed.
transformers reverses that with a whole state dict in hand. Here the same reversal is asked for group by group: the
tensors that one conversion needs, so that nobody has to hold the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from autoplan.common.conventions import CheckpointWriter

__all__ = ["checkpoint_writer"]


def checkpoint_writer(model: nn.Module, original: bool = True) -> CheckpointWriter:
    """Of any model; one that is not transformers' own is written under its own names, and has no settings."""
    if not _is_theirs(model):
        return CheckpointWriter(lambda names: [(name,) for name in names], lambda tensors: tensors)
    group_of = _group_names(model) if original else None
    return CheckpointWriter(
        groups=lambda names: _groups(names, group_of),
        convert=(lambda tensors: _reverted(model, tensors)) if original else lambda tensors: tensors,
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


def _group_names(model: Any) -> Callable[[str], str]:
    """What the names of all tensors have in common that one reversed conversion takes together."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, apply_converters

    loaded = getattr(model, "_weight_conversions", None)
    known = get_model_conversion_mapping(model, add_legacy=False) if loaded is None else loaded
    reverse = [one.reverse_transform() for one in known[::-1]]
    converters = [one for one in reverse if isinstance(one, WeightConverter)]

    def group(name: str) -> str:
        renamed, pattern = apply_converters(name, converters)
        return name if pattern is None else f"converted to {renamed}"

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
