"""Calls that a plan of context parallelism was not made from: one error that names the module and the line."""

from __future__ import annotations

import copy

import pytest
import torch
from mixer_stack import Stack
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.common import RankError
from autoplan.check.ranks.run import run_ranks


class Scan(torch.nn.Module):
    """A running sum of channels, which goes on from a state if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)
        self.decay = torch.nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        summed = torch.cumsum(self.into(x) * self.decay, 1)
        if state is not None:
            summed = summed + state[:, None]
        made: torch.Tensor = self.out(torch.tanh(summed))
        return made


class Model(Stack):
    def __init__(self) -> None:
        super().__init__(Scan)

    def forward(self, input_ids: torch.Tensor, state: torch.Tensor | None = None) -> torch.Tensor:
        return self.run(input_ids, state)


def test_a_state_of_all_channels_is_refused_by_module_and_line() -> None:
    torch.manual_seed(3)
    model, ids = Model().double(), torch.randint(30, (2, 8))
    plan = autoplan.plan(model, cp_size=2, inputs={"input_ids": ids})

    def run(_: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        sharded = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        sharded(ids, torch.zeros(2, 32).double())

    with pytest.raises(RankError, match=r"PlanMismatchError: blocks.0.mixer \(Scan\) fails on a rank's shards .*state"):
        run_ranks(run, 2)
