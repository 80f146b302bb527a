"""What FSDP2 would lose without a word is refused: writes of a forward into parameters, hooks on them, copies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from mesh_toys import WIDTH, Block, Deep, deep, ids, layers_only, mesh_of
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import AutoplanError


class Clamped(Block):
    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        with torch.no_grad():
            self.norm.weight.clamp_(max=0.5)
        return super().forward(x, cache)


class Crossed(nn.Module):
    """Two equal blocks, of which one never runs by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)),
            nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two[1](self.two[0](self.one(x)))


class Initialised(Block):
    """A block that writes past the version counter."""

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        self.norm.bias.data.copy_(x.mean((0, 1)).detach())
        return super().forward(x, cache)


def initialised() -> Deep:
    model = deep()
    model.blocks[1] = Initialised().double()
    return model


class Following(Block):
    """A block that reads its parameters as DTensors, and changes them."""

    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        with torch.no_grad():
            for parameter in self.first.parameters():
                parameter.mul_(0.9)
        return super().forward(x, cache)


def following() -> Deep:
    model = deep()
    model.blocks[1] = Following().double()
    return model


def clamping() -> Deep:
    model = deep()
    model.blocks[1] = Clamped().double()
    return model


def renormed() -> Deep:
    model = deep()
    model.table.max_norm = 0.1
    return model


def run(model: Any) -> None:
    model(ids(2)).sum().backward()


def hooked(model: Any) -> None:
    model.blocks[0].first.up.weight.register_hook(lambda gradient: gradient * 0.5)
    run(model)


def differentiated(model: Any) -> None:
    torch.autograd.grad(model(ids(2)).sum(), list(model.parameters()))


def differentiated_in_a_part(model: Any) -> None:
    torch.autograd.grad(model(ids(2)).sum(), list(model.head.parameters()))


def named_in_backward(model: Any) -> None:
    model(ids(2)).sum().backward(inputs=list(model.parameters()))


def differentiated_twice(model: Any) -> None:
    x = torch.ones(1, 2, WIDTH, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(model.blocks[0](x).sum(), x, create_graph=True)
    gradient.pow(2).sum().backward()


def called_with_others(model: Any) -> None:
    block = model.blocks[0]
    others = {name: parameter * 2 for name, parameter in autoplan.full_tensors(block).items()}
    torch.func.functional_call(block, others, (torch.ones(1, 2, WIDTH, dtype=torch.float64),))


def given_a_gradient(model: Any) -> None:
    model.head.weight.grad = torch.ones(model.head.weight.shape, dtype=torch.float64)
    run(model)


@pytest.mark.parametrize(
    ("make", "do", "said"),
    [
        (clamping, run, "parameter blocks.1.norm.weight in place"),
        (initialised, run, "parameter blocks.1.norm.bias in place"),
        (renormed, run, "parameter table.weight in place"),
        (deep, hooked, "hook on the parameter blocks.0.first.up.weight would never run"),
        (deep, copy.deepcopy, "cannot be copied"),
        (deep, differentiated, "asked for by the parameter .*, which FSDP2 shards"),
        (deep, differentiated_in_a_part, "asked for by the parameter head.weight, which FSDP2 shards"),
        (deep, named_in_backward, "asked for by the parameter .*, which FSDP2 shards"),
        (deep, differentiated_twice, "create_graph=True for a gradient through FSDP2 units"),
        (deep, called_with_others, "is another tensor in this call of .*, an FSDP2 unit"),
        (deep, given_a_gradient, "gradient of head.weight was replaced by a plain tensor"),
    ],
)
def test_it_is_refused_by_name(make: Callable[[], Deep], do: Callable[[Any], Any], said: str) -> None:
    def rank_body(rank: int) -> None:
        model = make()
        autoplan.parallelize(model, mesh_of(dp=2), layers_only(model))
        with pytest.raises(AutoplanError, match=said):
            do(model)

    run_ranks(rank_body, 2)


def test_what_is_not_lost_is_left_alone() -> None:
    """Inference mode, hooks that FSDP2 calls, writes between steps."""

    def rank_body(rank: int) -> int:
        model = deep()
        autoplan.parallelize(model, mesh_of(dp=2), layers_only(model))
        sizes: list[float] = []
        weight = model.blocks[0].first.up.weight
        weight.register_post_accumulate_grad_hook(lambda p: sizes.append(float(p.grad.full_tensor().norm())))
        with torch.no_grad():
            weight.mul_(0.5)
        for _ in range(2):
            run(model)
        with torch.inference_mode():
            model(ids(2))
        return len(sizes)

    assert run_ranks(rank_body, 2) == [2, 2]


def test_an_optimizer_made_after_an_evaluation_updates_the_model() -> None:
    """FSDP2 leaves what it gathered for a forward without a backward."""

    def trained(model: Any) -> None:
        with torch.no_grad():
            model(ids(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run(model)
        optimizer.step()

    def rank_body(rank: int) -> dict[str, torch.Tensor]:
        model = deep()
        autoplan.parallelize(model, mesh_of(dp=2), layers_only(model))
        trained(model)
        return autoplan.full_tensors(model)

    unsharded = deep()
    trained(unsharded)
    for found in run_ranks(rank_body, 2):
        for name, parameter in unsharded.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), msg=name)


def test_a_change_through_a_dtensor_is_seen_under_tensor_parallelism() -> None:
    plan = autoplan.plan(following(), tp_size=2)

    def rank_body(rank: int) -> None:
        model = following()
        autoplan.parallelize(model, mesh_of(dp=2, tp=2), plan)
        with pytest.raises(AutoplanError, match=r"parameter blocks.1.first.* in place"):
            run(model)

    run_ranks(rank_body, 4)


def test_a_state_dict_is_loaded_after_a_forward_without_a_backward() -> None:
    plan = autoplan.plan(deep(), tp_size=2)

    def rank_body(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        model = deep()
        autoplan.parallelize(model, mesh_of(dp=2, tp=2), plan)
        kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        before = model(ids(2)).detach()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        model(ids(2))
        model.load_state_dict(kept)
        return before, model(ids(2)).detach()

    for before, after in run_ranks(rank_body, 4):
        torch.testing.assert_close(after, before)


class NeverBlocks(Crossed):
    """Neither of the equal blocks runs by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two[1](self.two[0](self.one[1](self.one[0](x))))


def test_one_rank_may_read_parameters_alone() -> None:
    """Ranks gather together: what one of them reads between a forward and its backward changes nothing."""

    plan = autoplan.plan(deep(), tp_size=2)

    def rank_body(rank: int) -> torch.Tensor:
        model = deep()
        autoplan.parallelize(model, mesh_of(dp=2, tp=2), plan)
        with torch.no_grad():
            model(ids(2))
        for _ in range(2):
            if rank == 0:
                assert all(p.device_mesh.ndim == 2 for p in [*model.head.parameters(), model.head.weight])
            loss = model(ids(2)).sum()
            if rank == 0:
                assert all(p.device_mesh.ndim == 2 for p in model.parameters())
            loss.backward()
        return autoplan.full_tensors(model, grads=True)["head.weight"]

    unsharded = deep()
    for _ in range(2):
        run(unsharded)
    for gradient in run_ranks(rank_body, 4):
        torch.testing.assert_close(gradient, unsharded.head.weight.grad)


class Turned(nn.Module):
    """Its weights are transposed: in column order."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(16, 16))[0])
        for part in (self.up, self.down):
            part.weight = nn.Parameter(part.weight.detach().t().contiguous().t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x @ self.mix)))


