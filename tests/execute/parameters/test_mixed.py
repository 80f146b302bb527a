"""Functions of sharded parameters and plain tensors, outside of the model: exact, or one clear error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional as F

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.execute.parameters.local_views import reading_locally

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Packed(nn.Module):
    """Two layers in one weight, whose rows lie in another order on ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down, self.norm = nn.Linear(8, 32), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.both(self.norm(x)).chunk(2, -1)
        result: torch.Tensor = self.down(gate.sigmoid() * up)
        return result


@cache
def model_and_plan() -> tuple[Packed, autoplan.Plan]:
    torch.manual_seed(0)
    model = Packed().double()
    return model, autoplan.plan(model, tp_size=2)


def product(m: Any) -> torch.Tensor:
    return m(X).mean() + F.linear(X, m.both.weight, m.both.bias).pow(2).mean()


def transposed(m: Any) -> torch.Tensor:
    return (m(X) @ m.both.weight.T).pow(2).mean() + (X @ m.down.weight).pow(2).mean()


def orthogonal(m: Any) -> torch.Tensor:
    w = m.down.weight
    return m(X).mean() + (w @ w.T - torch.eye(8, dtype=w.dtype)).pow(2).sum() + w.pow(2).sum()


def cumulative(m: Any) -> torch.Tensor:
    return m(X).mean() + m.both.weight.cumsum(0).pow(2).mean()


def twice(m: Any) -> torch.Tensor:
    z = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(F.linear(z, m.both.weight).tanh().sum(), z, create_graph=True)
    result: torch.Tensor = m(X).mean() + g.pow(2).sum()
    return result


def own_states(m: Any) -> torch.Tensor:
    """Steps with plain states, an importance of each weight, and noise on gradients."""
    states = [torch.zeros(p.shape, dtype=p.dtype) for p in m.parameters()]
    m(X).pow(2).mean().backward()
    with torch.no_grad():
        for p, state in zip(m.parameters(), states, strict=True):
            p.grad.add_(torch.linspace(0, 1, p.numel(), dtype=p.dtype).view(p.shape))
            state.mul_(0.9).add_(p.grad)
            p.sub_(0.1 * state)
            p.mul_((torch.arange(p.numel()).view(p.shape) % 3 > 0).to(p.dtype))
    m.zero_grad()
    result: torch.Tensor = m(X).pow(2).mean()
    return result


Loss = Callable[[Any], torch.Tensor]
LOSSES: tuple[Loss, ...] = (product, transposed, orthogonal, cumulative, twice, own_states)


def on_ranks(do: Callable[[Any], Any]) -> list[Any]:
    model, plan = model_and_plan()
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def rank(number: int) -> Any:
        sharded = Packed().double()
        sharded.load_state_dict(state)
        return do(autoplan.parallelize(sharded, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan))

    return run_ranks(rank, 2)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_weights_and_plain_tensors_is_exact(loss: Loss) -> None:
    plain = Packed().double()
    plain.load_state_dict(model_and_plan()[0].state_dict())
    value = loss(plain)
    value.backward()
    wanted = {name: p.grad for name, p in plain.named_parameters()}

    def differences(m: Any) -> list[float]:
        got = loss(m)
        assert type(got) is torch.Tensor
        got.backward()
        assert all(isinstance(p.grad, DTensor) == isinstance(p, DTensor) for p in m.parameters())
        gradients = autoplan.full_tensors(m, grads=True)
        off = {name: gradients[name] - gradient for name, gradient in wanted.items()} | {
            "": got.detach() - value.detach()
        }
        return [float(difference.abs().max()) for difference in off.values()]

    assert max(max(rank) for rank in on_ranks(differences)) < 1e-12


def test_rows_of_unknown_order_are_refused() -> None:
    def message(m: Any) -> str:
        with pytest.raises(autoplan.AutoplanError) as refused:
            (m.both.weight * 2) @ torch.ones(8, 3, dtype=torch.float64)
        return str(refused.value)

    assert all("in another order" in text and "full_tensors" in text for text in on_ranks(message))


def test_what_others_ask_of_the_flag_stays() -> None:
    """`implicit_replication` works beside a sharded model, and only as long as it is asked."""

    def outcomes(m: Any) -> Any:
        bias, scale = m.down.bias.detach(), torch.arange(8, dtype=torch.float64)
        with implicit_replication():
            inside = type(bias + scale)
        after = type(bias * scale)
        return inside, after, torch._C._get_dtensor_allow_implicit_replication()

    before = torch._C._get_dtensor_allow_implicit_replication()  # set if a model of another test still lives
    assert on_ranks(outcomes) == [(DTensor, torch.Tensor, True)] * 2
    assert torch._C._get_dtensor_allow_implicit_replication() == before


def test_rows_of_a_replicated_parameter_are_views() -> None:
    """Even if a parameter that is kept in rank order has as many rows."""

    def written(m: Any) -> torch.Tensor:
        mesh = m.both.weight.device_mesh
        rows = distribute_tensor(torch.zeros(32, dtype=torch.float64), mesh, [Replicate()], src_data_rank=None)
        torch.narrow(rows, 0, 4, 8).fill_(1)
        return rows.full_tensor()

    assert all(rows.sum() == 8 for rows in on_ranks(written))


def test_adafactor_steps() -> None:
    plain = Packed().double()
    plain.load_state_dict(model_and_plan()[0].state_dict())

    def stepped(m: Any) -> torch.Tensor:
        optimizer = torch.optim.Adafactor(m.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            m(X).pow(2).mean().backward()
            optimizer.step()
        result: torch.Tensor = m(X).detach()
        return result

    wanted = stepped(plain)
    assert all((got - wanted).abs().max() < 1e-9 for got in on_ranks(stepped))


class Averaged(nn.Module):
    """Training moves averages of its weights, which evaluation computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        for name, parameter in list(self.named_parameters()):
            self.register_buffer(name.replace(".", "_"), parameter.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    getattr(self, name.replace(".", "_")).lerp_(parameter, 0.5)
            result: torch.Tensor = self.down(self.up(x).relu())
            return result
        return F.linear(F.linear(x, self.up_weight, self.up_bias).relu(), self.down_weight, self.down_bias)


def test_averages_of_named_parameters_inside_a_forward() -> None:
    def run(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        model.train()(X)
        result: torch.Tensor = model.eval()(X)
        return result

    torch.manual_seed(0)
    model = Averaged().double()
    plan = autoplan.plan(model, tp_size=2)

    def on_rank(_: int) -> bool:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        return torch.allclose(run(sharded), expected) and sharded.up_weight.shape == (8, 8)

    expected = run(copy.deepcopy(model))
    assert run_ranks(on_rank, 2) == [True, True]


def test_assigning_a_parameter_in_a_forward_reads_nothing() -> None:
    """FSDP2 does that, and a checkpoint of the user's would count what reading saves."""

    def on_rank(_: int) -> int:
        model, plan = model_and_plan()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        saved: list[torch.Tensor] = []
        bias = sharded.down.bias
        with reading_locally(sharded), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
            sharded.down.bias = bias
        assert sharded.down.bias is bias
        return len(saved)

    assert run_ranks(on_rank, 2) == [0, 0]
