"""A model that makes its own loss of the logits that it returns: its head stays split, and the loss is exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixer_stack import Stack
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.values import AllGather, AllGatherSequence, LogitsOfPositions, Plan, SplitLogits

WIDTH, HEADS, WORDS = 32, 4, 96


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.c_attn = nn.Linear(WIDTH, 3 * WIDTH)
        self.c_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.size()
        parts = self.c_attn(self.before(x)).split(width, dim=2)
        q, k, v = (part.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        return x + self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class HomeMade(nn.Module):
    """The commonest model written at home: with targets all logits and a loss, else the last logits."""

    def __init__(self, tied: bool = True, extra: bool = False) -> None:
        super().__init__()
        self.wte = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.extra = extra
        if tied:
            self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.lm_head(x[:, [-1], :]), None
        logits = self.lm_head(x)
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss + x.square().mean() if self.extra else loss * 0.5


def given() -> dict[str, Any]:
    return {"idx": torch.randint(0, WORDS, (2, 8)), "targets": torch.randint(0, WORDS, (2, 8))}


def style_of_head(plan: Plan) -> str:
    return next(entry.style for entry in plan.entries if entry.pattern == "lm_head")


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_a_model_with_a_loss_of_its_own_stays_split(tied: bool) -> None:
    model, inputs = HomeMade(tied), given()
    plan = autoplan.plan(model, tp_size=2, inputs=inputs)
    assert style_of_head(plan) == "colwise" and plan.runtime.of(SplitLogits)
    assert plan.proof.ok and not [finding for finding in plan.findings if finding.level != "note"]
    assert plan.layers[0].kind == "decoder" and not plan.layers[0].note
    report = autoplan.verify(model, plan, inputs=inputs)
    assert report.ok, report


def test_a_loss_that_is_added_to_other_values_is_seen_and_the_head_gathers() -> None:
    model, inputs = HomeMade(extra=True), given()
    plan = autoplan.plan(model, tp_size=2, inputs=inputs)
    assert style_of_head(plan) == "colwise_gather_output" and plan.proof.ok
    assert {finding.level for finding in plan.findings if finding.check == "rule-conflict"} == {"note"}
    assert autoplan.verify(model, plan, inputs=inputs).ok


class OtherWords(HomeMade):
    """Its targets have a name that says nothing."""

    def forward(self, idx: Tensor, y: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        return logits, None if y is None else F.cross_entropy(logits.flatten(0, 1), y.flatten())


def test_targets_of_any_name_that_the_plan_has_not_seen_are_exact() -> None:
    torch.manual_seed(0)
    model, inputs = OtherWords().double(), given()
    plan = autoplan.plan(model, tp_size=2, inputs={"idx": inputs["idx"]})
    assert style_of_head(plan) == "colwise" and plan.runtime.given == ("idx",)
    wanted = model(inputs["idx"], inputs["targets"])[1]

    def on_rank(rank: int) -> Tensor:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sharded = autoplan.parallelize(copy.deepcopy(model), mesh, plan)
        return sharded(inputs["idx"], inputs["targets"])[1].detach()

    for loss in run_ranks(on_rank, 2):
        torch.testing.assert_close(loss, wanted.detach())


def test_targets_of_any_name_that_the_plan_has_seen_keep_the_head_split() -> None:
    inputs = given()
    model, calls = OtherWords(), {"idx": inputs["idx"], "y": inputs["targets"]}
    plan = autoplan.plan(model, tp_size=2, inputs=calls)
    assert style_of_head(plan) == "colwise" and plan.runtime.given == ("idx",)
    assert plan.proof.ok and autoplan.verify(model, plan, inputs=calls).ok


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        made: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return made


class LossOrLogits(Stack):
    """With targets it returns its loss only, else its logits only. `extra`: of the loss is added to other values."""

    def __init__(self, extra: bool) -> None:
        super().__init__(Attention)
        self.extra = extra

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.run(idx)
        if targets is None:
            return logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        return loss + logits.logsumexp(-1).square().mean() if self.extra else loss


@pytest.mark.parametrize("dim", ["tp", "cp"])
@pytest.mark.parametrize("extra", [False, True])
def test_a_run_that_returns_a_loss_only_is_as_one_that_returns_logits_too(dim: str, extra: bool) -> None:
    torch.manual_seed(0)
    model, inputs = LossOrLogits(extra).double(), {name: ids % 30 for name, ids in given().items()}
    plan = autoplan.plan(model, **{f"{dim}_size": 2})
    assert plan.proof.ok
    kept = plan.runtime.of(SplitLogits if dim == "tp" else LogitsOfPositions)
    assert [head.pattern for head in kept] == ([] if extra else ["head"])
    model(**inputs).backward()

    def on_rank(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(dim,))
        plain = LossOrLogits(extra).double()
        plain.load_state_dict(model.state_dict())
        sharded = autoplan.parallelize(plain, mesh, plan)
        loss = sharded(**inputs)
        loss.backward()
        gradient = sharded.blocks[0].norm.weight.grad
        with autoplan.gather_logits(sharded, True):
            logits = sharded(inputs["idx"])
        return loss.detach(), getattr(gradient, "full_tensor", lambda: gradient)(), logits.detach()

    for loss, gradient, logits in run_ranks(on_rank, 2):
        torch.testing.assert_close(loss, model(**inputs).detach())
        torch.testing.assert_close(gradient, model.blocks[0].norm.weight.grad)
        torch.testing.assert_close(logits, model(inputs["idx"]).detach())


class LossOnly(HomeMade):
    """It returns its loss only, of logits that a head makes, or its own code with the table of the tokens."""

    def __init__(self, table: bool) -> None:
        super().__init__(tied=False)
        self.table = table
        if table:
            del self.lm_head

    def forward(self, idx: Tensor) -> Tensor:
        x = self.wte(idx[:, :-1])
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        logits = (x @ self.wte.weight.T if self.table else self.lm_head(x)).float()  # as they are, in float32
        return F.cross_entropy(logits.transpose(1, 2), idx[:, 1:])


@pytest.mark.parametrize("table", [False, True])
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"cp_size": 2}, {"tp_size": 2, "cp_size": 2}], ids=str)
def test_a_model_that_returns_a_loss_only_gathers_no_logits(table: bool, sizes: dict[str, int]) -> None:
    model, inputs = LossOnly(table), {"idx": given()["idx"]}
    plan = autoplan.plan(model, inputs=inputs, **sizes)
    over_cp, over_tp = "cp_size" in sizes, "tp_size" in sizes
    head = "norm" if table else "lm_head"
    own = [logits.pattern for logits in plan.runtime.of(LogitsOfPositions) if not logits.returned]
    assert own == [head] * over_cp
    assert [split.pattern for split in plan.runtime.of(SplitLogits) if not split.outputs] == [head] * (
        over_tp and not table
    )
    if over_cp or not table:
        assert not [done for kind in (AllGather, AllGatherSequence) for done in plan.runtime.of(kind)]
    report = autoplan.verify(model, plan, inputs=inputs)
    assert report.ok and autoplan.verify(model, plan, inputs={"idx": given()["idx"][:, :7]}).ok


class LossBesideProduct(HomeMade):
    """Its own code multiplies by the table, with a bias, what it returns and makes a loss of."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.bias = nn.Parameter(torch.randn(WORDS))
        del self.lm_head

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.wte(idx)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.wte.weight, self.bias)
        loss = None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"cp_size": 2}, {"tp_size": 2, "cp_size": 2}], ids=str)
