"""Make keyword arguments of one step at a given batch and length: training with labels, or filling a cache.

A user's inputs give the kinds of arguments. Row and token dims are recognised by size: all rows become the first one,
longer sequences repeat the last token. Lengths above the rows of a learned table of positions are refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.hf.inputs.guesses import labels_of
from autoplan.hf.inputs.make import core_of, make_inputs
from autoplan.hf.shrink import all_configs
from autoplan.hf.source import Source

_TOKEN_IDS = ("input_ids", "decoder_input_ids")
_EMBEDDED = ("inputs_embeds", "hidden_states", "decoder_inputs_embeds")


def size_of(inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and tokens of one call; 0 tokens if no argument is a sequence."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor) and value.dim()}
    named = [tensors[name] for name in (*_TOKEN_IDS, *_EMBEDDED) if name in tensors and tensors[name].dim() > 1]
    ids = [value for value in tensors.values() if value.dim() == 2 and value.dtype in (torch.int64, torch.int32)]
    first = next(iter((*named, *ids)), None)
    if first is not None:
        return int(first.shape[0]), int(first.shape[1])
    return next((int(value.shape[0]) for value in tensors.values()), 1), 0


def resized(inputs: Mapping[str, Any], batch: int, length: int) -> dict[str, Any]:
    """Return the same arguments for `batch` rows of `length` tokens, as far as they have such dims."""
    rows, tokens = size_of(inputs)
    changed, fits = dict(inputs), (rows, tokens) in ((batch, length), (batch, 0))
    for name, value in inputs.items():
        if fits or not isinstance(value, torch.Tensor):
            continue
        all_dims = not value.is_floating_point() or (value.dim() == 4 and tuple(value.shape[-2:]) == (tokens, tokens))
        has_rows = value.dim() > 0 and value.shape[0] == rows
        if has_rows:
            value = value[:1]
        first = 1 if has_rows or value.dim() > 1 else 0
        dims = range(first, value.dim()) if all_dims else (1,) if name in _EMBEDDED else ()
        for dim in dims if tokens else ():
            if value.shape[dim] != tokens:
                continue
            if length <= tokens:
                value = value.narrow(dim, 0, length)
            else:  # repeat the last position
                sizes = [length - tokens if place == dim else -1 for place in range(value.dim())]
                value = torch.cat([value, value.narrow(dim, tokens - 1, 1).expand(sizes)], dim=dim)
        changed[name] = value.expand(batch, *value.shape[1:]) if has_rows else value
    return changed


_POSITIONS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
_BEFORE_THE_FIRST = 2  # padding rows of some tables


def check_positions(name: str, module: nn.Module, length: int) -> int:
    """Return the most positions that the config names (0: none); raise AutoplanError if `length` exceeds the rows of a
    learned table of positions."""
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
            learned = not tables.isdisjoint(range(rows, rows + _BEFORE_THE_FIRST + 1))
            if learned and rows < length and rows != getattr(config, "vocab_size", None):
                raise AutoplanError(
                    f"{name} has a table of {rows:,} positions ({field}), but the sequence has {length:,} tokens",
                    hint=f"ask for at most {rows:,} (--sequence), or pass a config with more positions",
                )
    return named


_DECODED, _MASK = "decoder_input_ids", "attention_mask"
_IDS = (_DECODED, "input_ids")
_OF_A_SEQUENCE = ("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction")
_FIRST = ("image", "audio", "video")  # a prompt with an image runs the text model as well


def _example(source: Source, module: nn.Module, users: Any, batch: int, length: int) -> dict[str, Any]:
    inputs = make_inputs(
        module, config=source.config, model_type=source.model_type, inputs=users, batch=batch, length=length
    )
    names = [name for name, feed in inputs.feeds.items() if "@module" not in feed]
    return dict(inputs.feeds[next((name for name in _FIRST if name in names), names[0])])


def step_inputs(
    source: Source, module: nn.Module, users: Mapping[str, Any] | None, batch: int, length: int, *, training: bool
) -> dict[str, Any]:
    """Return keyword arguments of one call. A user's example inputs give the kinds of arguments, not their sizes. As
    generation does, inference asks for the logits of the last token alone, if the model takes that."""
    call = _example(source, module, users, batch, length)
    more = size_of(call)[1] - length
    if users is None and 0 < more < length - 1:  # tokens of a picture are part of the sequence
        shorter = _example(source, module, users, batch, length - more)
        call = shorter if size_of(shorter)[1] == length else call
    if users is not None:
        call = resized(call, batch, length)
        mask = call.get(_MASK)
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not mask.is_meta and bool((mask != 0).all()):
            del call[_MASK]  # transformers would read its values, and then use no mask
    decoded = call.get(_DECODED)
    if users is None and isinstance(decoded, torch.Tensor) and 1 < decoded.shape[-1] == length - 1:
        call[_DECODED] = torch.cat([decoded, decoded[:, -1:]], dim=1)  # planning needs two lengths, a step has one
    words = conventions()
    core: Any = module.get_base_model() if hasattr(module, "get_base_model") else module
    takes = set(inspect.signature(core.forward).parameters)
    if words.cache_switch in takes or words.cache_switch in call:
        call[words.cache_switch] = not training
    if not training and words.last_logits in takes:
        call.setdefault(words.last_logits, 1)
    if training and words.targets in takes and words.targets not in call:
        ids = next((call[name] for name in _IDS if name in call), None)
        if isinstance(ids, torch.Tensor):
            # Classifiers of sequences have one label per row, and no output embeddings.
            getter = getattr(core, "get_output_embeddings", None)
            per_row = getter is not None and getter() is None and type(core).__name__.endswith(_OF_A_SEQUENCE)
            call[words.targets] = ids.new_zeros(ids.shape[:1]) if per_row else labels_of(ids, source.config)
    return call
