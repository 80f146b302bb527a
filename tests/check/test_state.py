"""Models that change their own state in a forward are tried as they run, and what cannot be split is replicated."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoplan
from autoplan.check.verify.subject import state_kept


class Mlp(nn.Module):
    def __init__(self, d: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, hidden), nn.Linear(hidden, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class SlowCopy(nn.Module):
    """The slow copy follows by `.data`, in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = Mlp(), Mlp().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for fast, slow in zip(self.fast.parameters(), self.slow.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        result: torch.Tensor = self.fast(x) * self.slow(x)
        return result


class ByName(SlowCopy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, slow in self.slow.named_parameters():
            slow.data.mul_(0.9).add_(self.fast.get_parameter(name).data, alpha=0.1)
        result: torch.Tensor = self.fast(x) * self.slow(x)
        return result


class Memory(nn.Module):
    """Reads what it was given in the last calls."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.seen = Mlp(), deque[torch.Tensor](maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = sum(self.seen, torch.zeros(())) if self.seen else 0.0
        self.seen.append(x.mean().detach())
        result: torch.Tensor = self.mlp(x + read)
        return result


class TiedAgain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Linear(16, 32, bias=False), Mlp(32, 64), nn.Linear(16, 32, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.head.weight = self.table.weight
        return F.linear(self.body(self.table(x)), self.head.weight.T)


class Force(nn.Module):
    """The gradient of an energy, for each sample apart: nothing of it can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda one: self.energy(one).sum()))(x)


@pytest.mark.parametrize("model", (SlowCopy, ByName, Memory, TiedAgain))
def test_a_model_that_changes_itself_is_proven(model: type[nn.Module]) -> None:
    torch.manual_seed(0)
    plan = autoplan.plan(model().double(), tp_size=2, inputs={"x": torch.randn(2, 3, 16).double()})
    assert plan.proof.ok and plan.entries, plan


def test_a_model_that_cannot_be_split_is_replicated() -> None:
    torch.manual_seed(0)
    plan = autoplan.plan(Force().double(), tp_size=2)
    assert plan.proof.ok and not plan.entries
    assert any(finding.check == "split" and finding.level == "warn" for finding in plan.findings)
    with pytest.raises(autoplan.IndivisibleError, match="nothing can be sharded at tp=2"):
        autoplan.plan(Force().double(), tp_size=2, strict=True)


def test_state_is_put_back() -> None:
    model: Any = Memory()
    model.notes = {"calls": [1], "names": {"a"}}
    weight, seen, notes = model.mlp.up.weight.detach().clone(), model.seen, model.notes
    with state_kept(model):
        model(torch.ones(1, 3, 16))
        model.mlp.up.weight.data.zero_()
        model.notes["calls"].append(2)
        model.notes["names"].clear()
        model.notes, model.new = {}, 1
    assert torch.equal(model.mlp.up.weight, weight)
    assert model.seen is seen and not seen
    assert model.notes is notes and notes == {"calls": [1], "names": {"a"}} and not hasattr(model, "new")
