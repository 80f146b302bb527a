"""A plan says "Proven" only where its sharded tiny clone was run on simulated ranks and gave the same.

The modules here are those on which the trial was left out without a word, or on which only the trial sees the mistake.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autoplan

torch.set_num_threads(1)


class Single(nn.Module):
    """A convolution, which takes no other dtype than that of its weights, and then an MLP."""

    def __init__(self, scale: str = "") -> None:
        super().__init__()
        self.mix = nn.Conv1d(64, 64, 3, padding=1)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.good_up, self.good_down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        hidden = torch.tanh(self.up(x))
        if self.scale == "bytes":  # of the share, on a rank: nothing that runs in torch shows it
            hidden = hidden * (hidden.untyped_storage().nbytes() / hidden.element_size() / 1280)
        x = x + self.down(hidden)
        return x + self.good_down(torch.tanh(self.good_up(x)))


class Pinned(nn.Module):
    """Asks for single precision by name, in one way or another."""

    def __init__(self, pin: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.pin = pin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        if self.pin == "float":
            hidden = hidden.float()
        elif self.pin == "constant":
            hidden = hidden @ torch.eye(128, dtype=torch.float32)
        elif self.pin == "asserted":
            assert hidden.dtype == torch.float32
        return x + self.down(hidden)


def inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.randn(2, 5, 64)}


def planned(model: nn.Module, **how: Any) -> autoplan.Plan:
    return autoplan.plan(model, 2, inputs=inputs(), **how)


def said(plan: autoplan.Plan) -> list[str]:
    return [finding.message for finding in plan.findings if finding.check == "proof"]


def test_inputs_in_the_users_dtype_are_tried_on_ranks() -> None:
    plan = planned(Single())
    assert plan.proof.ok and said(plan) == []
    narrowed = planned(Single("bytes"))
    assert len(narrowed.entries) < len(plan.entries)
    assert any("cut, the tiny clone did not give the same" in text for text in said(narrowed)), narrowed.findings
    report = autoplan.verify(Single("bytes"), narrowed, inputs=inputs(), checks=["forward"])
    assert report.ok, report.findings


@pytest.mark.parametrize("pin", ["float", "constant", "asserted"])
def test_what_asks_for_single_precision_is_proven_in_it(pin: str) -> None:
    plan = planned(Pinned(pin))
    assert plan.proof.ok and plan.proof.method == "graph" and said(plan) == [], plan.findings
