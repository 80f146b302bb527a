"""Rows, numbers and draws of sharded parameters, in the checkpoint's order."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.check.ranks.run import run_ranks


class Packed(nn.Module):
    """Two layers in one weight, whose rows lie in another order on ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(8, 32), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(x).chunk(2, -1)
        result: torch.Tensor = self.down(gate.sigmoid() * up)
        return result


@cache
def model_and_plan() -> tuple[Packed, autoplan.Plan]:
    torch.manual_seed(0)
    model = Packed()
    return model, autoplan.plan(model, tp_size=2)


def rows_set(m: Any) -> None:
    m.both.weight.data[17] = 3
    m.both.weight.data[[2, 30]] = m.both.weight.data[[30, 2]]


def rows_added(m: Any) -> None:
    with torch.no_grad():
        m.both.weight[12:20] += 1
        m.down.weight[:, 10:] = m.down.weight[:, :6] * 2


def pieces_filled(m: Any) -> None:
    with torch.no_grad():
        m.both.bias.chunk(4)[1].fill_(0.5)
        m.both.weight.narrow(0, 20, 4).zero_()
        m.both.weight.select(0, 9).mul_(3)
        m.both.weight.unbind(0)[31].sub_(1)


def rows_by_mask(m: Any) -> None:
    with torch.no_grad():
        m.both.weight[m.both.bias > 0] = 0


def drawn(m: Any) -> None:
    torch.manual_seed(5)
    nn.init.normal_(m.both.weight)
    nn.init.uniform_(m.both.bias)
    m.down.reset_parameters()


def gradients_of_rows(m: Any) -> None:
    m(torch.linspace(-1, 1, 16).view(2, 8)).sum().backward()
    m.both.weight.grad[16:] = 0
    m.both.bias.grad[:8].mul_(2)
    torch.optim.SGD(m.parameters(), lr=1.0).step()


def penalty(m: Any) -> None:
    loss = m(torch.ones(1, 8)).sum() + sum(p.pow(2).sum() + p.norm(dim=0).sum() for p in m.parameters())
    (loss + m.both.weight[16:20].sum()).backward()
    torch.optim.SGD(m.parameters(), lr=0.1).step()


def by_number(m: Any) -> None:
    """A factor that is a number of the whole."""
    with torch.no_grad():
        for p in m.parameters():
            p.mul_(1 / float(p.norm()) + p.sum().item() + float(p.abs().max()))


@pytest.mark.parametrize(
    "change",
    [rows_set, rows_added, pieces_filled, rows_by_mask, drawn, gradients_of_rows, penalty, by_number],
    ids=lambda change: change.__name__,
)
def test_weights_are_those_of_the_unsharded_model(change: Callable[[Any], None]) -> None:
    model, plan = model_and_plan()
    expected = copy.deepcopy(model)
    change(expected)

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        assert isinstance(sharded.both.weight, DTensor)
        change(sharded)
        return autoplan.full_tensors(sharded)

    for found in run_ranks(rank, 2):
        for name, value in expected.state_dict().items():
            assert torch.allclose(found[name], value, rtol=1e-4, atol=1e-6), name


def test_models_without_values_that_live_beside_are_not_read() -> None:
    """An estimate keeps such a model; its shapes may be those of the one that trains."""
    model, plan = model_and_plan()

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        beside = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        for parameter in beside.parameters():
            parameter._local_tensor = FakeTensorMode().from_tensor(parameter._local_tensor)
        sharded = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        rows_by_mask(sharded)
        return type(beside.both.weight._local_tensor), autoplan.full_tensors(sharded)

    expected = copy.deepcopy(model)
    rows_by_mask(expected)
    for kind, found in run_ranks(rank, 2):
        assert kind is FakeTensor
        assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())


def test_torch_has_its_own_methods_again() -> None:
    """Once no sharded model lives: those of other tests may."""
    replaced = {"__setitem__", "__getitem__", "sum"}
    gc.collect()
    before = replaced & set(vars(DTensor))
    model, plan = model_and_plan()

    def rank(number: int) -> Any:
        sharded = autoplan.parallelize(
            copy.deepcopy(model), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan
        )
        inside = "__setitem__" in vars(DTensor)
        autoplan.applied(sharded).undo()
        return inside

    assert all(run_ranks(rank, 2))
    gc.collect()
    assert replaced & set(vars(DTensor)) == before


def test_what_only_reads_a_row_gives_what_torch_does() -> None:
    model, plan = model_and_plan()

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded: Any = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        with torch.no_grad():
            row = sharded.both.weight[3]
            return int(sharded.both.weight[3, 0]), int(100 * row[0]), [float(one) for one in row]

    row = model.both.weight[3].detach()
    assert run_ranks(rank, 2) == [(int(row[0]), int(100 * row[0]), row.tolist())] * 2
