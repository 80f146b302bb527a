"""Bug or rounding: float64 decides, bfloat16 shows how far right results lie apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autoplan
from autoplan.check.verify.clone import Clone, clone_of
from autoplan.check.verify.rounding import measure_rounding
from autoplan.check.verify.verify import verify_clone
from autoplan.common.errors import AutoplanError
from autoplan.hf.source import resolve
from autoplan.values import Plan


def planned(sequence_parallel: bool = False) -> tuple[Clone, Plan]:
    clone = clone_of(resolve("llama"))
    plan = autoplan.plan(clone.model, 2, prove="none", inputs=dict(clone.feeds), sequence_parallel=sequence_parallel)
    assert plan.sequence_parallel == sequence_parallel
    return clone, plan


def test_a_right_plan_only_rounds() -> None:
    found = autoplan.verify("llama", tp_size=2, checks=["forward"], rounding=True).details["rounding"]
    assert found["verdict"] == "rounding" and "exact in float64" in found["why"]
    assert list(found["layers"]) == ["text: model.layers.0", "text: model.layers.1", "text: output"]
    for errors in found["layers"].values():
        assert 1e-4 < errors["unsharded"] < 0.1 and 1e-4 < errors["sharded"] < 0.1 and 0 < errors["apart"] < 0.1


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_whose_output_is_cut_are_put_together(sequence_parallel: bool) -> None:
    clone, plan = planned(sequence_parallel)
    found = measure_rounding(clone.model, clone.feeds, plan, exact=True)
    assert found["verdict"] == "rounding" and len(found["layers"]) == 3


def test_a_bug_is_a_bug() -> None:
    """One reduction left out: float64 says so, and bfloat16 alone would have shown it too."""
    clone, plan = planned()
    left = tuple(one for one in plan.runtime.instructions if "down_proj" not in one.pattern)
    assert len(left) == len(plan.runtime.instructions) - 1
    wrong = replace(plan, runtime=replace(plan.runtime, instructions=left))
    report = verify_clone(clone, wrong, checks=["forward"])
    assert not report.ok
    assert measure_rounding(clone.model, clone.feeds, wrong, exact=report.ok)["verdict"] == "bug"
    assert measure_rounding(clone.model, clone.feeds, wrong, exact=True)["verdict"] == "unclear"


def test_it_is_not_measured_on_meshes() -> None:
    with pytest.raises(AutoplanError, match="tensor-parallel ranks"):
        autoplan.verify("llama", mesh="dp=2,tp=2", rounding=True)
