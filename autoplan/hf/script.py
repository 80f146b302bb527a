"""Write a program for torchrun that trains, or runs, a transformers model of token ids on the chosen mesh."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import torch

from autoplan.common.errors import AutoplanError
from autoplan.common.templates import template
from autoplan.hf.source import Source
from autoplan.values.estimate import Row

_IDS, _LABELS = "input_ids", "labels"
_MADE_OF_THEM = {_IDS, _LABELS, "decoder_input_ids", "attention_mask", "decoder_attention_mask", "use_cache"}


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
    others = [name for name in tensors if name not in _MADE_OF_THEM]
    if others or _IDS not in tensors:
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
