"""Spoilt plans of other libraries: `python tests/fuzz/foreign_plans.py --count N --seed S`.

transformers' dicts of strings, DeepSpeed's partition configs and our plan files are spoilt as values and as text, and
read as `plan(source=…)` and `audit(plan=…)` read them: from files, as dicts, and where a model carries them itself.
What is read is asked about every parameter of a small model.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from fuzzing import Counts, as_json, folder, fuzz, main, spoil, spoil_text
from transformers import LlamaConfig, LlamaForCausalLM

STYLES = {
    "model.embed_tokens": "embedding_rowwise",
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "lm_head": "colwise_rep",
}
SPECS = {
    "layer_specs": [
        {"patterns": [".*\\.[qkv]_proj\\.weight$", ".*\\.(gate|up)_proj\\.weight$"], "partition_type": "column"},
        {"patterns": [".*\\.(o|down)_proj\\.weight$"], "partition_type": "row"},
        {"patterns": ["lm_head.*"], "partition_type": "skip", "shape": [2, -1]},
    ],
    "lm_head_patterns": ["lm_head"],
}
PLANS: tuple[dict[str, Any], ...] = (STYLES, SPECS, {"tensor_parallel": {"autotp_size": 2, "partition_config": SPECS}})
KEYS = ("(a+)+$", "(.*.*)*x", ".*" * 30, "(" * 200, "*a" * 40, "*" * 60, "a{9999}{9999}", "[", "(?P<x>a)(?P<x>b)", "\\")


def make(chance: random.Random) -> tuple[str, Any]:
    """How the plan is handed over, and the plan."""
    tree = spoil(chance.choice(PLANS), chance)
    if chance.random() < 0.15:
        hostile = chance.choice(KEYS)
        if isinstance(tree, dict) and "layer_specs" in tree:
            tree["layer_specs"] = [{"patterns": [hostile], "partition_type": "column"}]
        elif isinstance(tree, dict):
            tree[f"model.layers.{hostile}"] = "colwise"
    how = chance.choice(("plan.json", "plan.yaml", "plan", "dict", "carried"))
    if how in ("dict", "carried"):
        return how, tree
    text = as_json(tree)
    return how, text if chance.random() < 0.6 else spoil_text(text, chance)


def run(count: int, seed: int) -> Counts:
    from autoplan.check.audit.lines import read_foreign
    from autoplan.decide.written_plans.choices import ChosenCuts
    from autoplan.decide.written_plans.read import read_source

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=96))
    names = [name for name, _ in model.named_parameters()]
    modules = [name for name, _ in model.named_modules()]

    def use(source: Any) -> None:
        try:
            found = read_source(source, None, model, name="toy", tp_size=2)
            if isinstance(found, ChosenCuts):
                found.check_keys(modules, names)
                for name in names:
                    found.of(name)
        finally:
            foreign = read_foreign(source, model, "toy")
            for name in names:
                if not isinstance(foreign, str):
                    foreign.line_for(name)

    with folder() as place:

        def attempt(case: tuple[str, Any]) -> None:
            how, plan = case
            if how == "carried":
                model.__dict__["_tp_plan"] = plan
                try:
                    use("hf")
                finally:
                    del model.__dict__["_tp_plan"]
            elif how == "dict":
                use(plan)
            else:
                (place / how).write_bytes(plan.encode("utf-8", "surrogatepass"))
                use(str(place / how))

        return fuzz("foreign plans", make, attempt, count, seed)


if __name__ == "__main__":
    main(run)
