"""Where transformers' own plans part the blocks of quantised weights: errors with arithmetic for proof."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shipped_plans import audit_quantised
from slow_cases import marked
from transformers import AutoConfig

import autoplan
from autoplan.check.audit.auditor import audit_source
from autoplan.common.errors import AutoplanError
from autoplan.hf.source import resolve

SHAPES = Path(__file__).parents[2] / "examples" / "shapes" / "quantised"
CASES = [
    ("qwen3-30b-a3b-fp8", 4, 2, "192 of 768", "down_proj_scale_inv is sharded to [2, 2, 2, 0]; rank 1 needs 1"),
    ("qwen3-235b-a22b-fp8", 8, 4, "192 of 1536", "down_proj_scale_inv is sharded to [2, 2, 2, 2, 2, 2, 0, 0]"),
    ("qwen3-coder-480b-a35b-fp8", 8, 4, "320 of 2560", "rank 1 needs 2–4, holds 3–5"),
    ("deepseek-r1-fp8", 32, 16, "576 of 18432", f"weight_scale_inv is sharded to [{'5, ' * 28}4, 0, 0, 0]"),
]  # fmt: skip


def config(name: str) -> Any:
    found = AutoConfig.from_pretrained(SHAPES / name)
    found.num_hidden_layers = 4
    return found


@pytest.mark.parametrize(("name", "tp", "legal", "numbers", "proof"), marked(CASES, slow=CASES[1:3]))
def test_published_cases(name: str, tp: int, legal: int, numbers: str, proof: str) -> None:
    report = audit_source(resolve(config(name)), "hf", tp, run=False)
    found = [finding for finding in report.findings if finding.check == "quantised"]
    assert found and all(finding.level == "error" and finding.proof for finding in found)
    assert any(numbers in finding.message for finding in found)
    assert any(proof in finding.proof for finding in found), [finding.proof for finding in found]
    fine = audit_source(resolve(config(name)), "hf", legal, run=False)
    assert not [finding for finding in fine.findings if finding.check == "quantised"]


def test_our_plans_cut_scales_with_their_weight() -> None:
    source = resolve(config("qwen3-30b-a3b-fp8"))
    report = audit_source(source, autoplan.plan(source.config, 4, prove="none"), 4, run=False)
    assert not [finding for finding in report.findings if finding.check == "quantised"]


@pytest.mark.parametrize(("name", "proof"), [("llama-3.3-70b-fp8-dynamic", "weight_scale is sharded to [1, 0]"),
                                             ("llama-3.1-8b-bnb-int8", "SCB is [")])  # fmt: skip
def test_one_scale_for_each_output_is_cut_along_the_inputs(name: str, proof: str) -> None:
    """transformers cuts all that a row-wise layer holds along its last dim: the second rank has no scale."""
    report = audit_source(resolve(config(name)), "hf", 2, run=False)
    found = [finding for finding in report.findings if finding.check == "quantised"]
    assert found and all("down_proj" in finding.message or "o_proj" in finding.message for finding in found)
    assert any(finding.proof.startswith(proof) for finding in found), [finding.proof for finding in found]


def test_biases_of_a_stack_are_no_scales() -> None:
    """gpt-oss has two matrices of biases, one twice as wide as the other."""
    source = resolve(config("gpt-oss-20b-mxfp4"))
    report = audit_source(source, autoplan.plan(source.config, 2, prove="none"), 2, run=False)
    assert not [finding for finding in report.findings if finding.check == "quantised"]


def test_every_size_of_shipped_plans() -> None:
    rows = {
        row.model_type: row for row in audit_quantised("fp8", ["causal_lm"], only=["qwen3_moe", "deepseek_v3", "llama"])
    }
    assert (
        4 in rows["qwen3_moe"].sizes
        and 2 not in rows["qwen3_moe"].sizes
        and "is sharded to [" in rows["qwen3_moe"].proof
    )
    assert 32 in rows["deepseek_v3"].sizes and 16 not in rows["deepseek_v3"].sizes
    with pytest.raises(AutoplanError, match="'made up'"):
        audit_quantised("made up", ["causal_lm"])
