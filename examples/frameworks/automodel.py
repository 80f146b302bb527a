"""NeMo Automodel: pass its FSDP2 strategy the dotted path of a plan module that autoplan writes.

torchrun --nproc-per-node 2 examples/frameworks/automodel.py
"""

import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

if find_spec("nemo_automodel") is None:
    sys.exit("this example needs NeMo Automodel: pip install --no-deps nemo-automodel")

import torch
import torch.distributed as dist
from nemo_automodel.components.distributed.parallelizer import fsdp2_strategy_parallelize
from torch.distributed.device_mesh import init_device_mesh
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import autoplan

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("dp_replicate", "dp_shard_cp", "tp"))
torch.manual_seed(0)
config = GPTNeoXConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=128
)
model = GPTNeoXForCausalLM(config)

plan = autoplan.plan_once(model, 2)
written = plan.export("automodel", model)
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "gpt_neox_plan.py").write_text(written)
    sys.path.insert(0, folder)
    model = fsdp2_strategy_parallelize(model, mesh, tp_shard_plan="gpt_neox_plan.plan")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ids, losses = torch.randint(0, config.vocab_size, (2, 16)), []
for _ in range(4):
    loss = autoplan.vocab_parallel_cross_entropy(model(input_ids=ids).logits, ids, shift=True)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())

assert losses[-1] < losses[0]
if dist.get_rank() == 0:
    print(f"Automodel: {written.note}; the loss went from {losses[0]:.3f} to {losses[-1]:.3f}")
dist.destroy_process_group()
