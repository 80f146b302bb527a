"""The first forward after sharding compares the shapes that leave the model with what was recorded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import count_collectives, run_ranks
from autoplan.common.errors import PlanMismatchError
from autoplan.values import AllReduce, Boundary, OutputShape, replace

WIDTH = 16


class Returns(nn.Module):
    """Features of two products; positions of a table, which are as long as the input where that is shorter."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(6, WIDTH))
        self.up, self.down, self.head = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), nn.Linear(WIDTH, 24)

    def forward(self, x: torch.Tensor, wide: bool = False) -> dict[str, torch.Tensor]:
        x = x + self.positions[: x.shape[1]]
        inner = torch.relu(self.up(x))
        x = x + self.down(inner)
        return {"hidden": inner if wide else x, "length": x.sum(-1), "scores": self.head(x).mT}


MODEL = Returns()
INPUTS = {"x": torch.randn(2, 6, WIDTH)}


def _run(model: nn.Module, plan: autoplan.Plan, *calls: dict[str, Any]) -> list[Any]:
    models = [copy.deepcopy(model) for _ in range(2)]
    return run_ranks(lambda rank: _with(models[rank], plan, calls), 2)


def _with(model: nn.Module, plan: autoplan.Plan, calls: tuple[dict[str, Any], ...]) -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    sharded = autoplan.parallelize(model, mesh, plan, check=False, path_guard="off")
    try:
        for call in calls:
            sharded(**call)
    except PlanMismatchError as error:
        return str(error)
    return "ran"


def test_only_what_weights_decide_is_recorded() -> None:
    shapes = {shape.path: shape for shape in autoplan.plan(Returns(), 2, inputs=INPUTS, prove="none").runtime.shapes}
    assert shapes[("hidden",)] == OutputShape(("hidden",), 3, ((2, WIDTH),))
    assert shapes[("scores",)] == OutputShape(("scores",), 3, ((1, 24),))
    assert ("length",) not in shapes


def test_another_batch_and_length_pass() -> None:
    plan = autoplan.plan(Returns(), 2, inputs=INPUTS, prove="none")
    assert _run(Returns(), plan, {"x": torch.randn(3, 4, WIDTH)}, INPUTS) == ["ran", "ran"]


def test_a_mismatch_names_the_output() -> None:
    plan = autoplan.plan(Returns(), 2, inputs=INPUTS, prove="none")
    for said in _run(Returns(), plan, {**INPUTS, "wide": True}):
        assert "'hidden'" in said and "32 features" in said and "had 16" in said and "inputs=" in said


def test_a_plan_that_lost_a_gather_is_noticed() -> None:
    plan = autoplan.plan(Returns(), 2, inputs=INPUTS, prove="none")
    left = tuple(
        one for one in plan.runtime.instructions if not isinstance(one, Boundary) or isinstance(one, AllReduce)
    )
    lost = replace(plan, runtime=replace(plan.runtime, instructions=left))
    assert len(left) < len(plan.runtime.instructions)
    for said in _run(Returns(), lost, INPUTS):
        assert "'scores'" in said and "12 features" in said


@pytest.mark.parametrize("calls", [1, 2])
def test_shapes_cost_no_collective(calls: int) -> None:
    plan = autoplan.plan(Returns(), 2, inputs=INPUTS, prove="none")
    bare = replace(plan, runtime=replace(plan.runtime, shapes=()))

    def counted(plan: autoplan.Plan) -> list[int]:
        models = [copy.deepcopy(MODEL) for _ in range(2)]

        def forward(rank: int) -> int:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            sharded = autoplan.parallelize(models[rank], mesh, plan, check=False)
            with count_collectives() as seen:
                for _ in range(calls):
                    sharded(**INPUTS)
            return sum(seen.values())

        return run_ranks(forward, 2)

    assert counted(plan) == counted(bare)
