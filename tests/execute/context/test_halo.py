"""Modules that read a few positions before each one get those of the rank before, and nothing else is gathered."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autoplan
from autoplan.check.ranks.run import run_ranks
from autoplan.values import Halo

Mixes = Callable[["Mixer", torch.Tensor], torch.Tensor]


def convolved(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    """Padding on both sides, of which the end is cut off again."""
    found: torch.Tensor = torch.tanh(mixer.kernel(x.transpose(1, 2)))[..., : x.shape[1]].transpose(1, 2)
    return found


def shifted(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    return x * mixer.share + F.pad(x, (0, 0, 2, -2)) * (1 - mixer.share)


def from_behind(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    return x * mixer.share + F.pad(x, (0, 0, -2, 2)) * (1 - mixer.share)


def both(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    return convolved(mixer, shifted(mixer, x))


def centred(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    """It reads positions that come later, too."""
    found: torch.Tensor = mixer.kernel(x.transpose(1, 2))[..., 1:-2].transpose(1, 2)
    return found


def around(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    return shifted(mixer, centred(mixer, x)) + from_behind(mixer, x)


def rolled(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    """The first position reads the last."""
    return x + x.roll(1, 1) * mixer.share


def first_eight(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    """An end that is counted from the start."""
    return x + F.pad(x, (0, 0, 1, -1))[:, :8].sum(1, keepdim=True)


def cumulated(mixer: Mixer, x: torch.Tensor) -> torch.Tensor:
    return shifted(mixer, x) + x.cumsum(1)


HALOS: dict[Mixes, tuple[int, int]] = {
    convolved: (3, 0),
    shifted: (2, 0),
    both: (5, 0),
    from_behind: (0, 2),
    centred: (2, 1),
    around: (4, 2),
}


class Mixer(nn.Module):
    def __init__(self, mixes: Mixes) -> None:
        super().__init__()
        self.mixes = mixes
        self.kernel = nn.Conv1d(16, 16, 4, groups=16, padding=3)
        self.share, self.up, self.down = nn.Parameter(torch.rand(16)), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is not None:
            x = x * mask[..., None]
        found: torch.Tensor = self.down(self.mixes(self, self.up(x)))
        return found


class Block(nn.Module):
    def __init__(self, mixes: Mixes) -> None:
        super().__init__()
        self.mixer, self.up, self.down = Mixer(mixes), nn.Linear(16, 24), nn.Linear(24, 16)
        self.first, self.last = nn.LayerNorm(16), nn.LayerNorm(16)
        self.query, self.keys, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.mixer(x) if mask is None else x + self.mixer(x, mask)
        y = self.first(x)
        query, keys, values = (
            one.unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.query(y), *self.keys(y).chunk(2, -1))
        )
        x = x + self.out(F.scaled_dot_product_attention(query, keys, values, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.last(x))))


class Model(nn.Module):
    def __init__(self, mixes: Mixes) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        self.layers = nn.ModuleList(Block(mixes) for _ in range(2))

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x) if mask is None else layer(x, mask)
        found: torch.Tensor = self.head(x)
        return found


def step(model: Any, length: int, **given: torch.Tensor) -> list[torch.Tensor]:
    ids = torch.arange(2 * length).view(2, length) * 7 % 40
    loss = F.cross_entropy(model(ids, **given).transpose(1, 2), ids.roll(-1, 1))
    loss.backward()
    return [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]


def planned(mixes: Mixes, ranks: int) -> tuple[nn.Module, autoplan.Plan]:
    torch.manual_seed(0)
    model = Model(mixes).double()
    inputs = {"input_ids": torch.ones(2, 12, dtype=torch.long)}
    return model, autoplan.plan(model, cp_size=ranks, inputs=inputs, prove="none")


def on_ranks(model: nn.Module, plan: autoplan.Plan, run: Callable[[Any], Any], ranks: int, **how: Any) -> list[Any]:
    copies = [copy.deepcopy(model) for _ in range(ranks)]

    def rank(number: int) -> Any:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
        return run(autoplan.parallelize(copies[number], mesh, plan, **how))

    return run_ranks(rank, ranks)


@pytest.mark.parametrize("ranks", (2, 4))
@pytest.mark.parametrize("mixes", HALOS)
def test_a_step_is_that_of_one_device(mixes: Mixes, ranks: int) -> None:
    """Also where a rank has fewer positions than the module reads."""
    model, plan = planned(mixes, ranks)
    found = {(one.pattern, (one.before, one.after)) for one in plan.runtime.of(Halo)}
    assert found == {("layers.*.mixer", HALOS[mixes])}
    assert not any("all_gather" in one.forward for one in plan.communication)
    for length in (16, 13, 5):
        alone = step(copy.deepcopy(model), length)
        for found in on_ranks(model, plan, lambda of, length=length: step(of, length), ranks):
            assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(found, alone, strict=True)), length


@pytest.mark.parametrize("mixes", (both, around))
def test_what_else_is_given_has_all_positions(mixes: Mixes) -> None:
    """Then the module runs on all of them."""
    model, plan = planned(mixes, 2)
    mask = torch.ones(2, 13, dtype=torch.float64)
    mask[0, 5:8] = 0
    alone = step(copy.deepcopy(model), 13, mask=mask)
    for found in on_ranks(model, plan, lambda of: step(of, 13, mask=mask), 2, path_guard="off"):
        assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(found, alone, strict=True))


@pytest.mark.parametrize("mixes", (rolled, first_eight, cumulated))
def test_what_reads_more_gets_the_whole_sequence(mixes: Mixes) -> None:
    model, plan = planned(mixes, 2)
    assert not plan.runtime.of(Halo)
    alone = step(copy.deepcopy(model), 13)
    for found in on_ranks(model, plan, lambda of: step(of, 13), 2):
        assert all(torch.allclose(one, other, atol=1e-12) for one, other in zip(found, alone, strict=True))
