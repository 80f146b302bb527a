"""Verify is shown able to find: every kind of fault, planted into plans of real architectures, is caught."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice

import pytest
import torch
from planted_faults import FAULTS, Fault, plant
from slow_cases import marked

from autoplan.analyse.solve import solve
from autoplan.capture.capture import capture_real
from autoplan.check.verify.on_ranks import sharding_of
from autoplan.check.verify.sharded import check_sharding
from autoplan.common.random_values import randomise
from autoplan.hf.inputs.make import make_inputs
from autoplan.values import Plan

SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 64,
}
SMALL = {
    "llama": {**SIZES, "tie_word_embeddings": True},
    "qwen3": SIZES,
    "olmo2": SIZES,
    "phi3": {name: size for name, size in SIZES.items() if name != "head_dim"},
    "gpt2": {"vocab_size": 64, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "falcon": {"vocab_size": 64, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    "bloom": {"vocab_size": 64, "hidden_size": 48, "n_layer": 2, "n_head": 4},
    "opt": {**SIZES, "ffn_dim": 40, "word_embed_proj_dim": 48},
}
TWO = ("qwen3", "falcon")  # norms of heads; a key and value head for all, biases, a fused matrix


@cache
def subject(model_type: str) -> tuple[torch.nn.Module, dict, Plan]:
    """A tiny model with random weights, the call to make, and its plan for two ranks."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **SMALL[model_type])
    model = AutoModelForCausalLM.from_config(config).double().eval()
    randomise(model)
    feeds = make_inputs(model, config=config, model_type=model_type).feeds
    solution = solve(capture_real(copy.deepcopy(model), feeds).trace, 2)
    return model, feeds, Plan(model=model_type, tp_size=2, runtime=solution.runtime)


@cache
def report_of(model_type: str, fault: Fault | None):
    """Two tests look at the same reports."""
    model, feeds, plan = subject(model_type)
    if fault is None:
        return check_sharding(model, feeds, sharding_of(plan), 2)
    planted = plant(fault, plan, sharding_of)
    if planted is None or (fault.name == "untied head" and not tied(model)):
        return None
    return check_sharding(model, feeds, planted.sharding, 2, checks=fault.checks)


def tied(model: torch.nn.Module) -> bool:
    return len(list(model.named_parameters())) < len(list(model.named_parameters(remove_duplicate=False)))


def places(fault: Fault) -> Iterator[str]:
    """The models in which this fault can be planted, those of `TWO` first."""
    for model_type in dict.fromkeys((*TWO, *SMALL)):
        plan = subject(model_type)[2]
        if fault.spoil(plan) is not None and (fault.name != "untied head" or tied(subject(model_type)[0])):
            yield model_type


@pytest.mark.parametrize(
    "model_type", marked(SMALL, long=["gpt2"], slow=[one for one in SMALL if one not in ("gpt2", *TWO)])
)
def test_right_plans_are_clean(model_type: str) -> None:
    report = report_of(model_type, None)
    assert report.ok, report.findings[:3]
    assert max(report.gradients.values()) < 1e-6


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault: Fault) -> None:
    """In two models where two have a place for it."""
    tried = list(islice(places(fault), 2))
    assert tried, f"no model has a place for {fault.name!r}: the test proves nothing"
    check_caught(fault, tried)


@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught_in_every_model(fault: Fault) -> None:
    check_caught(fault, islice(places(fault), 2, None))


def check_caught(fault: Fault, tried: Iterable[str]) -> None:
    for model_type in tried:
        report = report_of(model_type, fault)
        assert not report.ok, f"{fault.name} in {model_type} went unnoticed"


def test_some_faults_leave_forward_exact() -> None:
    """What comparing outputs alone would have missed."""
    silent = {
        fault.name
        for fault in FAULTS
        for model_type in TWO
        if (report := report_of(model_type, fault)) is not None and (report.forward or 1) < 1e-9
    }
    assert {"no gradient sum", "double gradient sum", "no gradient sum of a parameter"} <= silent


def test_a_gradient_fault_names_its_parameter() -> None:
    fault = next(fault for fault in FAULTS if fault.name == "no gradient sum of a parameter")
    (rule,) = set(subject("qwen3")[2].runtime.parameters) - set(fault.spoil(subject("qwen3")[2]).runtime.parameters)
    wrong = {finding.where for finding in report_of("qwen3", fault).findings}
    assert wrong == {rule.pattern}


def test_there_are_enough_kinds() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 12
