"""torch alone: one plan for all ranks, tensor and data parallelism, an ordinary training loop.

torchrun --nproc-per-node 2 examples/frameworks/plain_torch.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan

dist.init_process_group("gloo")  # nccl on GPUs
tp = 2
mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp_shard", "tp"))
torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=128)
model = LlamaForCausalLM(config)

plan = autoplan.plan_once(model, tp)  # one rank plans; checks that all ranks hold the same model
autoplan.parallelize(model, mesh, plan, activation_checkpointing=True)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
torch.manual_seed(mesh["dp_shard"].get_local_rank())  # tp ranks get the same data
ids = torch.randint(0, config.vocab_size, (2, 16))
losses = []
for _ in range(4):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    autoplan.clip_gradients(model, 1.0)  # the norm over all mesh dims
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

assert losses[-1] < losses[0]
if dist.get_rank() == 0:
    print(f"plain torch: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
dist.destroy_process_group()
