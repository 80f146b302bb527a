"""Train on two real processes, beside the same model in one: the losses stay equal.

On GPUs the same lines run under torchrun with the nccl backend; here two CPU processes talk over gloo.
"""

import copy
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan

RANKS, STEPS = 2, 3
CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=128,
)


def train(model: nn.Module, ids: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def work(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)  # every rank of a tp group sees the same data
    torch.set_num_threads(1)
    model = LlamaForCausalLM(CONFIG).double()
    alone = copy.deepcopy(model)
    ids = torch.randint(0, CONFIG.vocab_size, (2, 16))

    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    plan = autoplan.plan(model, tp_size=RANKS)
    losses = train(autoplan.parallelize(model, mesh, plan), ids)
    expected = train(alone, ids)
    assert torch.allclose(torch.tensor(losses), torch.tensor(expected), rtol=1e-9), (losses, expected)
    if rank == 0:
        print(f"losses on {RANKS} ranks: {', '.join(f'{loss:.6f}' for loss in losses)}, equal to one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(work, (port,), RANKS)
