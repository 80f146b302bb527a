"""Models whose code names an accelerator are planned, tried and estimated on a machine without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import autoplan
from autoplan.hf.source import resolve
from autoplan.patches.seeding import names_an_accelerator, on_one_device

GPU = torch.device("cuda", 0)


def ones_on(device: str, count: int) -> torch.Tensor:
    return torch.ones(count, device=device)


def by_context(count: int) -> torch.Tensor:
    with torch.device("cuda"):
        return torch.ones(count)


WAYS: dict[str, Callable[[int], torch.Tensor]] = {
    "keyword": lambda count: torch.ones(count, device="cuda"),
    "method": lambda count: torch.ones(count).cuda(),
    "to": lambda count: torch.ones(count).to("cuda:0"),
    "global": lambda count: torch.ones(count).to(GPU),
    "number": lambda count: torch.ones(count, device=torch.cuda.current_device()),
    "helper": lambda count: ones_on("cuda", count),
    "context": by_context,
    "type": lambda count: torch.ones(count).type("torch.cuda.FloatTensor"),
}


class Model(nn.Module):
    """Two layers, scaled by a tensor that `way` makes; with `again`, their forward runs once more in backward."""

    def __init__(self, way: Callable[[int], torch.Tensor], again: bool = False) -> None:
        super().__init__()
        self.scaled, self.again = way, again
        self.table, self.up, self.down = nn.Embedding(64, 32), nn.Linear(32, 96), nn.Linear(96, 32)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * self.scaled(x.shape[1])[:, None].to(x.dtype)  # type: ignore[no-any-return]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return x + (checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x))


class Placed(nn.Module):
    """Its code names no device; an attribute does."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.up, self.down = "cuda", nn.Linear(32, 96), nn.Linear(96, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * torch.ones((), device=self.place)  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", WAYS)
def test_code_that_names_a_gpu_is_planned_on_the_cpu(name: str) -> None:
    plan = autoplan.plan(Model(WAYS[name]), tp_size=2)
    assert plan.proof.ok
    assert {entry.style for entry in plan.entries} >= {"colwise", "rowwise"}


def test_the_forward_that_runs_again_in_backward_is_on_the_cpu_too() -> None:
    model = Model(WAYS["keyword"], again=True)
    report = autoplan.verify(model, autoplan.plan(model, tp_size=2))
    assert report.ok, report


def test_attributes_that_name_a_device_count() -> None:
    assert names_an_accelerator(Placed())
    assert not names_an_accelerator(nn.Linear(2, 2))
    assert autoplan.plan(Placed(), tp_size=2).proof.ok
    assert autoplan.estimate(Placed(), mesh={"tp": 2}, sequence=32).peak > 0


def test_outside_of_the_block_nothing_is_moved() -> None:
    with FakeTensorMode():  # has devices that are not there
        with on_one_device(Placed()):
            assert torch.ones(2, device="cuda").device.type == "cpu"
        assert torch.ones(2, device="cuda").device.type == "cuda"
        with on_one_device(nn.Linear(2, 2)):
            assert torch.ones(2, device="cuda").device.type == "cuda"


def test_examples_on_a_gpu_are_moved_to_where_the_copy_is() -> None:
    with FakeTensorMode():
        given = {"x": torch.ones(2, 32, device="cuda", requires_grad=True), "more": [torch.ones(1, device="cuda")]}
        moved = resolve(Placed(), inputs=given).inputs
    assert moved is not None
    assert (moved["x"].device.type, moved["x"].requires_grad, moved["more"][0].device.type) == ("cpu", True, "cpu")
    assert given["x"].device.type == "cuda"
