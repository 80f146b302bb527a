"""torchrun --nproc-per-node 2 examples/long_context_under_torchrun.py: attention and Mamba2, context parallel.

Each rank has all weights and half of the positions; attention and scans run on all positions of half of the heads.
"""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.hf.source import resolve


def train(model, batches):
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.02), []
    for ids in batches:
        loss = model(ids, labels=ids).loss  # each rank gets the full batch, labels too
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


torch.manual_seed(0)
model = resolve("nemotron_h").tiny(dtype=torch.float64)  # or your own config or checkpoint
batches = [torch.randint(3, model.config.vocab_size, (2, 49)) for _ in range(3)]  # 49: not divisible, padded inside
alone = train(copy.deepcopy(model), batches)

plan = autoplan.plan(model, cp_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))  # a dim "dp_shard" before it shards the weights
together = train(autoplan.parallelize(model, mesh, plan), batches)
assert torch.allclose(torch.tensor(alone), torch.tensor(together), atol=1e-5), (alone, together)
if dist.get_rank() == 0:
    print(f"losses as on one device: {', '.join(f'{loss:.4f}' for loss in together)}")
dist.destroy_process_group()