def test_parameters_in_column_order_are_sharded() -> None:
    def made() -> Turned:
        torch.manual_seed(0)
        return Turned().double()

    x = torch.ones(2, 16, dtype=torch.float64)
    plan = autoplan.plan(made(), tp_size=2)

    def rank_body(rank: int) -> tuple[torch.Tensor, dict[str, Any]]:
        model = autoplan.parallelize(made(), mesh_of(dp=2, tp=2), plan)
        output = model(x)
        output.sum().backward()
        return output.detach(), autoplan.full_tensors(model, grads=True)

    unsharded = made()
    unsharded(x).sum().backward()
    for output, gradients in run_ranks(rank_body, 4):
        torch.testing.assert_close(output, unsharded(x).detach())
        for name, parameter in unsharded.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)


def full(x: Any) -> torch.Tensor:
    whole: torch.Tensor = x.full_tensor() if isinstance(x, DTensor) else x
    return whole


def test_an_attribute_is_written_after_an_evaluation() -> None:
    """And what a part of the model lists: FSDP2 has both gathered."""

    def halved(model: Any) -> torch.Tensor:
        with torch.no_grad():
            model(ids(2))
            model.head.weight.mul_(0.5)
            model(ids(2))
            for parameter in model.table.parameters():
                parameter.mul_(0.5)
        run(model)
        output: torch.Tensor = model(ids(2)).detach()
        return output

    plan = autoplan.plan(deep(), tp_size=2)

    def rank_body(rank: int) -> torch.Tensor:
        model = deep()
        autoplan.parallelize(model, mesh_of(dp=2, tp=2), plan)
        return full(halved(model))

    for output in run_ranks(rank_body, 4):
        torch.testing.assert_close(output, halved(deep()))


@pytest.mark.parametrize("kind", [Crossed, NeverBlocks])
def test_blocks_that_never_run_by_themselves_are_no_units(kind: type[Crossed]) -> None:
    def made() -> Crossed:
        torch.manual_seed(0)
        return kind().double()

    x = torch.ones(2, 16, dtype=torch.float64)

    plan = autoplan.plan(made(), tp_size=2)

    def rank_body(rank: int) -> tuple[set[str], torch.Tensor]:
        model = autoplan.parallelize(made(), mesh_of(dp=2, tp=2), plan)
        units = {name for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        return units, model(x).detach()

    expected = {"", "one"} if kind is Crossed else {""}
    for units, output in run_ranks(rank_body, 4):
        assert units == expected
        torch.testing.assert_close(output, made()(x).detach())
