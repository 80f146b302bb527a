"""A size at which no block splits is legal, and warned of: every rank computes nearly the whole model."""

from __future__ import annotations

from example_plans import llama_plan

from autoplan.decide.plan.folding import whole_blocks
from autoplan.values import Stack, replace


def test_a_plan_that_splits_no_block_is_warned_of() -> None:
    plan = llama_plan()
    blocks = tuple(f"model.layers.{number}" for number in range(4))
    plan = replace(plan, layers=(Stack("model.layers", "decoder", blocks),))
    assert whole_blocks(plan) == ()
    outside = tuple(entry for entry in plan.entries if "layers" not in entry.pattern)
    assert outside and len(outside) < len(plan.entries)
    (found,) = whole_blocks(replace(plan, entries=outside))
    assert found.level == "warn" and f"tp={plan.tp_size}" in found.message and "all 4 blocks" in found.message
    assert whole_blocks(replace(plan, entries=outside, layers=())) == (), "a model without repeated blocks"
    assert whole_blocks(replace(plan, entries=())) == (), "nothing is split: that is an error of its own"
