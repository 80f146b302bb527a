"""Plan a model from its config alone: no weights, no GPU, no hub. Then ask the plan questions."""

from pathlib import Path
from tempfile import TemporaryDirectory

import autoplan

FOLDER = Path(__file__).parent / "shapes" / "llama-3.1-70b"

plan = autoplan.plan(str(FOLDER), tp_size=8)
print(plan)
print()
print(plan.explain("model.layers.79.self_attn.k_proj"))

# A plan is data: what is saved is what is loaded.
with TemporaryDirectory() as folder:
    plan.save(f"{folder}/plan.yaml")
    assert autoplan.load_plan(f"{folder}/plan.yaml") == plan

# The same model at another size: what changes?
print()
for change in plan.diff(autoplan.plan(str(FOLDER), tp_size=4)):
    if change.what == "tp_size":
        print(f"tp {change.before} → {change.after}")
