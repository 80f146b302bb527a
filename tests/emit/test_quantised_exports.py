"""Plans of quantised models in other systems' words: by module, as of plain ones, where that means the same cut."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from quantised_models import METHODS, experts, tiny

import autoplan
from autoplan.emit.exports.expressible import ExportError


@cache
def plan(name: str, kind: Any = tiny, **sizes: int) -> autoplan.Plan:
    config = kind(METHODS[name], **sizes)
    config.num_key_value_heads = config.num_attention_heads
    return autoplan.plan(config, tp_size=2, prove="none", uneven="blocks")


def _late(*case: str) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "name",
    ["fp8 blocks", _late("mxfp8"), _late("ct fp8 block")],
)
def test_transformers_cuts_what_lies_as_its_weight(name: str) -> None:
    found = plan(name).to_hf()
    config = tiny(None)  # type: ignore[arg-type]
    config.num_key_value_heads = 8
    assert found == autoplan.plan(config, tp_size=2, prove="none", source="inferred").to_hf()
    assert found["model.layers.*.mlp.down_proj"] == "rowwise"


def test_stacks_of_experts() -> None:
    found = plan("fp8 blocks", experts).to_hf()
    assert found["model.layers.*.mlp.experts.gate_up_proj"] == "packed_colwise"
    assert found["model.layers.*.mlp.experts"] == "moe_tp_experts"


@pytest.mark.parametrize(
    ("name", "told"),
    [("awq", "qweight"), _late("gptq", "qweight"), ("fp8 rows", "weight_scale")],
)
def test_transformers_is_not_told_what_it_would_cut_otherwise(name: str, told: str) -> None:
    with pytest.raises(ExportError, match=f"{told} is not sharded along the dim of the weight"):
        plan(name).to_hf()
    assert not any("layers" in key for key in plan(name).to_hf(drop=True))


@pytest.mark.parametrize("name", ["awq", _late("gptq"), "fp8 blocks"])
def test_vllm_cuts_its_own_modules(name: str) -> None:
    text = str(plan(name).export("vllm", drop=True))
    assert "down_proj" in text and "rowwise" in text


def test_uneven_cuts_are_refused_by_name() -> None:
    with pytest.raises(ExportError, match="sharded unevenly, between blocks"):
        plan("fp8 blocks", intermediate_size=160).to_hf()
