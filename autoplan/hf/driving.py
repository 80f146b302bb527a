"""Run transformers models: in worker processes, with their caches and in generation; programs for torchrun."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from math import prod
from typing import Any

import torch
from torch import nn

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.templates import template
from autoplan.hf.names import ATTENTION, CACHE, TARGETS, ForeignName, not_known
from autoplan.hf.source import Source
from autoplan.values.estimate import Row

# Set up transformers in a new process, before it runs a model that was built elsewhere.

SLOW_TO_IMPORT = ("transformers.modeling_layers", "transformers.masking_utils")


def note_what_is_collected(model: nn.Module) -> None:
    """Tell transformers which inner outputs may be collected from a model that was built in another process."""
    library = sys.modules.get("transformers.utils.output_capturing")
    notes = getattr(library, "_CAN_RECORD_REGISTRY", {})
    for module in model.modules():
        if hasattr(module, "_can_record_outputs"):
            notes[str(type(module)) if type(notes) is dict else module] = module._can_record_outputs


def say_less() -> None:
    """Turn off transformers' own warnings."""
    from transformers import logging

    logging.set_verbosity_error()


# What a transformers model can do besides one forward: use another attention, decode from a cache.

_DECODER = "decoder_"  # prefix of the arguments of the second of two stacks
_IDS = ("decoder_input_ids", "input_ids")
_MASK = "attention_mask"


def has_attentions(model: nn.Module) -> bool:
    """Return whether the model's attention implementation can be chosen."""
    return conventions().config_of(model) is not None and hasattr(model, ATTENTION.words[0])


def other_attention(model: nn.Module) -> str:
    """Return the implementation that is not in use."""
    from autoplan.hf.configs import attention_of

    return "eager" if attention_of(model) == "sdpa" else "sdpa"


@contextmanager
def attention_switched(model: Any) -> Iterator[None]:
    """Switch to the other attention implementation for the duration of the context."""
    from autoplan.hf.configs import attention_of

    used = attention_of(model)
    try:
        model.set_attn_implementation(other_attention(model))
        yield
    finally:
        model.set_attn_implementation(used)


def generative_feed(signature: Collection[str], feeds: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
    """Return the first feed that can be decoded with a cache, and the name of its token ids; ("", "") if none."""
    if not _cache_argument(signature) or conventions().cache_switch not in signature:
        return "", ""
    for feed, ids in product(feeds, _IDS):
        value = feeds[feed].get(ids)
        if isinstance(value, torch.Tensor) and value.dim() == 2 and value.shape[1] > 3:
            return feed, ids
    return "", ""


def _cache_argument(signature: Collection[str]) -> str:
    """Return the forward's name for its cache; "" if it takes none."""
    return next((name for name in CACHE.words if name in signature), "")


_LACKS = {
    ATTENTION: "the model has only one attention implementation",
    CACHE: "the model has no cache argument",
    TARGETS: "the model has no labels argument",
}


def lacks(model: nn.Module, name: ForeignName) -> str:
    """Say why a model has none of this; of a transformers model, that the library may use another name."""
    return (not_known(name) if conventions().config_of(model) is not None else "") or _LACKS[name]


def decoded(
    forward: Callable[[dict[str, Any]], Any], signature: Collection[str], inputs: Mapping[str, Any], ids: str
) -> dict[str, torch.Tensor]:
    """Return the logits of all tokens but two, then of these two, one at a time, from the cache."""
    cache, length = _cache_argument(signature), inputs[ids].shape[1]
    steps: dict[str, torch.Tensor] = {}
    past: Any = None
    for start, end in ((0, length - 2), (length - 2, length - 1), (length - 1, length)):
        window = dict(inputs)
        for name, value in inputs.items():
            along = isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[1] == length
            if along and name.startswith(_DECODER) == ids.startswith(_DECODER):
                # masks cover everything up to `end`, the rest only these tokens
                window[name] = value[:, :end] if name.endswith(_MASK) else value[:, start:end]
        outputs = forward({**window, conventions().cache_switch: True, cache: past})
        past = getattr(outputs, cache)
        steps[f"tokens {start} to {end}"] = outputs.logits
    return steps


# Write a program for torchrun that trains, or runs, a transformers model of token ids on the chosen mesh.


_TOKEN_IDS, _LABELS = "input_ids", "labels"
_MADE_OF_THEM = {_TOKEN_IDS, _LABELS, "decoder_input_ids", "attention_mask", "decoder_attention_mask", "use_cache"}


def script_text(
    source: Source, row: Row, options: dict[str, Any], per_node: int, inputs: Mapping[str, Any], packed: bool = False
) -> str:
    """Return the program for one row. `inputs`: the arguments of one step; `packed`: its weights are quantised."""
    training = row.estimate.train != "inference"
    _refuse(source, inputs, training, packed)
    sizes, estimate = row.mesh if training else dict(row.estimate.mesh), row.estimate
    ranks = prod(sizes.values())
    wish = (f", tp_size={row.tp}" if row.tp > 1 else "") + (f", ep_size={row.ep}" if row.ep > 1 else "")
    wish += f", cp_size={row.cp}" if row.cp > 1 else ""
    wish += ", sequence_parallel=True" if row.sequence_parallel else ""
    hub_id = getattr(source.config, "name_or_path", "")
    text = template("script.py.txt") + template("script_train.py.txt" if training else "script_run.py.txt")
    return text.format(
        what=f"{'Train' if training else 'Run'} {source.name.rpartition('.')[2]} on {ranks} GPUs.",
        nodes=-(-ranks // per_node), each=min(ranks, per_node), row=row, peak=estimate.peak / 2**30,
        speed=estimate.tokens_per_second, usage="[MODEL]" if hub_id else "MODEL",
        model=f"sys.argv[1] if len(sys.argv) > 1 else {hub_id!r}" if hub_id else "sys.argv[1]  # a folder or a hub id",
        batch=estimate.batch, sequence=estimate.sequence, accumulate=row.accumulate, shape=tuple(sizes.values()),
        names=tuple(sizes), own="" if training else f"[{list(sizes)[-1]!r}]  # others hold copies",
        kind=source.name.rpartition(".")[2], wish=wish, split=max(row.tp, row.ep) * row.cp,
        options="".join(f", {name}={value!r}" for name, value in options.items()),
    )  # fmt: skip


def _refuse(source: Source, inputs: Mapping[str, Any], training: bool, packed: bool) -> None:
    """Raise AutoplanError for models that no program is written for."""
    hint = "write your own with choice.mesh() and choice.parallelize(model)"
    if source.config is None or not source.name.startswith("transformers."):
        raise AutoplanError(f"{source.name} is built by your own code, which a script cannot name", hint=hint)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    if not tensors.keys() <= _MADE_OF_THEM or _TOKEN_IDS not in tensors:
        names = ", ".join(tensors)
        raise AutoplanError(f"{source.name} takes {names}; scripts are written only for token ids", hint=hint)
    labels = tensors.get(_LABELS)
    if training and (labels is None or labels.dim() != 2):
        why = "takes no labels" if labels is None else "has one label per sequence"
        raise AutoplanError(f"{source.name} {why}; scripts are written only for a loss per token", hint=hint)
    if not training and packed:
        raise AutoplanError(f"{source.name} has quantised weights, which stay packed only in packed_model", hint=hint)
    if not training and not getattr(source.model_class, "can_generate", bool)():
        raise AutoplanError(f"{source.name} does not generate, which an inference script does", hint=hint)
