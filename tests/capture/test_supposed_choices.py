"""Models whose Python asks which experts were hit, and that nobody can run: traced on choices that are made up."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import autoplan
from autoplan.capture.capture import capture_any
from autoplan.capture.known_values import KnownValues
from autoplan.hf.source import resolve
from autoplan.planning import capture_source


class Expert(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


class Routed(nn.Module):
    """Runs the experts that some token chose, one after the other; the last of the places is no expert at all."""

    def __init__(self, width: int, inner: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts + 1)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        out = x
        for index in torch.unique(chosen).tolist():
            rows, place = (chosen == index).nonzero(as_tuple=True)
            mine = x[rows] if index == len(self.experts) else self.experts[index](x[rows])
            out = out.index_add(0, rows, mine * weights[rows, place, None])
        return out


def test_a_model_too_large_to_run_is_planned() -> None:
    with torch.device("meta"):
        model = Routed(8192, 65536, 5)  # five billion parameters
    inputs = {"x": torch.randn(6, 8192)}
    captured = capture_any(model, {"main": inputs})
    assert "assumed" in captured.trace.notes[0]
    plan = autoplan.plan(model, 2, inputs=inputs, prove="none")
    cut = {rule.pattern: rule.dim for rule in plan.runtime.parameters if rule.dim is not None}
    assert cut["experts.*.up.weight"] == 0 and cut["experts.*.down.weight"] == 1, cut


def test_small_models_run_for_real() -> None:
    captured = capture_any(Routed(16, 32, 5), {"main": {"x": torch.randn(6, 16)}})
    assert "real numbers" in captured.trace.notes[0]


def test_their_blocks_are_recorded_one_by_one_for_real() -> None:
    model = nn.Sequential(Routed(16, 32, 3), *(Expert(16, 32) for _ in range(5)))
    captured = capture_source(resolve(model, inputs={"input": torch.randn(6, 16)}), model)
    assert captured.trace.folds and captured.unfold is not None
    unfolded = captured.unfold().trace
    assert unfolded.real and not unfolded.folds


def test_choices_are_spread_and_within_bounds() -> None:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    scores = mode.from_tensor(torch.randn(4, 9))
    with KnownValues(mode, supposing=True):
        values, places = scores.topk(3, -1)
        best, largest, above = scores.argmax(-1), scores.max(0).indices, scores > 0
    assert places.tolist() == [[0, 4, 8]] * 4 and best.tolist() == [0] * 4 and largest.tolist() == [0] * 9
    assert bool(above.all()) and type(values) is not torch.Tensor, "values stay unknown"
