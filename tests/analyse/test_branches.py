"""Branches that run side by side share one sum: exact in every order of adding, forward and backward, and only where
nothing else reads what is withheld."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.common import RankError
from autoplan.check.ranks.run import run_ranks
from autoplan.common.errors import PlanMismatchError

WIDTH = 16


class Glance(nn.Module):
    """Attention of two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.key, self.worth = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.say = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.ask, self.key, self.worth))
        return self.say(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Chew(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen, self.thin = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.thin(F.gelu(self.widen(x)))


Adding = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def in_place(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b += a
    return x + b


ORDERS: dict[str, Adding] = {
    "branches first": lambda x, a, b: a + b + x,
    "stream first": lambda x, a, b: x + a + b,
    "last branch first": lambda x, a, b: b + x + a,
    "in place": in_place,
}
APART: dict[str, Adding] = {
    "scaled": lambda x, a, b: x + 0.5 * a + b,
    "read twice": lambda x, a, b: x + a + b + a.mean(),
    "through a function": lambda x, a, b: x + torch.tanh(a) + b,
    "another shape": lambda x, a, b: x + (a.transpose(0, 1) + b.transpose(0, 1)).transpose(0, 1),
    "dropped": lambda x, a, b: x + F.dropout(a, 0.5, training=False) + b,
}


class SideBySide(nn.Module):
    def __init__(self, adding: Adding) -> None:
        super().__init__()
        self.even, self.glance, self.chew, self.adding = nn.LayerNorm(WIDTH), Glance(), Chew(), adding

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = self.even(x)
        return self.adding(x, self.glance(seen), self.chew(seen))


class Tower(nn.Module):
    def __init__(self, adding: Adding) -> None:
        super().__init__()
        self.words = nn.Embedding(24, WIDTH)
        self.floors = nn.ModuleList(SideBySide(adding) for _ in range(2))
        self.top, self.tell = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for floor in self.floors:
            x = floor(x)
        return self.tell(self.top(x))


IDS = torch.arange(16).view(2, 8) % 24


def tower(adding: Adding) -> Tower:
    torch.manual_seed(0)
    model = Tower(adding).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def planned(adding: Adding, **how: Any) -> autoplan.Plan:
    return autoplan.plan(tower(adding), 2, inputs={"ids": IDS}, prove="none", **how)


def actions(plan: autoplan.Plan) -> list[str]:
    return sorted(type(one).__name__ for one in plan.runtime.instructions if one.pattern.startswith("floors"))


def assert_same(adding: Adding, plan: autoplan.Plan, change: Callable[[Tower], None] = lambda _: None) -> None:
    """Logits and every gradient of two ranks are those of the unsharded model."""
    whole = tower(adding)
    whole(IDS).square().mean().backward()

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = autoplan.parallelize(models[number], mesh, plan, gather_logits=True)
        change(model)
        logits = model(IDS)
        logits.square().mean().backward()
        return logits.detach(), autoplan.full_tensors(model, grads=True)

    models = [tower(adding) for _ in range(2)]
    for logits, gradients in run_ranks(rank, 2):
        torch.testing.assert_close(logits, whole(IDS).detach(), rtol=1e-10, atol=1e-12)
        for name, parameter in whole.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("adding", ORDERS.values(), ids=ORDERS)
def test_one_sum_in_every_order(adding: Adding) -> None:
    plan = planned(adding)
    assert actions(plan) == ["AllReduce", "AllReduceGradient", "JoinPartial", "ParallelBlock", "WithholdPartial"]
    (traffic,) = plan.communication
    assert traffic.ratio == 1.0 and not any(f.check == "communication" for f in plan.findings)
    assert_same(adding, plan)


def test_one_reduce_scatter_along_the_sequence() -> None:
    for adding in ORDERS.values():
        plan = planned(adding, sequence_parallel=True)
        inside = [name for name in actions(plan) if name not in ("ScatterSequence", "NoteShard", "ParallelBlock")]
        sums = ["AllGatherSequenceSumGradient", "JoinPartial", "ReduceScatterSequence", "WithholdPartial"]
        assert plan.sequence_parallel and inside == sums
        assert_same(adding, plan)


@pytest.mark.parametrize("adding", APART.values(), ids=APART)
def test_apart_where_something_else_happens_on_the_way(adding: Adding) -> None:
    plan = planned(adding)
    assert "WithholdPartial" not in actions(plan) and actions(plan).count("AllReduce") == 2
    assert_same(adding, plan)


def checkpointed(model: Tower, *parts: str) -> None:
    for floor in list(model.floors):
        for part in parts:
            inner = getattr(floor, part)
            setattr(floor, part, checkpoint_wrapper(inner, checkpoint_impl=CheckpointImpl.NO_REENTRANT))
    if not parts:
        for number, floor in enumerate(list(model.floors)):
            model.floors[number] = checkpoint_wrapper(floor, checkpoint_impl=CheckpointImpl.NO_REENTRANT)


@pytest.mark.parametrize("parts", [(), ("glance",), ("chew",), ("glance", "chew")])
def test_checkpointing_runs_blocks_or_branches_again(parts: tuple[str, ...]) -> None:
    adding = ORDERS["stream first"]
    assert_same(adding, planned(adding), lambda model: checkpointed(model, *parts))
    assert_same(adding, planned(adding, sequence_parallel=True), lambda model: checkpointed(model, *parts))


def test_a_branch_by_itself_is_summed_by_itself() -> None:
    adding = ORDERS["stream first"]
    x = torch.randn(2, 8, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def rank(number: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return autoplan.parallelize(models[number], mesh, plan).floors[0].glance(x).detach()

    plan, models = planned(adding), [tower(adding) for _ in range(2)]
    for found in run_ranks(rank, 2):
        torch.testing.assert_close(found, tower(adding).floors[0].glance(x).detach())


def test_a_branch_that_never_comes_is_an_error() -> None:
    adding = ORDERS["stream first"]

    def rank(number: int) -> None:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = autoplan.parallelize(copy.deepcopy(tower(adding)), mesh, plan)
        model.floors[0].chew = nn.Identity()
        model(IDS)

    plan = planned(adding)
    with pytest.raises((RankError, PlanMismatchError), match="did not run"):
        run_ranks(rank, 2)


def test_reproducible_runs_add_in_the_models_order() -> None:
    """Bit for bit the unsharded forward, in float32."""
    adding = ORDERS["stream first"]

    def rank(number: int) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        options = {"gather_logits": True, "reproducible_forward": True}
        return autoplan.parallelize(models[number], mesh, plan, **options)(IDS).detach()

    plan, models = planned(adding), [tower(adding).float() for _ in range(2)]
    for found in run_ranks(rank, 2):
        assert torch.equal(found, tower(adding).float()(IDS))


def test_explain_says_who_shares_the_sum() -> None:
    plan = planned(ORDERS["stream first"])
    assert "is left partial" in plan.explain("floors.0.glance.say")
    assert "the previous branch's partial sum" in plan.explain("floors.0.chew.thin")


def test_attention_is_split_where_some_calls_have_a_mask() -> None:
    """The mask that torch makes of a boolean one may have a gradient, for all that the trace shows."""
    x, mask = torch.randn(2, 6, WIDTH), torch.ones(6, 6, dtype=torch.bool).triu(1)
    model = nn.Transformer(WIDTH, 2, 1, 1, 32, 0.0, batch_first=True).eval()
    calls = {"plain": {"src": x, "tgt": x}, "masked": {"src": x, "tgt": x, "src_mask": mask}}
    plan = autoplan.plan(model, tp_size=2, inputs=calls)
    split = {rule.pattern for rule in plan.runtime.parameters if rule.layout is not None}
    assert "encoder.layers.0.self_attn.in_proj_weight" in split and plan.proof.ok
