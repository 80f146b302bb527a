"""A program for torchrun that trains on the chosen mesh: short, whole, and one's own from then on."""

from __future__ import annotations

from typing import Any

from autoplan.hf.source import Source
from autoplan.values.estimate import Row

__all__ = ["script_text"]

_TEXT = '''"""{what}

    torchrun --nnodes {nodes} --nproc-per-node {each} FILE [MODEL]

Chosen by autoplan: {row}.
Estimated: {peak:.1f} GiB at the peak, {speed:,.0f} tokens a second.
"""

import os
import sys

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

import autoplan

MODEL = sys.argv[1] if len(sys.argv) > 1 else {model!r}
STEPS = int(os.environ.get("STEPS", "10"))
BATCH, SEQUENCE, ACCUMULATE = {batch}, {sequence}, {accumulate}  # of one rank, BATCH at once

device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(device, {shape}, mesh_dim_names={names})
config = transformers.AutoConfig.from_pretrained(MODEL)
with torch.device("meta"):
    model = transformers.{kind}._from_config(config)
plan = autoplan.plan(model{wish})
model = autoplan.parallelize(model, mesh, plan{options})
if os.path.isdir(MODEL) and any(name.endswith(".safetensors") for name in os.listdir(MODEL)):
    autoplan.load_weights(model, MODEL)
else:  # no weights here: random ones
    model.to_empty(device=device)
    torch.manual_seed(0)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            torch.nn.init.normal_(tensor.detach(), std=0.02)
model.train()
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
copy = dist.get_rank() // {split}  # ranks that share one copy of the model see the same tokens
tokens = torch.Generator().manual_seed(copy)
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
'''


def script_text(source: Source, row: Row, options: dict[str, Any], per_node: int) -> str:
    """The program for one row."""
    mesh, one = row.mesh, row.estimate
    ranks = 1
    for size in mesh.values():
        ranks *= size
    wish = (f", tp_size={row.tp}" if row.tp > 1 else "") + (f", ep_size={row.ep}" if row.ep > 1 else "")
    wish += ", sequence_parallel=True" if row.sequence_parallel else ""
    return _TEXT.format(
        what=f"Train {source.name.rpartition('.')[2]} on {ranks} GPUs.", nodes=-(-ranks // per_node),
        each=min(ranks, per_node), row=row, peak=one.peak / 2**30, speed=one.tokens_per_second,
        model=getattr(source.config, "name_or_path", "") or source.model_type, batch=one.batch, sequence=one.sequence,
        accumulate=row.accumulate, shape=tuple(mesh.values()), names=tuple(mesh), kind=source.name.rpartition(".")[2],
        wish=wish, options="".join(f", {name}={value!r}" for name, value in options.items()),
        split=max(row.tp, row.ep),
    )  # fmt: skip
