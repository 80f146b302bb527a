"""One plan serves every implementation of the experts that transformers offers, router gradients included."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from slow_cases import marked

from autoplan.check.verify.clone import Clone, clone_of
from autoplan.check.verify.verify import verify_clone
from autoplan.common.options import Wish
from autoplan.hf.shrink import all_configs
from autoplan.hf.source import resolve
from autoplan.planning import draft_plan
from autoplan.values import AllReduce, Boundary, CallRewrite, Plan

# packed weights by rows and by columns, interleaved, with biases, with shared experts, between other mixers
TYPES = ["mixtral", "deepseek_v3", "gpt_oss", "llama4_text", "jamba"]
QUICK = ("mixtral", "gpt_oss")
SINGLE_PRECISION_ONLY = ("grouped_mm",)


@cache
def planned(model_type: str) -> tuple[Clone, Plan]:
    """A tiny clone, and its plan made from the one trace there is."""
    clone = clone_of(resolve(model_type))
    return clone, draft_plan(resolve(clone.model, inputs=clone.feeds), Wish(2)).plan


def computing_with(clone: Clone, implementation: str) -> Clone:
    model = copy.deepcopy(clone.model)
    for config in all_configs(model.config):
        config._experts_implementation = implementation
    if implementation not in SINGLE_PRECISION_ONLY:
        return replace(clone, model=model)
    feeds, others = (_in_single_precision(inputs) for inputs in (clone.feeds, clone.others))
    return replace(clone, model=model.float(), feeds=feeds, others=others)


def _in_single_precision(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    return {key: _in_single_precision(item) for key, item in value.items()} if isinstance(value, dict) else value


def implementations(types: Iterable[str]) -> list[Any]:
    """Every implementation of experts for each type; of two types all are quick tests, of others one or none."""
    cases = list(product(types, ("eager", "batched_mm", "grouped_mm")))
    long = [("llama4_text", "eager")]
    slow = [(name, how) for name, how in cases if name not in QUICK and (how != "eager" or name == "jamba")]
    return marked(cases, long=long, slow=slow)


@pytest.mark.parametrize(("model_type", "implementation"), implementations(TYPES))
def test_exact_in_every_implementation(model_type: str, implementation: str) -> None:
    clone, plan = planned(model_type)
    report = verify_clone(computing_with(clone, implementation), plan, checks=("parameters", "forward", "second_shape"))
    assert report.ok, report.findings
    routed = [name for name, p in clone.model.named_parameters() if p.dim() == 2 and _is_router(clone, name)]
    assert routed and all(name in report.gradients for name in routed)


def _is_router(clone: Clone, name: str) -> bool:
    """Its rows are as many as the experts next to it."""
    state = dict(clone.model.named_parameters())
    block = name.rpartition(".")[0].rpartition(".")[0]
    experts = {p.shape[0] for other, p in state.items() if p.dim() == 3 and other.startswith(f"{block}.")}
    return state[name].shape[0] in experts


@pytest.mark.parametrize("model_type", TYPES)
def test_nothing_hangs_on_the_order_of_calls_inside_experts(model_type: str) -> None:
    """Scoped calls are known by their position, and positions differ between implementations."""
    clone, plan = planned(model_type)
    experts = {name for name, module in clone.model.named_modules()
               if any(p is not None and p.dim() == 3 for p in module._parameters.values())}  # fmt: skip
    convolutions = {name for name in experts if "Conv" in type(clone.model.get_submodule(name)).__name__}
    assert not [call for call in plan.runtime.of(CallRewrite) if call.pattern in experts - convolutions]


def test_a_bias_added_to_each_experts_part_is_added_in_parts() -> None:
    """Whichever call adds it, each rank adds half, and the halves are summed where the experts' module ends."""
    _, plan = planned("gpt_oss")
    divided = {rule.pattern.rpartition(".")[2] for rule in plan.runtime.parameters if rule.divide}
    assert "down_proj_bias" in divided
    ends = [one for one in plan.runtime.of(Boundary) if one.pattern.endswith(".experts") and one.side == "output"]
    assert ends and set(map(type, ends)) == {AllReduce}
