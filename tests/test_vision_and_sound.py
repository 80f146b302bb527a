"""What towers for pictures and sounds do that language models do not: toys of each, planned and verified."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import ConvNextConfig
from transformers.modeling_outputs import BaseModelOutput

import autoplan
from autoplan.capture.source import resolve
from autoplan.check.verify import clone_of
from autoplan.errors import PlanMismatchError, SourceError
from autoplan.execute.paths import change_at

SOUND = torch.randn(2, 8, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sieve = nn.Conv1d(8, 8, 3, padding=1)
        self.level = nn.LayerNorm(8)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.level(self.sieve(wave).transpose(1, 2)).transpose(1, 2))


class Chain(nn.Module):
    """Nothing adds to a stream: what one block makes is all that the next one gets."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Step() for _ in range(depth))

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        for step in self.steps:
            wave = step(wave)
        return wave


class CountsInATensor(nn.Module):
    """A slice whose bound went through a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.half = 12
        self.both, self.back = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        bound = torch.IntTensor([self.half])[0]
        wide = self.both(wave.transpose(1, 2))
        return self.back(torch.tanh(wide[..., :bound]) * torch.sigmoid(wide[..., bound:]))


class Normed(nn.Module):
    """The length of each row of `back` takes all of its columns."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.back = nn.Conv1d(8, 12, 1), weight_norm(nn.Conv1d(12, 8, 1))

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        return self.back(torch.tanh(self.out(wave)))


class Noisy(nn.Module):
    """Draws in eval mode, and keeps what it made of a weight there until its mode changes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.kept = nn.Linear(8, 12), nn.Linear(12, 8), None

    def train(self, mode: bool = True) -> Noisy:
        self.kept = None
        return super().train(mode)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        self.kept = self.up.bias * 2 if self.kept is None else self.kept
        wave = wave.transpose(1, 2)
        return self.down(torch.relu(self.up(wave + torch.randn_like(wave)) + self.kept))


@pytest.mark.parametrize("model", [Chain(9), CountsInATensor(), Normed(), Noisy()], ids=lambda m: type(m).__name__)
def test_verified(model: nn.Module) -> None:
    inputs = {"wave": SOUND}
    plan = autoplan.plan(model.double(), 2, inputs=inputs, prove="none")
    report = autoplan.verify(model, plan, tp_size=2, inputs=inputs, checks=["parameters", "forward"])
    assert plan.entries and report.ok and report.gradients, report


def test_blocks_that_alternate_are_each_planned() -> None:
    plan = autoplan.plan(Chain(9).double(), 2, inputs={"wave": SOUND}, prove="none")
    cut = {entry.pattern: entry.segments[0] for entry in plan.entries if entry.pattern.endswith("sieve")}
    columns = [n for n in range(9) if any(f".{n}." in p and s.startswith("0:") for p, s in cut.items())]
    assert columns and all(b - a == 2 for a, b in zip(columns, columns[1:], strict=False)), cut


def test_an_output_left_out_of_an_optional_part_is_none() -> None:
    output = BaseModelOutput(last_hidden_state=torch.ones(2))
    assert change_at(output, ("hidden_states", 0), lambda x: x * 2, "here") is output
    with pytest.raises(PlanMismatchError):
        change_at(output, ("no_such_part",), lambda x: x, "here")


def test_a_clone_that_cannot_be_tiny_is_larger() -> None:
    given = ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], image_size=32)
    smallest, *larger = resolve(given).ever_larger()
    with pytest.raises(SourceError):
        smallest.tiny()
    assert larger and larger[-1].shrink == "nothing"
    widths = clone_of(resolve(given)).model.config.hidden_sizes
    assert widths == [8, 16, 24, 32]
