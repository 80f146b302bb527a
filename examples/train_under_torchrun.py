"""Train with autoplan as on a cluster, and check that the losses equal those of one process.

torchrun --nproc-per-node 2 examples/train_under_torchrun.py
"""

import copy

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan

dist.init_process_group("gloo")  # nccl on GPUs
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)  # all ranks of a tp group start from the same weights and get the same data
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=128)
model = LlamaForCausalLM(config).double()
alone, ids = copy.deepcopy(model), torch.randint(0, config.vocab_size, (2, 16))


def train(model: torch.nn.Module) -> torch.Tensor:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


plan = autoplan.plan(model, tp_size=mesh.size())
losses = train(autoplan.parallelize(model, mesh, plan))
torch.testing.assert_close(losses, train(alone))
if dist.get_rank() == 0:
    print(f"{plan.source} plan on {mesh.size()} ranks; losses fall as in one process: {losses.tolist()}")
dist.destroy_process_group()
