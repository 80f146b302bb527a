"""torchtitan's llama3 with an inferred plan instead of its own parallelize function.

torchrun --nproc-per-node 2 examples/frameworks/torchtitan_llama3.py
"""

import sys
from importlib.util import find_spec

if find_spec("torchtitan") is None or find_spec("triton") is None:
    sys.exit("this example needs torchtitan, which imports triton: pip install torchtitan triton")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs

import autoplan

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
config = llama3_configs["debugmodel"](attn_backend="flex")
for layer in config.layers:
    layer.attention.inner_attention = ScaledDotProductAttention.Config()  # runs without a GPU
model = config.build()
model.init_states()

ids = torch.randint(0, config.vocab_size, (2, 32))
plan = autoplan.plan_once(model, mesh.size(), inputs={"tokens": ids})
autoplan.parallelize(model, mesh, plan)  # in place of the ModelSpec's parallelize_fn

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
losses = []
for _ in range(4):
    loss = autoplan.vocab_parallel_cross_entropy(model(ids), ids, shift=True)
    loss.backward()
    autoplan.clip_gradients(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

assert losses[-1] < losses[0]
if dist.get_rank() == 0:
    print(f"torchtitan's llama3: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
dist.destroy_process_group()
