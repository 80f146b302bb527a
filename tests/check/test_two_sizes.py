"""Code that does something else at another size is planned and tried at two sizes; what was never seen is named.

The modules here were planned from one call, and were wrong, or failed raw, on another.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.common import RankError
from autoplan.check.ranks.run import run_ranks
from autoplan.check.verify.clone import clone_of
from autoplan.hf.source import resolve

torch.set_num_threads(1)


def shifted_attention(x: torch.Tensor, qkv: nn.Linear, out: nn.Linear, heads: int, window: int) -> torch.Tensor:
    """Attention inside windows, which are masked as well where there are several."""
    rows, length, width = x.shape
    windows = -(-length // window)
    x = nn.functional.pad(x, (0, 0, 0, windows * window - length)).reshape(rows * windows, window, width)
    q, k, v = qkv(x).reshape(x.size(0), window, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
    scores = q @ k.transpose(-2, -1)
    if windows > 1:
        mask = torch.arange(windows, dtype=x.dtype)[:, None, None] * torch.eye(window, dtype=x.dtype)
        scores = scores.view(x.size(0) // windows, windows, heads, window, window) + mask[None, :, None]
        scores = scores.view(-1, heads, window, window)
    mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, windows * window, width)
    return out(mixed[:, :length])


class Windows(nn.Module):
    """As window attention is written: its numbers of heads and windows are handed to a function."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)
        self.heads, self.window = 8, window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + shifted_attention(x, self.qkv, self.out, self.heads, self.window)


class WrongWhereLong(nn.Module):
    """One of two MLPs asks for the bytes of its shard, on more positions than the first call has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.good_up, self.good_down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        if x.shape[1] > 10:
            hidden = hidden * (hidden.untyped_storage().nbytes() / hidden.element_size() / 4000)
        x = x + self.down(hidden)
        return x + self.good_down(torch.tanh(self.good_up(x)))


def test_a_path_of_another_size_is_planned_too() -> None:
    model = Windows(window=10).eval()
    plan = autoplan.plan(model, 2)
    assert plan.fed[0].given != plan.fed[0].also, "two sizes are known"
    assert plan.proof.ok and {entry.pattern for entry in plan.entries} == {"qkv", "out"}
    report = autoplan.verify(model, plan, 2, checks=("parameters", "forward", "second_shape"))
    assert report.ok and "second_shape" in report.details["checked"]


def test_what_is_wrong_at_another_size_stays_whole() -> None:
    model = WrongWhereLong().eval()
    plan = autoplan.plan(model, 2)
    assert plan.proof.ok and "down" not in {entry.pattern for entry in plan.entries}
    assert any("the tiny clone's results differed" in finding.message for finding in plan.findings)
    assert autoplan.verify(model, plan, 2, checks=("parameters", "forward", "second_shape")).ok


def test_a_path_that_was_never_seen_is_an_error_that_names_it() -> None:
    model = Windows(window=10).double().eval()
    short, long = (torch.randn(2, length, 64, dtype=torch.float64) for length in (10, 20))
    plan = autoplan.plan(model, 2, inputs={"x": short})

    def rank(_: int) -> torch.Tensor:
        own = autoplan.parallelize(copy.deepcopy(model), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
        with torch.no_grad():
            own(short)
            return own(long)

    with pytest.raises(
        RankError, match=r"PlanMismatchError: the model \(Windows\) fails on a rank's shards in this call"
    ) as caught:
        run_ranks(rank, 2)
    text = str(caught.value)
    assert "in shifted_attention" in text or "in forward" in text
    assert "scores.view" in text and "inputs={" in str(caught.value.__cause__)


class Conditioned(nn.Module):
    """An argument that is left out brings in layers of torch's that were cut, and are given what is whole."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, condition: torch.Tensor | None = None) -> torch.Tensor:
        inner = self.up(x).relu()
        if condition is not None:
            inner = condition
        return self.down(inner)


def test_a_layer_of_torchs_is_named_with_the_line_that_calls_it() -> None:
    model, x = nn.Sequential(Conditioned()).eval(), torch.randn(2, 4, 16)
    plan = autoplan.plan(model, 2, inputs={"input": x})

    def rank(_: int) -> torch.Tensor:
        own = autoplan.parallelize(copy.deepcopy(model), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
        return own[0](x, condition=torch.randn(2, 4, 32))

    with pytest.raises(
        RankError,
        match=r"PlanMismatchError: down \(Linear\) fails on a rank's shards in this call: .*self.down\(inner\)",
    ):
        run_ranks(rank, 2)


def test_what_a_model_refuses_itself_is_left_as_it_is() -> None:
    class Refusing(Windows):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] > 10:
                raise ValueError("no more than 10 positions")
            return super().forward(x)

    model = Refusing(window=10).double().eval()
    short, long = (torch.randn(2, length, 64, dtype=torch.float64) for length in (10, 20))
    plan = autoplan.plan(model, 2, inputs={"x": short})

    def rank(_: int) -> str:
        own = autoplan.parallelize(copy.deepcopy(model), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
        try:
            own(long)
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    assert set(run_ranks(rank, 2)) == {"ValueError: no more than 10 positions"}


class Padded(nn.Module):
    """Pads to a multiple of eight: always, or where that is no multiple."""

    def __init__(self, always: bool) -> None:
        super().__init__()
        self.always, self.table, self.out = always, nn.Embedding(20, 16), nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        x = self.table(ids) * mask.any(-1)[..., None]
        if self.always or length % 8:
            x = nn.functional.pad(x, (0, 0, 0, -length % 8))
        return self.out(x.unflatten(1, (-1, 8)).cumsum(2)).flatten(1, 2)[:, :length]


def test_given_calls_are_tried_at_an_odd_length_unless_that_takes_another_path() -> None:
    """At a multiple it pads by nothing. What the guard would refuse is not tried, and not held against a plan."""
    given = {"ids": torch.randint(20, (2, 16)), "mask": torch.ones(2, 16, 16, dtype=torch.bool)}
    other = clone_of(resolve(Padded(always=True), inputs=given)).others
    assert {name: tuple(x.shape) for name, x in other["forward"].items()} == {"ids": (2, 13), "mask": (2, 13, 13)}
    assert not clone_of(resolve(Padded(always=False), inputs=given)).others