def test_a_loss_of_a_product_of_the_models_own_code_is_exact(sizes: dict[str, int]) -> None:
    model, inputs = LossBesideProduct(), given()
    plan = autoplan.plan(model, inputs=inputs, **sizes)
    assert any(entry.style != "replicated" for entry in plan.entries)
    assert autoplan.verify(model, plan, inputs=inputs).ok


class Router(nn.Module):
    """It keeps a part of the loss, made of all positions, where the model's own code finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        self.load = shares.mean((0, 1)).square().sum()
        return (torch.stack([expert(x) for expert in self.experts], -1) * shares.unsqueeze(-2)).sum(-1)


class Routed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + self.router(x)


class Balanced(HomeMade):
    def __init__(self) -> None:
        super().__init__(tied=False)
        self.blocks = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(idx)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        return logits, loss + 0.1 * sum(block.router.load for block in self.blocks)


@pytest.mark.parametrize("make", [lambda: HomeMade(tied=False, extra=True), Balanced], ids=["stream", "router"])
def test_over_cp_a_loss_of_the_stream_beside_that_of_the_logits_is_exact(make: Callable[[], nn.Module]) -> None:
    model, inputs = make(), given()
    plan = autoplan.plan(model, cp_size=2, inputs=inputs)
    assert plan.proof.ok and autoplan.verify(model, plan, inputs=inputs).ok


class LossOfInput(nn.Module):
    """It returns its input, and a loss of it, as they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x.float().contiguous()
        return x, self.down(F.gelu(self.up(x))), F.cross_entropy(x.flatten(0, 1), targets.flatten())


def test_a_loss_of_an_input_that_is_returned_is_planned() -> None:
    inputs = {"x": torch.randn(2, 8, WIDTH), "targets": torch.randint(0, WIDTH, (2, 8))}
    plan = autoplan.plan(LossOfInput(), tp_size=2, inputs=inputs)
    assert {entry.pattern: entry.style for entry in plan.entries} == {"up": "colwise", "down": "rowwise"}
