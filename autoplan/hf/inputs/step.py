"""What one step is called with, at a batch and length that are asked for: training with labels, or filling a cache."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autoplan.common.conventions import conventions
from autoplan.hf.inputs.make import make_inputs
from autoplan.hf.inputs.prompts import labels_of
from autoplan.hf.inputs.resize import resized
from autoplan.hf.source import Source

_DECODED, _MASK = "decoder_input_ids", "attention_mask"
_IDS = (_DECODED, "input_ids")
_OF_A_SEQUENCE = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
_FIRST = ("image", "audio", "video")  # a prompt with a picture runs the text model as well


def step_inputs(
    source: Source, module: nn.Module, users: Mapping[str, Any] | None, batch: int, length: int, *, training: bool
) -> dict[str, Any]:
    """Keyword arguments of one call. Example inputs of the user's give the kinds of arguments, not their sizes."""
    made = make_inputs(
        module, config=source.config, model_type=source.model_type, inputs=users, batch=batch, length=length
    )
    names = [name for name, feed in made.feeds.items() if "@module" not in feed]
    found = dict(made.feeds[next((name for name in _FIRST if name in names), names[0])])
    if users is not None:
        found = resized(found, batch, length)
        if _masks_nothing(found.get(_MASK)):
            del found[_MASK]  # transformers reads its values, and then makes no mask
    decoded = found.get(_DECODED)
    if users is None and isinstance(decoded, torch.Tensor) and 1 < decoded.shape[-1] == length - 1:
        found[_DECODED] = torch.cat([decoded, decoded[:, -1:]], dim=1)  # planning tells two sequences apart; a step has
    known = conventions()
    takes = _taken(module)
    if known.cache_switch in takes or known.cache_switch in found:
        found[known.cache_switch] = not training
    if training and known.targets in takes and known.targets not in found:
        ids = next((found[name] for name in _IDS if name in found), None)
        if isinstance(ids, torch.Tensor):
            found[known.targets] = (
                labels_of(ids, source.config) if _tells_each_token(module) else ids.new_zeros(ids.shape[:1])
            )
    return found


def _masks_nothing(mask: Any) -> bool:
    return isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask.is_meta and bool((mask != 0).all())


def _tells_each_token(module: nn.Module) -> bool:
    """Or is it one class of a whole sequence that is learned? Then a model has a classifier, and no embeddings that it
    puts out."""
    core: Any = module.get_base_model() if hasattr(module, "get_base_model") else module
    asked = getattr(core, "get_output_embeddings", None)
    return asked is None or asked() is not None or not type(core).__name__.endswith(_OF_A_SEQUENCE)


def _taken(module: nn.Module) -> set[str]:
    core: Any = module.get_base_model() if hasattr(module, "get_base_model") else module
    return set(inspect.signature(core.forward).parameters)
