"""Random numbers of cut values: each rank draws its own for its part, and verify sees it if not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoplan
from autoplan.check.verify.drawn import RUNS, laws_of_draws

WIDTH = 16
INPUTS = {"x": torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(0))}


class Drawing(nn.Module):
    """An MLP whose hidden values are changed in training by random numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rise, self.fall = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.own = torch.Generator()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.rise(x)) + 0.1
        if self.training:
            hidden = self.noisy(hidden)
        return x + self.fall(hidden)

    def noisy(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


NOISES: dict[str, Any] = {
    "scaled by a statistic": lambda m, h: h + torch.randn_like(h) * h.std(-1, keepdim=True),
    "mask in new memory": lambda m, h: h * h.new_empty(h.shape).bernoulli_(0.7) / 0.7,
    "in place": lambda m, h: h * torch.empty_like(h).exponential_(),
    "of a local size": lambda m, h: h * torch.rand(h.shape, dtype=h.dtype),
    "of the whole size": lambda m, h: h * torch.rand(*h.shape[:-1], 64, dtype=h.dtype),
    "from a generator": lambda m, h: h * torch.rand(h.shape, dtype=h.dtype, generator=m.own),
    "by probabilities": lambda m, h: h * torch.bernoulli(torch.sigmoid(h)),
    "around means": lambda m, h: torch.normal(h, 0.1),
    "counts": lambda m, h: h + torch.poisson(h.detach()),
    "a distribution": lambda m, h: torch.distributions.Gamma(h + 1, 1.0).rsample(),
    "gumbel": lambda m, h: h * F.gumbel_softmax(h, dim=-1),
    "samples dropped": lambda m, h: h * h.new_empty(len(h), 1, 1).bernoulli_(0.7),
    "channels dropped": lambda m, h: F.dropout1d(h, 0.3, m.training),
    "features dropped": lambda m, h: F.feature_alpha_dropout(h.mT, 0.3, m.training).mT,
}
LONG = {"counts", "around means", "gumbel", "of the whole size", "features dropped", "in place"}


def _drawing(noise: str) -> nn.Module:
    model: nn.Module = type("Drawn", (Drawing,), {"noisy": lambda self, h: NOISES[noise](self, h)})()
    return model


@pytest.mark.parametrize("noise", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG)) for n in NOISES])
def test_parts_are_drawn_apart_and_whole_values_alike(noise: str) -> None:
    model = _drawing(noise)
    plan = autoplan.plan(model, 2, inputs=INPUTS)
    assert plan.proof.ok, plan.findings
    report = autoplan.verify(model, plan, inputs=INPUTS)
    assert report.ok and "training" in report.details["checked"], report


@pytest.mark.parametrize(
    ("noise", "fault", "said"),
    [
        ("mask in new memory", {"random": ()}, "same numbers for different shards"),
        ("samples dropped", {"random": ("",), "random_whole": ()}, "different numbers for a replicated value"),
        ("scaled by a statistic", {"instructions": "calls"}, "with fixed noise"),
    ],
)
def test_a_plan_that_draws_otherwise_is_seen(noise: str, fault: dict[str, Any], said: str) -> None:
    model = _drawing(noise)
    plan = autoplan.plan(model, 2, inputs=INPUTS, prove="none")
    if "instructions" in fault:
        fault = {"instructions": tuple(one for one in plan.runtime.instructions if not hasattr(one, "site"))}
    broken = replace(plan, runtime=replace(plan.runtime, **fault))
    report = autoplan.verify(model, broken, inputs=INPUTS, checks=("training",))
    assert any(said in str(finding) for finding in report.findings), report


def _observed(numbers: torch.Tensor, place: int, size: int) -> dict[str, torch.Tensor]:
    return {f"{run} rand": torch.cat([torch.tensor([place + run, size]).double(), numbers[run]]) for run in range(RUNS)}


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda one, other: other, ""),
        (lambda one, other: one, "depend on those on rank 0"),
        (lambda one, other: 1 - one, "depend on those on rank 0"),
        (lambda one, other: other**3, "distribution"),
    ],
)
def test_laws_see_what_depends_and_what_is_distributed_otherwise(made: Any, said: str) -> None:
    generator = torch.Generator().manual_seed(1)
    whole, one, other = (torch.rand(RUNS, n, generator=generator).double() for n in (400, 200, 200))
    ranks = [_observed(one, 100, 200), _observed(made(one, other), 900, 200)]
    found = laws_of_draws(_observed(whole, 0, 400), ranks)
    assert [said in finding.message for finding in found] == [True] * bool(said)


def test_uneven_masks_drawn_apart_are_independent() -> None:
    """Of a mask that keeps most, numbers are above their mean over the runs more often than below it."""
    drawn = torch.rand(3, RUNS, 4096, generator=torch.Generator().manual_seed(1)) < 0.8
    whole, one, other = drawn.double()
    assert not laws_of_draws(_observed(whole, 0, 8192), [_observed(one, 100, 4096), _observed(other, 900, 4096)])
