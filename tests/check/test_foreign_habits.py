"""Habits of code from outside that checks live with: blocks that checkpoint themselves, training that needs more."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import autoplan

WIDTH = 16


class _Recomputed(torch.autograd.Function):
    """Checkpointing by hand, as the first diffusion models did it."""

    @staticmethod
    def forward(ctx: Any, run: Any, *given: torch.Tensor) -> torch.Tensor:
        ctx.run, ctx.given = run, given
        with torch.no_grad():
            return run(given[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x = ctx.given[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.run(x)
        return (None, *torch.autograd.grad(result, (x, *ctx.given[1:]), gradient))


class Single(nn.Module):
    """Pins single precision inside, and runs again in backward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.words, self.how = nn.Embedding(20, WIDTH), how
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def block(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.down(F.silu(self.up(self.norm(x.to(self.up.weight.dtype)).float().to(self.up.weight.dtype))))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        if self.how == "by hand":
            own = [p for part in (self.norm, self.up, self.down) for p in part.parameters()]
            return x + _Recomputed.apply(self.block, x, *own)
        return x + checkpoint(self.block, x, use_reentrant=self.how == "reentrant")


@pytest.mark.parametrize("how", ["by torch", "reentrant", "by hand"])
def test_blocks_that_checkpoint_themselves_and_pin_single_precision_are_proven(how: str) -> None:
    """Run without gradients first, and again with them: what is sharded is not left whole for that."""
    torch.manual_seed(0)
    model = Single(how).eval()
    plan = autoplan.plan(model, 2)
    assert plan.proof.ok, plan.proof
    assert {"up", "down"} <= {entry.pattern for entry in plan.entries if entry.segments[0] != "whole"}
    assert autoplan.verify(model, plan, tp_size=2, checks=("forward", "second_shape")).ok


class NeedsTargets(nn.Module):
    """Detectors refuse to train without their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        if self.training and targets is None:
            raise ValueError("In training mode, targets should be passed")
        return self.down(self.drop(F.relu(self.up(x))))


def test_what_cannot_train_on_these_inputs_is_proven_without_and_says_so() -> None:
    torch.manual_seed(0)
    model = NeedsTargets().eval()
    plan = autoplan.plan(model, 2)
    assert plan.proof.ok, plan.proof
    assert any("training mode" in finding.message for finding in plan.findings), plan.findings
    report = autoplan.verify(model, plan, tp_size=2)
    assert report.ok and "targets should be passed" in report.details["not_checked"]["training"]


class Stages(nn.Module):
    """Names that differ in numbers, and more: `stage*` would mean them all."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)
        for name in ("stage1", "stage2", "stage3", "stage1d", "stage2d"):
            part = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH))
            self.add_module(name, part)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for name in ("stage1", "stage2", "stage3", "stage2d", "stage1d"):
            x = x + getattr(self, name)(x)
        return x


def test_what_is_said_of_blocks_is_done_once() -> None:
    torch.manual_seed(0)
    model = Stages().eval()
    plan = autoplan.plan(model, 2)
    assert plan.proof.ok, plan.proof
    assert len(plan.entries) >= 2


class Encoder(nn.Module):
    """torch's own layers with the dropout that they have by default."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 4, 48, batch_first=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(self.words(ids))


def test_fused_attention_with_dropout_is_split_between_heads() -> None:
    torch.manual_seed(0)
    model = Encoder().eval()
    plan = autoplan.plan(model, 2)
    assert plan.proof.ok, plan.proof
    assert not any("in_proj_weight" in left.fqn or "out_proj.weight" in left.fqn for left in plan.replicated)
    assert autoplan.verify(model, plan, tp_size=2, checks=("forward", "dropout")).ok


class Recommender(nn.Module):
    """Tables whose gradients are sparse."""

    def __init__(self, bag: bool) -> None:
        super().__init__()
        kind = nn.EmbeddingBag if bag else nn.Embedding
        self.table, self.up, self.down = kind(40, WIDTH, sparse=True), nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return x + self.down(F.relu(self.up(x)))


@pytest.mark.parametrize("bag", [False, True])
def test_sparse_gradients_are_dense_on_ranks(bag: bool) -> None:
    torch.manual_seed(0)
    model = Recommender(bag).eval()
    plan = autoplan.plan(model, 2, inputs={"ids": torch.randint(0, 40, (3, 6))})
    assert plan.proof.ok and {"table", "up", "down"} <= {entry.pattern for entry in plan.entries}
    report = autoplan.verify(model, plan, tp_size=2)
    assert report.ok and "table.weight" in report.gradients and "optimizer" not in report.details["checked"]


_LOSSES: list[torch.Tensor] = []  # what routers of some packages do: collected by the run, and read at its end


class Routed(nn.Module):
    """Counts on a list of its Python module, which ranks in one process would share."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)]) for _ in range(3))
        self.part = _Collects()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _LOSSES.clear()
        for up, down in self.blocks:
            x = self.part(x + down(F.relu(up(x))))
        if len(_LOSSES) != len(self.blocks):
            raise RuntimeError(f"{len(_LOSSES)} losses of {len(self.blocks)} blocks")
        return x + sum(_LOSSES)


class _Collects(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _LOSSES.append(x.pow(2).mean())
        return x


def test_what_code_keeps_in_its_module_asks_for_ranks_that_are_processes() -> None:
    torch.manual_seed(0)
    model = Routed().eval()
    report = autoplan.verify(model, tp_size=2, checks=("parameters", "forward"), inputs={"x": torch.randn(2, 5, WIDTH)})
    assert report.ok and report.details["engine"] == "gloo", report.findings
