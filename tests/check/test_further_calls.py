"""Calls that a user may make after the one that was recorded: the same again, without gradients, with other dims."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import autoplan
from autoplan.capture.derive_inputs import recipe_for
from autoplan.check.ranks.run import run_ranks
from autoplan.check.verify.on_ranks import Sharding, sharding_of
from autoplan.check.verify.sharded import check_sharding
from autoplan.execute.parameters.buffers import full_tensors


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = F.gelu(self.up(x))
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(self.hidden(x))
        return result


class SetByData(Mlp):
    """The first call sets a scale from its data."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ready", torch.tensor(False))
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x)
        if not self.ready:
            self.scale.data.copy_(1 / h.detach().std((0, 1)))
            self.ready.fill_(True)
        result: torch.Tensor = x + self.down(h * self.scale)
        return result


class SetByFlag(Mlp):
    """The same with a flag in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.ready, self.scale = False, nn.Parameter(torch.ones(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.hidden(x)
        if not self.ready:
            self.scale.data.copy_(1 / h.detach().std((0, 1)))
            self.ready = True
        result: torch.Tensor = x + self.down(h * self.scale)
        return result


class AsksForGradients(Mlp):
    """Without gradients its code goes another way, and computes the same."""

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        h = super().hidden(x)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.training):
            size = h.pow(2).mean(-1, keepdim=True)
        return h / (1 + size)


class Experts(nn.Module):
    """Takes rows; a batch of sequences runs too if the sequence is as long as there are experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(3))
        self.gate = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        e = torch.stack([expert(x) for expert in self.experts], 1)
        return (self.gate(x).softmax(-1).unsqueeze(-1) * e).sum(1)


class SumsInTraining(Mlp):
    """Only its training code says that it takes rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.training:
            with torch.no_grad():
                self.seen.add_(y.t() @ y)
        return y


class WhereTheyAre(Mlp):
    """Takes a mask under a name that says nothing."""

    def forward(self, x: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        y[there] = self.down(F.layer_norm(self.hidden(x[there]), (32,)))
        return x + y


ROWS, X = torch.randn(5, 16), torch.randn(2, 6, 16)


@pytest.mark.parametrize(
    ("model", "calls", "grad"),
    [
        (SetByData, (X, X * 2), True),
        (SetByFlag, (X, X * 2), True),
        (AsksForGradients, (X,), False),
        (Experts, (ROWS,), True),
        (SumsInTraining, (ROWS,), True),
        (WhereTheyAre, ((X, X[..., 0] > 0),), True),
    ],
)
def test_a_call_that_was_not_recorded_is_exact(model: type[nn.Module], calls: Any, grad: bool) -> None:
    torch.manual_seed(0)
    plain = model().eval()
    plan = autoplan.plan(plain, 2)
    assert plan.proof.ok and any(entry.style == "colwise" for entry in plan.entries), plan.findings
    if model is SumsInTraining:
        plain.train()

    def outputs(model: nn.Module) -> list[torch.Tensor]:
        with torch.set_grad_enabled(grad):
            results = [model(*call) if isinstance(call, tuple) else model(call) for call in calls]
        return [x.full_tensor().detach() if isinstance(x, DTensor) else x.detach() for x in results]

    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    expected = outputs(plain)

    def sharded(rank: int) -> list[torch.Tensor]:
        own, mesh = model().train(plain.training), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        own.load_state_dict(state)
        return outputs(autoplan.parallelize(own, mesh, plan))

    for found in run_ranks(sharded, 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_call_with_other_dims_counts_only_if_it_is_right() -> None:
    """With three dims the norm is one over a sequence; with two it is one over all hidden units."""

    class Normed(Mlp):
        def hidden(self, x: torch.Tensor) -> torch.Tensor:
            return F.normalize(super().hidden(x), dim=1)

    torch.manual_seed(0)
    model = Normed().eval()
    assert recipe_for(model).dims is not None
    plan = autoplan.plan(model, 2)
    assert plan.proof.ok and not plan.findings and "T2" not in str(plan.paths)
    assert any(entry.style == "colwise" for entry in plan.entries)


def test_gradients_of_inputs_that_would_be_wrong_are_refused_and_nothing_else_changes() -> None:
    class Asks(Mlp):
        def hidden(self, x: torch.Tensor) -> torch.Tensor:
            h = super().hidden(x)
            return h.softmax(-1) if x.requires_grad else h

    torch.manual_seed(0)
    model = Asks().eval()
    plan = autoplan.plan(model, 2)
    assert plan.proof.ok and plan.runtime.unsummed == ("x",) and "softmax" not in str(plan.paths)
    assert any(entry.style == "colwise" for entry in plan.entries)
    report = autoplan.verify(model, plan)
    assert report.ok and "inputs" in report.details["not_checked"], report.findings


def test_gradients_of_inputs_need_no_call_of_their_own_on_ranks() -> None:
    calls: list[int] = []

    class Counts(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return super().forward(x)

    model = Counts().double()
    plan = autoplan.plan(model, 2)
    numbers = []
    for checks in (["forward"], ["forward", "inputs"]):
        calls.clear()
        report = check_sharding(
            model, {"forward": {"x": X.double()}}, sharding_of(plan, traffic=False), 2, checks=checks
        )
        assert report.ok and report.details["checked"] == tuple(checks), report.findings
        numbers.append(len(calls))
    assert numbers[1] == numbers[0] + 1, "the unsharded model makes one call more, ranks none"


@pytest.mark.parametrize("how", ["wrong", "raises"])
def test_a_forward_that_is_wrong_only_if_inputs_require_gradients_is_not_called_wrong(how: str) -> None:
    def spoil(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs["x"].requires_grad:
            assert how == "wrong"
            return args, {"x": 2 * kwargs["x"]}
        return None

    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        model.register_forward_pre_hook(spoil, with_kwargs=True)
        return model

    sharding = Sharding(shard, full_tensors, summed=("x",), counted=False)
    report = check_sharding(Mlp().double(), {"forward": {"x": X.double()}}, sharding, 2, checks=["forward", "inputs"])
    assert {finding.check for finding in report.findings} == {"inputs"} and report.forward == 0.0, report.findings


def test_a_search_for_inputs_seeds_no_generator_of_a_gpu() -> None:
    with mock.patch("torch.cuda.manual_seed_all") as seeded:
        assert recipe_for(Mlp()).dims is not None
    seeded.assert_not_called()
