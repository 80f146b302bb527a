"""Spoilt plan files: `python tests/fuzz/plan_files.py --count N --seed S`.

Plans of a few kinds are spoilt as values and as text, in YAML and JSON, and loaded; what loads is shown, explained,
compared and written again, and must read back the same.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "helpers"))

from example_plans import llama_plan, odd_plan
from fuzzing import Counts, Wrong, as_json, folder, fuzz, main, spoil, spoil_text

import autoplan

PLANS = [plan().to_dict() for plan in (llama_plan, odd_plan)]


def make(chance: random.Random) -> tuple[str, str]:
    """A file's name and text."""
    tree = chance.choice(PLANS)
    if chance.random() < 0.6:
        tree = spoil(tree, chance)
    suffix = chance.choice((".yaml", ".json"))
    text = as_json(tree) if suffix == ".json" or chance.random() < 0.5 else yaml.dump(tree, sort_keys=False)
    return f"plan{suffix}", text if chance.random() < 0.6 else spoil_text(text, chance)


def run(count: int, seed: int) -> Counts:
    with folder() as place:

        def attempt(case: tuple[str, str]) -> None:
            path = place / case[0]
            path.write_bytes(case[1].encode("utf-8", "surrogatepass"))
            plan: Any = autoplan.load_plan(path)
            str(plan)
            for entry in plan.entries[:2]:
                plan.explain(entry.pattern)
            plan.diff(llama_plan())
            plan.save(place / "again.yaml")
            if repr(autoplan.load_plan(place / "again.yaml")) != repr(plan):
                raise Wrong("it reads back as something else")

        return fuzz("plan files", make, attempt, count, seed)


if __name__ == "__main__":
    main(run)
