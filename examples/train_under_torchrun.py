"""A training loop that calls autoplan, as it runs on a cluster.

torchrun --nproc-per-node 2 examples/train_under_torchrun.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan

dist.init_process_group("gloo")  # nccl on GPUs
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)  # every rank of a tp group starts from the same weights and sees the same data
torch.set_num_threads(1)

config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=128)
model = LlamaForCausalLM(config)
plan = autoplan.plan(model, tp_size=mesh.size())
model = autoplan.parallelize(model, mesh, plan)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids = torch.randint(0, config.vocab_size, (2, 16))
losses = []
for _ in range(4):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    print(f"{plan.source} plan on {mesh.size()} ranks; losses fall: {losses[0]:.3f} → {losses[-1]:.3f}")
assert losses[-1] < losses[0]
dist.destroy_process_group()
