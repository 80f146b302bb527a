"""No communication that is not owed: sums that meet are one sum, at the exit of a region and at its entry."""

from __future__ import annotations

import pytest

import autoplan
from autoplan.capture.source import resolve


def _hooks(model_type, **how):
    plan = autoplan.plan(resolve(model_type).tiny(), 2, prove="none", **how)
    return plan, {(hook.pattern, hook.side, hook.action) for hook in plan.runtime.hooks}


@pytest.mark.parametrize(
    ("model_type", "block", "norm", "router"),
    [
        ("deepseek_v3", "model.layers.1.mlp", "model.layers.*.post_attention_layernorm", "gate"),
        ("glm4_moe", "model.layers.1.mlp", "model.layers.*.post_attention_layernorm", "gate"),
        ("qwen2_moe", "model.layers.*.mlp", "model.layers.*.post_attention_layernorm", "gate"),
        ("llama4_text", "model.layers.*.feed_forward", "model.layers.*.post_attention_layernorm", "router"),
    ],
)
def test_routed_and_shared_experts_pay_together(model_type, block, norm, router):
    plan, hooks = _hooks(model_type)
    inside = {hook for hook in hooks if hook[0].startswith(block) and hook[2] == "reduce"}
    assert inside == {(block, "output", "reduce")}, "one sum where the block returns"
    assert (norm, "output", "copy") in hooks, "one sum of the gradient, before all readers"
    assert (f"{block}.{router}", "input", "scale") in hooks, "the router runs alike on every rank: it gives shares"
    told = [cost for entry in plan.entries if "expert" in entry.pattern for cost in entry.reduces]
    assert any("where" in cost and "shared with" in cost for cost in told)


def test_what_is_not_added_is_not_waited_for():
    """Parallel attention and MLP meet the whole stream first, or amid the block: two sums, no scoped call."""
    for model_type in ("cohere", "gptj"):
        plan, hooks = _hooks(model_type)
        assert sum(action == "reduce" for _, _, action in hooks) == 2 and not plan.runtime.scoped
        assert sum(action == "copy" and "lm_head" not in name for name, _, action in hooks) == 1, "one shared norm"


@pytest.mark.parametrize("model_type", ["qwen2_moe", "llama4_text"])
def test_one_sum_is_exact(model_type):
    for how in ({"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}, {"tp_size": 4}):
        report = autoplan.verify(model_type, checks=("forward", "second_shape"), **how)
        assert report.ok, report
