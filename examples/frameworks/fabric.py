"""Lightning Fabric: its ModelParallelStrategy calls a function with the model and the mesh, which shards the model.

python examples/frameworks/fabric.py
"""

import sys
from importlib.util import find_spec

if find_spec("lightning_fabric") is None:
    sys.exit("this example needs Lightning Fabric: pip install lightning-fabric")

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import LlamaConfig, LlamaForCausalLM

import autoplan

DIMS = {"tp": "tensor_parallel", "dp_shard": "data_parallel"}  # Fabric's names of the mesh dims
CONFIG = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=128)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = autoplan.plan_once(model, mesh["tensor_parallel"].size())
    return autoplan.parallelize(model, mesh, plan, mesh_dims=DIMS)


def main() -> None:
    strategy = ModelParallelStrategy(shard, data_parallel_size=1, tensor_parallel_size=2)
    fabric = Fabric(accelerator="auto", devices=2, strategy=strategy)
    fabric.launch()
    fabric.seed_everything(0)
    model = fabric.setup(LlamaForCausalLM(CONFIG))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    ids = torch.randint(0, CONFIG.vocab_size, (2, 16), device=fabric.device)
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    fabric.print(f"Lightning Fabric: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
