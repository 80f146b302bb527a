"""What draws random numbers draws the same on every rank where values are whole: in eval mode, in recurrent layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoplan

WIDTH = 16


class Noisy(nn.Module):
    """Adds noise to the stream whether it trains or not, as diffusion and variational models do."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + torch.randn(x.shape, dtype=x.dtype)
        return x + self.fall(torch.tanh(self.rise(x)))


class Recurrent(nn.Module):
    """Dropout inside a recurrent layer, which no dropout call shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.GRU(WIDTH, WIDTH, 2, batch_first=True, dropout=0.3)
        self.rise, self.fall = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fall(torch.tanh(self.rise(self.layers(x)[0])))


class Standardised(nn.Module):
    """Statistics that a step in training mode leaves behind, of channels that are split."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.between, self.fall = nn.Conv1d(WIDTH, 32, 1), nn.BatchNorm1d(32), nn.Conv1d(32, WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(torch.relu(self.between(self.rise(x.mT)))).mT


@pytest.mark.parametrize("build", [Noisy, Recurrent, Standardised])
def test_ranks_agree(build: type[nn.Module]) -> None:
    model, inputs = build(), {"x": torch.randn(2, 6, WIDTH)}
    plan = autoplan.plan(model, 2, inputs=inputs)
    report = autoplan.verify(model, plan, inputs=inputs)
    assert report.ok, report
    assert {"rise", "fall"} <= {entry.pattern for entry in plan.entries}


def test_draws_in_eval_mode_are_planned() -> None:
    inputs = {"x": torch.randn(2, 6, WIDTH)}
    assert autoplan.plan(Noisy(), 2, inputs=inputs).runtime.draws
    assert not autoplan.plan(Recurrent(), 2, inputs=inputs).runtime.draws
