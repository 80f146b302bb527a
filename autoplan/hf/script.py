"""Write a program for torchrun that trains, or runs, a transformers model of token ids on the chosen mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autoplan.common.errors import AutoplanError
from autoplan.hf.source import Source
from autoplan.values.estimate import Row

_HEAD = '''"""{what}

    torchrun --nnodes {nodes} --nproc-per-node {each} FILE {usage}

Chosen by autoplan: {row}.
Estimated: {peak:.1f} GiB at the peak, {speed:,.0f} tokens a second.
"""

import os
import sys

import torch
import torch.distributed as dist
import transformers
from huggingface_hub import snapshot_download
from torch.distributed.device_mesh import init_device_mesh

import autoplan

MODEL = {model}
STEPS = int(os.environ.get("STEPS", "10"))
BATCH, SEQUENCE, ACCUMULATE = {batch}, {sequence}, {accumulate}  # of one rank, BATCH at once

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(device, {shape}, mesh_dim_names={names}){own}
folder = MODEL if os.path.isdir(MODEL) else snapshot_download(MODEL)
config = transformers.AutoConfig.from_pretrained(folder)
with torch.device("meta"):
    model = transformers.{kind}._from_config(config)
plan = autoplan.plan(model{wish})
model = autoplan.parallelize(model, mesh, plan{options})
if any(name.endswith(".safetensors") for name in os.listdir(folder)):
    autoplan.load_weights(model, folder)
else:
    print(f"no weights in {{folder}}: random ones", file=sys.stderr)
    model.to_empty(device=device)
    autoplan.rebuild_buffers(model)  # those that no checkpoint holds
    torch.manual_seed(0)
    for tensor in model.state_dict().values():
        tensor.detach().zero_()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter.detach(), std=0.02)
tokens = torch.Generator().manual_seed(dist.get_rank() // {split})  # the same on ranks that share a copy of the model
'''
_TRAIN = """model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
for step in range(STEPS):
    for _ in range(ACCUMULATE):
        ids = torch.randint(config.get_text_config().vocab_size, (BATCH, SEQUENCE), generator=tokens)  # your data
        ids = ids.to(device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        (loss / ACCUMULATE).backward()
    autoplan.clip_gradients(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {{step}} loss {{loss.item():.4f}}", flush=True)
dist.destroy_process_group()
"""
_RUN = """model.eval()
NEW = max(1, SEQUENCE // 8)  # tokens to write; SEQUENCE are held in all
for step in range(STEPS):
    ids = torch.randint(config.get_text_config().vocab_size, (BATCH, SEQUENCE - NEW), generator=tokens)  # your prompts
    with torch.no_grad():
        written = model.generate(ids.to(device), max_new_tokens=NEW, do_sample=False)
    if dist.get_rank() == 0:
        print(f"step {{step}}: {{tuple(written.shape)}}", flush=True)
dist.destroy_process_group()
"""
_IDS, _LABELS = "input_ids", "labels"
_MADE_OF_THEM = {_IDS, _LABELS, "decoder_input_ids", "attention_mask", "decoder_attention_mask", "use_cache"}


def script_text(
    source: Source, row: Row, options: dict[str, Any], per_node: int, inputs: Mapping[str, Any], packed: bool = False
) -> str:
    """The program for one row. `inputs`: what one step is called with; `packed`: its weights are quantised."""
    training = row.estimate.train != "inference"
    _refuse(source, inputs, training, packed)
    sizes, one = row.mesh if training else dict(row.estimate.mesh), row.estimate
    ranks = 1
    for size in sizes.values():
        ranks *= size
    wish = (f", tp_size={row.tp}" if row.tp > 1 else "") + (f", ep_size={row.ep}" if row.ep > 1 else "")
    wish += f", cp_size={row.cp}" if row.cp > 1 else ""
    wish += ", sequence_parallel=True" if row.sequence_parallel else ""
    known = getattr(source.config, "name_or_path", "")
    return (_HEAD + (_TRAIN if training else _RUN)).format(
        what=f"{'Train' if training else 'Run'} {source.name.rpartition('.')[2]} on {ranks} GPUs.",
        nodes=-(-ranks // per_node), each=min(ranks, per_node), row=row, peak=one.peak / 2**30,
        speed=one.tokens_per_second, usage="[MODEL]" if known else "MODEL",
        model=f"sys.argv[1] if len(sys.argv) > 1 else {known!r}" if known else "sys.argv[1]  # a folder or a hub id",
        batch=one.batch, sequence=one.sequence, accumulate=row.accumulate, shape=tuple(sizes.values()),
        names=tuple(sizes), own="" if training else f"[{list(sizes)[-1]!r}]  # others hold copies",
        kind=source.name.rpartition(".")[2], wish=wish, split=max(row.tp, row.ep, row.cp),
        options="".join(f", {name}={value!r}" for name, value in options.items()),
    )  # fmt: skip


def _refuse(source: Source, inputs: Mapping[str, Any], training: bool, packed: bool) -> None:
    """What no program is written for."""
    hint = "write your own around choice.mesh() and choice.parallelize(model)"
    if source.config is None or not source.name.startswith("transformers."):
        raise AutoplanError(f"{source.name} is built by code of yours, which no program can name", hint=hint)
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    others = [name for name in tensors if name not in _MADE_OF_THEM]
    if others or _IDS not in tensors:
        names = ", ".join(tensors)
        raise AutoplanError(f"{source.name} takes {names}, and a program is written for ids of tokens alone", hint=hint)
    labels = tensors.get(_LABELS)
    if training and (labels is None or labels.dim() != 2):
        told = "takes no labels" if labels is None else "learns from one label of a sequence"
        raise AutoplanError(f"{source.name} {told}, and a program is written for a loss of each token", hint=hint)
    if not training and packed:
        raise AutoplanError(f"{source.name} has quantised weights, which stay packed in packed_model alone", hint=hint)
    if not training and not getattr(source.model_class, "can_generate", bool)():
        raise AutoplanError(f"{source.name} does not generate, and a program for inference does", hint=hint)
