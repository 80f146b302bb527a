"""Forwards that draw random numbers in eval mode too, with torch or with Python's or numpy's random modules: every rank
draws what the unsharded model does."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import autoplan
from autoplan.check.ranks.run import run_ranks

torch.set_num_threads(1)


class Draws(nn.Module):
    """An MLP whose hidden values are scaled by a number from outside torch."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.source = source

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        draw = {"random": random.random, "numpy": numpy.random.rand, "torch": lambda: torch.rand(())}[self.source]
        number = float(draw())
        return x + self.down(torch.tanh(self.up(x)) * (1 + number))


@pytest.mark.parametrize("source", ["random", "numpy", "torch"])
def test_what_is_drawn_is_the_same_on_every_rank(source: str) -> None:
    before = random.getstate(), numpy.random.get_state()[1].copy()
    report = autoplan.verify(Draws(source), tp_size=2, inputs={"x": torch.randn(2, 6, 16)})
    assert report.ok and {"forward", "training", "optimizer"} <= set(report.details["checked"])
    assert random.getstate() == before[0] and (numpy.random.get_state()[1] == before[1]).all()


def test_each_rank_goes_on_in_streams_of_its_own() -> None:
    random.seed(3)
    numpy.random.seed(3)
    first = random.random(), numpy.random.rand()
    random.seed(3)
    numpy.random.seed(3)
    assert run_ranks(lambda rank: (random.random(), numpy.random.rand()), 3) == [first] * 3
    assert (random.random(), numpy.random.rand()) == first, "the caller's are as they were"


class Normed(nn.Module):
    """An MLP whose weights are divided by their largest singular value, which each training step estimates anew."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        norm = parametrizations.spectral_norm if kind == "parametrized" else nn.utils.spectral_norm
        self.up, self.down = norm(nn.Linear(16, 32)), norm(nn.Linear(32, 16))
        self.plain_up, self.plain_down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return x + self.plain_down(torch.tanh(self.plain_up(x)))


@pytest.mark.parametrize("kind", ["parametrized", "hooked"])
def test_spectral_norms_train_alike(kind: str) -> None:
    model, inputs = Normed(kind), {"x": torch.randn(2, 6, 16)}
    plan = autoplan.plan(model, 2, inputs=inputs)
    split = {entry.pattern.partition(".")[0] for entry in plan.entries}
    if kind == "hooked":  # a hook is not recorded in training mode
        assert split == {"plain_up", "plain_down"}
        assert any("in training" in str(left.reason) for left in plan.replicated)
    else:
        assert split == {"plain_up", "plain_down", "up", "down"}
    report = autoplan.verify(model, plan, 2, inputs=inputs)
    assert report.ok, [str(finding) for finding in report.findings]
    assert "training" in report.details["checked"]
