"""No communication that is not needed: sums that meet are one sum, at the exit of a region and at its entry."""

from __future__ import annotations

import pytest
import torch
from slow_cases import marked

import autoplan
from autoplan.hf.source import resolve
from autoplan.values import AllReduce, AllReduceGradient, Boundary, CallRewrite, ScaleGradient


def _hooks(model_type, **how):
    plan = autoplan.plan(resolve(model_type).tiny(), 2, prove="none", **how)
    return plan, {(one.pattern, one.side, type(one)) for one in plan.runtime.of(Boundary)}


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
    inside = {hook for hook in hooks if hook[0].startswith(block) and hook[2] is AllReduce}
    assert inside == {(block, "output", AllReduce)}, "one sum where the block returns"
    assert (norm, "output", AllReduceGradient) in hooks, "one sum of the gradient, before all readers"
    assert (f"{block}.{router}", "input", ScaleGradient) in hooks, "the router runs alike on every rank: it gives parts"
    told = [cost for entry in plan.entries if "expert" in entry.pattern for cost in entry.reduces]
    assert any(cost.at and cost.shared_with for cost in told)


@pytest.mark.parametrize("model_type", ["cohere", "gptj", "cohere2_moe"])
def test_attention_and_mlp_beside_each_other_pay_together(model_type):
    """Whichever is added to the stream first, and where experts return rows of tokens; nothing runs in a mode."""
    plan, hooks = _hooks(model_type)
    assert sum(kind is AllReduce for _, _, kind in hooks) == 1 and not plan.runtime.of(CallRewrite)
    large = [n for n, _, kind in hooks if kind is AllReduceGradient and "lm_head" not in n and "gate" not in n]
    assert len(large) == 1, "one sum of the gradient, where the norm is returned"
    for one in plan.communication:
        assert one.forward == {"all_reduce": one.least_forward}
        (number, _), router = one.backward["all_reduce"], model_type == "cohere2_moe"  # its weights' gradient is apart
        assert number == one.least_backward[0] + router and (one.ratio == 1.0) is not router


@pytest.mark.parametrize("model_type", ["qwen2_moe", pytest.param("llama4_text", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("tp", "cut"), [(2, False), (2, True), pytest.param(4, False, marks=pytest.mark.slow)])
def test_one_sum_is_exact(model_type, tp, cut):
    report = autoplan.verify(model_type, tp_size=tp, sequence_parallel=cut, checks=("forward", "second_shape"))
    assert report.ok, report


# ------------------------------------------------------------------------------------------------ the figures

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "gemma2")


def _scored(model_type, **how):
    report = autoplan.verify(model_type, checks=("forward",), **how)
    assert report.ok, report
    return report.details["communication"]


@pytest.mark.parametrize("model_type", marked(LLAMA_LIKE, slow=["mistral", "qwen2"]))
@pytest.mark.parametrize("cut", [False, True])
def test_a_llama_like_block_moves_what_its_split_needs_and_no_more(model_type, cut):
    """Two sums each way; along the sequence the same bytes as two gathers and two reduce-scatters."""
    for one in _scored(model_type, sequence_parallel=cut):
        assert one.ratio == 1.0 and one.least_forward == one.least_backward, one
        assert one.least_forward[0] == 2
        wanted = {"all_gather": 2, "reduce_scatter": 2} if cut else {"all_reduce": 2}
        for moved in (one.forward, one.backward):
            assert {kind: number for kind, (number, _) in moved.items()} == wanted


@pytest.mark.parametrize("model_type", marked(["deepseek_v3", "gpt_neox", "mamba2", "falcon_h1"], long=["falcon_h1"]))
def test_what_was_planned_is_what_runs(model_type):
    plan = autoplan.plan(resolve(model_type).tiny(dtype=torch.float64), 2, prove="none")
    measured = {one.block: one for one in _scored(model_type)}
    assert {one.block: one for one in plan.communication} == measured
    for one in plan.communication:
        assert one.ratio is not None and one.ratio >= 1.0, "a bound that is undercut is none"


def test_a_plan_in_another_dtype_has_the_bound_of_what_runs():
    model = resolve("llama").tiny(dtype=torch.float32)
    plan = autoplan.plan(model, 2, prove="none")
    report = autoplan.verify(model, plan, checks=("forward",))
    (ran,) = report.details["communication"]
    (planned,) = plan.communication
    assert ran.ratio == planned.ratio == 1.0 and ran.least_forward[1] == 2 * planned.least_forward[1]


@pytest.mark.parametrize(
    ("model_type", "sums"),
    [  # each branch has a norm of its own; branches are scaled before they are added
        ("gpt_neox", "the gradients at input_layernorm, post_attention_layernorm are all-reduced separately"),
        ("falcon_h1", "mamba.out_proj, self_attn.o_proj are all-reduced separately"),
    ],
)
def test_each_excess_is_explained(model_type, sums):
    plan = autoplan.plan(resolve(model_type).tiny(), 2, prove="none")
    (block,) = plan.communication
    assert block.ratio is not None and block.ratio > 1.0
    said = [finding for finding in plan.findings if finding.check == "communication"]
    assert any(sums in finding.message and finding.where == block.block for finding in said), said


def test_figures_are_saved_and_printed(tmp_path):
    plan = autoplan.plan(resolve("llama").tiny(), 2, prove="none")
    plan.save(tmp_path / "plan.json")
    assert autoplan.load_plan(tmp_path / "plan.json") == plan
    assert plan.to_dict()["communication"][0]["forward"] == {"all_reduce": [2, 4096]}
    assert "2 all_reduce 4096 B" in str(plan)
