"""What a model computes in single precision inside is checked in double precision."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import autoplan
from autoplan.check.verify.clone import Clone, clone_of
from autoplan.check.verify.on_ranks import Sharding
from autoplan.check.verify.rounding import measure_rounding
from autoplan.check.verify.sharded import check_sharding
from autoplan.check.verify.verify import verify_clone
from autoplan.common.errors import AutoplanError
from autoplan.hf.source import resolve
from autoplan.patches.seeding import Lifted
from autoplan.values import Plan


@pytest.mark.parametrize(
    "single",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: torch.softmax(x, 0, dtype=torch.float32),
        lambda x: torch.nn.functional.softmax(x, 0, dtype=torch.float32),
        lambda x: x + torch.zeros(3, dtype=torch.float32),
    ],
)
def test_every_way_to_ask_for_single_precision(single) -> None:
    with Lifted():
        assert single(torch.ones(3, dtype=torch.float64)).dtype == torch.float64


class Inside(nn.Module):
    """Computes in single precision, and lets it be seen."""

    seen: ClassVar[set[torch.dtype]] = set()  # what a module itself holds is put back after each check

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x).float()
        self.seen.add(hidden.dtype)
        return torch.tanh(hidden).to(x.dtype)


class Refusing(Inside):
    """Insists on single precision, so nothing can be lifted."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.float().dtype != torch.float32:
            raise ValueError("single precision, please")
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "dtype", "inside"),
    [
        (Inside(), torch.float64, torch.float64),
        (Inside(), torch.float32, torch.float32),  # a check in single precision stays one
        (Refusing(), torch.float64, torch.float32),
    ],
)
def test_models_are_checked_in_double_precision_inside_where_they_can(model, dtype, inside) -> None:
    def shard(sharded: Inside, mesh: object) -> Inside:
        Inside.seen.clear()  # of the unsharded run
        return sharded

    def gather(sharded: Inside, gradients: bool) -> dict[str, torch.Tensor]:
        return {n: p.grad if gradients else p for n, p in sharded.named_parameters()}

    inputs = {"forward": {"x": torch.randn(4, 16, dtype=dtype)}}
    report = check_sharding(model.to(dtype), inputs, Sharding(shard, gather), 2, checks=["forward"])
    assert report.ok and Inside.seen == {inside}


# Bug or rounding: float64 decides, bfloat16 shows how far right results lie apart.


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
