"""Plan a model from its config alone, without weights, GPU or hub, and inspect the plan."""

from pathlib import Path
from tempfile import TemporaryDirectory

import autoplan

FOLDER = Path(__file__).parent / "shapes" / "llama-3.1-70b"

plan = autoplan.plan(str(FOLDER), tp_size=8)
print(plan)
print()
print(plan.explain("model.layers.79.self_attn.k_proj"))

# A plan is data: loading a saved plan gives an equal one.
with TemporaryDirectory() as folder:
    plan.save(f"{folder}/plan.yaml")
    assert autoplan.load_plan(f"{folder}/plan.yaml") == plan

# Compare with the same model at another tp size.
print()
for change in plan.diff(autoplan.plan(str(FOLDER), tp_size=4)):
    if change.what == "tp_size":
        print(f"tp {change.before} → {change.after}")
