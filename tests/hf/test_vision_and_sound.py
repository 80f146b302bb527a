"""What towers for pictures and sounds do that language models do not: toys of each, planned and verified."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import ConvNextConfig, SiglipVisionConfig
from transformers.modeling_outputs import BaseModelOutput

import autoplan
from autoplan.capture.draw import Draw
from autoplan.check.verify.verify import clone_of
from autoplan.common.errors import PlanMismatchError, SourceError
from autoplan.common.nested import change_at
from autoplan.common.random_values import tried_dtypes
from autoplan.execute import random_streams
from autoplan.execute.random_streams import SharedRandomness
from autoplan.hf.inputs.guesses import first_that_runs
from autoplan.hf.shrink import tiny_config
from autoplan.hf.source import resolve

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


def test_a_clone_is_made_where_the_config_describes_no_model_at_its_full_size() -> None:
    given = SiglipVisionConfig(hidden_size=1152, num_attention_heads=14)  # 14 heads do not divide: no class builds it
    source = resolve(given)
    with pytest.raises(SourceError):
        source.module()
    assert clone_of(source).model.dtype == torch.float64
    assert list(tried_dtypes(source.module)) == [torch.float64, torch.float32]


class Folding(nn.Module):
    """Each fold doubles what rounding did before it."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.up, self.down = nn.Linear(8, 48), nn.Linear(48, 8)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        stream = wave.transpose(1, 2)
        wave = torch.sigmoid(stream + self.down(torch.tanh(self.up(stream))))  # a sum over ranks rounds otherwise
        for _ in range(self.times):
            wave = torch.where(wave < 0.5, 2 * wave, 2 - 2 * wave)
        return wave


def test_rounding_is_no_mistake_and_a_mistake_no_rounding() -> None:
    inputs = {"wave": SOUND}
    found = {}
    for times in (0, 41, 50):
        model = Folding(times).double()
        plan = autoplan.plan(model, 2, inputs=inputs, prove="none")
        found[times] = autoplan.verify(model, plan, tp_size=2, inputs=inputs, checks=["parameters", "forward"])
    assert found[0].ok and found[0].details["tolerance"] == 1e-5
    assert found[41].ok and found[41].details["tolerance"] > 1e-5
    assert any("last bit" in finding.message for finding in found[41].findings)
    assert not found[50].ok  # nothing is left of such a model but rounding


class FoldingLonger(Folding):
    """As above, where sequences are longer than those of the first call."""

    def __init__(self) -> None:
        super().__init__(41)
        self.table = nn.Embedding(600, 8)  # of more rows than sequences are tried with

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        stream = self.table(input_ids)
        wave = torch.sigmoid(stream + self.down(torch.tanh(self.up(stream))))
        for _ in range(self.times if input_ids.shape[1] > 10 else 0):
            wave = torch.where(wave < 0.5, 2 * wave, 2 - 2 * wave)
        return wave


def test_rounding_is_no_mistake_at_a_second_size_either() -> None:
    report = autoplan.verify(FoldingLonger().double(), tp_size=2, checks=["parameters", "forward", "second_shape"])
    assert report.ok and any("last bit" in f.message for f in report.findings if f.check == "second_shape"), report


class Upward(nn.Module):
    """Channels inside a group of a transposed convolution are summed; its groups are not."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Conv1d(8, 32, 1)
        self.back = nn.ConvTranspose1d(32, 16, 2, stride=2, groups=2)
        self.last = nn.Linear(16, 8)

    def forward(self, wave: torch.Tensor) -> torch.Tensor:
        return self.last(self.back(torch.tanh(self.out(wave))).transpose(1, 2))


def test_groups_of_a_transposed_convolution_are_cut_as_wholes() -> None:
    model, inputs = Upward().double(), {"wave": SOUND}
    for tp_size in (2, 4):
        plan = autoplan.plan(model, tp_size, inputs=inputs, prove="none")
        report = autoplan.verify(model, plan, tp_size=tp_size, inputs=inputs, checks=["parameters", "forward"])
        assert plan.entries and report.ok, report


class Prompted(nn.Module):
    """Takes what its arguments' names say, in one way only."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.taken = shape, nn.Linear(shape[-1], 2)

    def forward(self, input_values: torch.Tensor, bbox: torch.Tensor | None = None) -> torch.Tensor:
        if input_values.dim() != len(self.shape) + 1 or bbox is None:
            raise ValueError("not like this")
        return self.taken(input_values) + bbox.sum()


@pytest.mark.parametrize("shape", [(4000,), (1, 3840), (128, 80), (80, 128)])
def test_arguments_are_tried_in_the_usual_ways(shape: tuple[int, ...]) -> None:
    def takes(name: str) -> bool:
        return name in ("input_values", "bbox")

    def requires(name: str) -> bool:
        return name == "input_values"

    model, draw = Prompted(shape), Draw(0, torch.float32)
    found = first_that_runs(model, {}, [], (3, 8, 8), (2, 10), takes, requires, draw)
    assert found is not None and found["input_values"].shape == (2, *shape) and found["bbox"].shape == (2, 10, 4)
    assert first_that_runs(Prompted((7, 7, 7, 7)), {}, [], (3, 8, 8), (2, 10), takes, requires, draw) is None


def test_no_clone_is_shown_large_pictures() -> None:
    large = ConvNextConfig(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], image_size=1024)
    shown = list(resolve(large).ever_larger())
    assert [one.shrink for one in shown] == ["all", "related"]
    assert all(tiny_config(large, 0, one.shrink).image_size < 256 for one in shown)


def test_what_draws_of_a_share_moves_the_stream_by_one_draw() -> None:
    shared = SharedRandomness(SimpleNamespace(rank=1), torch.device("cpu"))  # type: ignore[arg-type]
    with random_streams.fork(3):
        untouched = torch.rand(4)
    with random_streams.fork(3):
        shared.enter_split()
        own = torch.rand(4)
        shared.leave_split()
        after = torch.rand(4)
    assert not torch.equal(own, after)
    assert not torch.equal(after, untouched) and torch.equal(after[:3], untouched[1:])
