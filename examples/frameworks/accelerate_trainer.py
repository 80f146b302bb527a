"""Train a sharded model with transformers' Trainer: without DDP, with full checkpoints that resume at any tp size.

torchrun --nproc-per-node 2 examples/frameworks/accelerate_trainer.py
"""

import sys
import tempfile
from importlib.util import find_spec

if find_spec("accelerate") is None:
    sys.exit("this example needs accelerate: pip install accelerate")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import autoplan

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
torch.manual_seed(0)
config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=128)
model = LlamaForCausalLM(config)
autoplan.parallelize(model, mesh, autoplan.plan_once(model, mesh.size()))

texts = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, config.vocab_size, (8, 16))]
folder = [tempfile.mkdtemp()]
dist.broadcast_object_list(folder)
arguments = TrainingArguments(
    folder[0],
    max_steps=4,
    per_device_train_batch_size=2,
    learning_rate=1e-2,
    logging_steps=1,
    save_steps=2,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
trainer = autoplan.hand_over(Trainer)(model, arguments, train_dataset=texts)
trainer.train()
trainer.train(resume_from_checkpoint=f"{folder[0]}/checkpoint-2")

whole = LlamaForCausalLM.from_pretrained(f"{folder[0]}/checkpoint-4")  # same files as from the unsharded model
assert whole.num_parameters() == LlamaForCausalLM(config).num_parameters()
if dist.get_rank() == 0:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"accelerate and Trainer: trained, saved and resumed; losses {losses}")
dist.destroy_process_group()
