"""Give NeMo Automodel a plan for a model that it does not know, through its registry or as a dotted path.

pip install --no-deps nemo-automodel
python examples/plug_into_automodel.py
"""

import sys
import tempfile
from pathlib import Path

import torch
from nemo_automodel.components.distributed.parallelizer import _get_parallel_plan
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

import autoplan

config = GPTNeoXConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8, vocab_size=128
)
with torch.device("meta"):
    model = GPTNeoXForCausalLM(config)
plan = autoplan.plan(model, tp_size=2)

with tempfile.TemporaryDirectory() as folder:
    Path(folder, "gpt_neox_plan.py").write_text(plan.export("automodel", model))
    sys.path.insert(0, folder)
    by_path = _get_parallel_plan(model, tp_shard_plan="gpt_neox_plan.plan", tp_size=2)

    import gpt_neox_plan

    gpt_neox_plan.register()
    by_class = _get_parallel_plan(model, tp_size=2)

for pattern, style in by_class.items():
    print(f"{pattern:50} {style}")
assert by_path.keys() == by_class.keys() == {entry.pattern for entry in plan.entries}
print("Automodel takes the plan by path and by class")
