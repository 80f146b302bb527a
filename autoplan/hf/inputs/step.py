"""Keyword arguments of one step at a given batch and length: training with labels, or filling a cache.

A user's inputs give the kinds of arguments. Rows and tokens are found by size: all rows become the first one, longer
sequences repeat the last token. More tokens than a learned table of positions has rows are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.hf.inputs.make import core_of, make_inputs
from autoplan.hf.inputs.prompts import labels_of
from autoplan.hf.shrink import all_configs
from autoplan.hf.source import Source

_TOKEN_IDS = ("input_ids", "decoder_input_ids")
_EMBEDDED = ("inputs_embeds", "hidden_states", "decoder_inputs_embeds")


def size_of(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and tokens of one call; 0 tokens where no argument is a sequence of them."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim()}
    named = [tensors[name] for name in (*_TOKEN_IDS, *_EMBEDDED) if name in tensors and tensors[name].dim() > 1]
    ids = [value for value in tensors.values() if value.dim() == 2 and value.dtype in (torch.int64, torch.int32)]
    first = next(iter((*named, *ids)), None)
    if first is not None:
        return int(first.shape[0]), int(first.shape[1])
    return next((int(value.shape[0]) for value in tensors.values()), 1), 0


def resized(inputs: Mapping[str, Any], batch: int, length: int) -> dict[str, Any]:
    """The same arguments for `batch` rows of `length` tokens, as far as they have such dims."""
    rows, tokens = size_of(inputs)
    if (rows, tokens) in ((batch, length), (batch, 0)):
        return dict(inputs)
    return {
        name: _resized(value, (rows, tokens), (batch, length), embedded=name in _EMBEDDED)
        if isinstance(value, torch.Tensor) else value
        for name, value in inputs.items()
    }  # fmt: skip


def _resized(value: torch.Tensor, own: tuple[int, int], wanted: tuple[int, int], *, embedded: bool) -> torch.Tensor:
    (rows, tokens), (batch, length) = own, wanted
    whole = not value.is_floating_point() or (value.dim() == 4 and tuple(value.shape[-2:]) == own[1:] * 2)
    has_rows = value.dim() > 0 and value.shape[0] == rows
    if has_rows:
        value = value[:1]
    if tokens:
        first = 1 if has_rows or value.dim() > 1 else 0
        dims = range(first, value.dim()) if whole else (1,) if embedded else ()
        for dim in (dim for dim in dims if value.shape[dim] == tokens):
            value = _longer(value, dim, length)
    return value.expand(batch, *value.shape[1:]) if has_rows else value


def _longer(value: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Cut, or with its last place repeated."""
    more = length - value.shape[dim]
    if more <= 0:
        return value.narrow(dim, 0, length)
    sizes = [more if place == dim else -1 for place in range(value.dim())]
    return torch.cat([value, value.narrow(dim, value.shape[dim] - 1, 1).expand(sizes)], dim=dim)


_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
_BEFORE_THE_FIRST = 2  # rows that some tables have for padding


def check_positions(name: str, module: nn.Module, length: int) -> int:
    """Return the most positions that its config names (0: none); raise where `length` tokens are more than the rows of
    a learned table of positions."""
    core = core_of(module)
    if core is None:
        return 0
    named = 0
    tables = {part.num_embeddings for part in module.modules() if isinstance(part, nn.Embedding)}
    for config in all_configs(core.config):
        for field in _POSITIONS:
            rows = getattr(config, field, None)
            if not isinstance(rows, int) or isinstance(rows, bool):
                continue
            named = max(named, rows)
            if (
                rows < length
                and rows != getattr(config, "vocab_size", None)
                and not tables.isdisjoint(range(rows, rows + _BEFORE_THE_FIRST + 1))
            ):
                raise AutoplanError(
                    f"{name} has a table of {rows:,} positions ({field}), and {length:,} tokens were asked for",
                    hint=f"ask for at most {rows:,} tokens (--sequence), or give a config with more positions",
                )
    return named


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
    core: Any = module.get_base_model() if hasattr(module, "get_base_model") else module
    takes = set(inspect.signature(core.forward).parameters)
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
    """Is a label learned of each token? A classifier of sequences has no output embeddings."""
    core: Any = module.get_base_model() if hasattr(module, "get_base_model") else module
    asked = getattr(core, "get_output_embeddings", None)
    return asked is None or asked() is not None or not type(core).__name__.endswith(_OF_A_SEQUENCE)
