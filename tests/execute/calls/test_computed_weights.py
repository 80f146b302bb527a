"""Weights that are computed of parameters before they are used, and tables that are read by indexing: split, exact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import autoplan
from autoplan.common.patterns import matches

WIDTH, INNER = 32, 64


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.near, self.far = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.far(torch.tanh(self.near(x)))


class Ternary(nn.Module):
    """Rounded by the mean absolute value of the whole weight, straight through."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        scale = weight.abs().mean().clamp(min=1e-5)
        return weight + ((weight / scale).round().clamp(-1, 1) * scale - weight).detach()


class Standardised(nn.Module):
    """Rows with mean 0 and deviation 1, by one call for both."""

    def __init__(self, call: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.call = call

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        spread, mean = self.call(weight, dim=1, keepdim=True, correction=0)
        return (weight - mean) / (spread + 0.1)


def parametrized(build: Callable[[], nn.Module]) -> nn.Module:
    model = TwoLayers()
    for layer in (model.near, model.far):
        parametrize.register_parametrization(layer, "weight", build())
    return model


def pruned() -> nn.Module:
    model = TwoLayers()
    for layer in (model.near, model.far):
        prune.random_unstructured(layer, "weight", amount=0.3)
    return model


def spectral(convolutions: bool) -> nn.Module:
    """In training the estimate of the norm goes on, and is written into buffers."""
    model = TwoLayers()
    if convolutions:
        model.near, model.far = nn.Conv1d(WIDTH, INNER, 3, padding=1), nn.Conv1d(INNER, WIDTH, 3, padding=1)
    model.near, model.far = map(parametrizations.spectral_norm, (model.near, model.far))
    return model


class CalledWithOthers(nn.Module):
    """A child is called with weights that are twice its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLayers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = {name: 2 * parameter for name, parameter in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, doubled, (x,))


class Penalised(nn.Module):
    """Returns the squared length of all parameters, read by `parameters()` and by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TwoLayers()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lasso = self.inner.get_parameter("near.weight").abs().sum()
        return self.inner(x), 1e-2 * (lasso + sum(one.square().sum() for one in self.parameters()))


class TiedDecoder(nn.Module):
    """The decoder is the encoder, transposed: one weight brings its rows in and sums over them."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.bias = nn.Linear(WIDTH, INNER), nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(self.encode(x)), self.encode.weight.T, self.bias)


class OneConvolutionAtATime(nn.Module):
    """Single convolutions from residual to residual: their products are gathered."""

    def __init__(self, normed: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(normed(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)) for _ in range(2))
        self.last = nn.Linear(WIDTH, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2)
        for conv in self.convs:
            x = x + torch.tanh(conv(x))
        return self.last(x.transpose(1, 2))


class ByIndexing(nn.Module):
    """Rows of a table by table[ids] or table[(ids,)], and a head that is the table."""

    def __init__(self, in_tuple: bool) -> None:
        super().__init__()
        self.table, self.inner, self.in_tuple = nn.Parameter(torch.randn(96, WIDTH)), TwoLayers(), in_tuple

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table[(ids,)] if self.in_tuple else self.table[ids - 96]
        return F.layer_norm(self.inner(x), (WIDTH,)) @ self.table.T


class Case(NamedTuple):
    build: Callable[[], nn.Module]
    split: tuple[str, ...]
    inputs: dict[str, torch.Tensor]


STREAM = {"x": torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0))}
PICTURES = {"x": STREAM["x"].transpose(1, 2)}
IDS = {"ids": torch.arange(12).view(2, 6) * 8}
ORIGINALS = ("near.parametrizations.weight.original", "far.parametrizations.weight.original")
INNER_BOTH = ("inner.near.weight", "inner.far.weight")

CASES = {
    "pruned": Case(pruned, ("near.weight_orig", "far.weight_orig"), STREAM),
    "ternary": Case(partial(parametrized, Ternary), ORIGINALS, STREAM),
    "var_mean": Case(partial(parametrized, partial(Standardised, torch.var_mean)), ORIGINALS, STREAM),
    "std_mean": Case(partial(parametrized, partial(Standardised, torch.std_mean)), ORIGINALS, STREAM),
    "spectral norm": Case(partial(spectral, False), ORIGINALS, STREAM),
    "spectral norm of convolutions": Case(partial(spectral, True), ORIGINALS, PICTURES),
    "called with others": Case(CalledWithOthers, INNER_BOTH, STREAM),
    "tied decoder": Case(TiedDecoder, ("encode.weight", "encode.bias"), STREAM),
    "penalised": Case(Penalised, INNER_BOTH, STREAM),
    "weight_norm, gathered": Case(
        partial(OneConvolutionAtATime, parametrizations.weight_norm),
        tuple(f"convs.{n}.parametrizations.weight.original{m}" for n in range(2) for m in range(2)),
        STREAM,
    ),
    "weight_norm by hooks, gathered": Case(
        partial(OneConvolutionAtATime, nn.utils.weight_norm),
        tuple(f"convs.{n}.weight_{m}" for n in range(2) for m in "gv"),
        STREAM,
    ),
    "table[ids]": Case(partial(ByIndexing, False), ("table", *INNER_BOTH), IDS),
    "table[(ids,)]": Case(partial(ByIndexing, True), ("table", *INNER_BOTH), IDS),
}


@pytest.mark.parametrize("name", CASES)
def test_split_and_exact(name: str) -> None:
    torch.manual_seed(0)
    build, split, inputs = CASES[name]
    model = build()
    plan = autoplan.plan(model, tp_size=4, inputs=inputs)
    rules = [rule.pattern for rule in plan.runtime.parameters if rule.dim is not None]
    assert all(any(matches(rule, name) for rule in rules) for name in split), plan
    checks = ["parameters", "forward", "state_dict", "training"]
    report = autoplan.verify(model, plan, tp_size=4, inputs=inputs, checks=checks)
    assert report.ok and max(report.gradients.values()) < 1e-9, report.findings
