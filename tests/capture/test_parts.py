"""Parts that a model's own forward never runs are called alone: they are split, and right whoever calls them."""

from __future__ import annotations

import copy
from typing import ClassVar

import pytest
import torch
from mesh_toys import mesh_of
from torch import nn
from torch.nn import functional as F
from transformers import PretrainedConfig

import autoplan
from autoplan.capture.called import PART, call
from autoplan.check.ranks.run import run_ranks
from autoplan.hf.inputs.make import make_inputs


class Ribs(nn.Module):
    """Widens and narrows again."""

    def __init__(self) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, tide: torch.Tensor) -> torch.Tensor:
        return self.fall(F.gelu(self.rise(tide)))


class Press(nn.Module):
    """No forward that anybody needs: methods run its halves."""

    def __init__(self) -> None:
        super().__init__()
        self.inward, self.outward = Ribs(), Ribs()

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        return self.inward(x)

    def unpack(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unpack(self.pack(x))


class Painter(nn.Module):
    """Writes in forward; a method of its own paints. One of two choices is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PretrainedConfig(vocab_size=60, hidden_size=16)
        self.config.brush = PretrainedConfig(width=48)
        self.token, self.head = nn.Embedding(60, 16), nn.Linear(16, 60, bias=False)
        self.press, self.sketch, self.choices = Press(), Ribs(), nn.ModuleList([Ribs(), Ribs()])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.token(input_ids)
        return self.head(x + self.choices[0](x))

    def paint(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.press.unpack(self.sketch(self.token(input_ids))).tanh()


def test_parts_that_forward_never_runs_have_feeds() -> None:
    """Halves that methods run are parts; of choices the one that was not taken follows the other."""
    model = Painter()
    feeds = make_inputs(model, config=model.config).feeds
    assert set(feeds) == {"text", "press.inward", "press.outward", "sketch"}
    assert feeds["sketch"][PART] == "sketch"
    torch.testing.assert_close(call(model, feeds["sketch"]), model.sketch(feeds["sketch"]["tide"]))


@pytest.mark.parametrize("tp", [2, 4])
def test_parts_are_split_and_a_method_that_runs_them_is_right(tp: int) -> None:
    """What goes into a part carries gradient within the model: the table's gradient shows that none is lost."""
    torch.manual_seed(0)
    model = Painter().double()
    feeds = make_inputs(model, config=model.config).feeds
    plan = autoplan.plan(model, tp, inputs=feeds)
    whole = {item.fqn for item in plan.replicated}
    assert not {f"{part}.{half}.weight" for part in ("press.outward", "sketch") for half in ("rise", "fall")} & whole
    assert autoplan.verify(model, plan, tp_size=tp, inputs=feeds).ok
    ids = torch.arange(12).view(2, 6)
    model.paint(ids).square().sum().backward()

    def on_rank(rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        sharded = autoplan.parallelize(copy.deepcopy(model), mesh_of(tp=tp), plan)
        sharded.zero_grad()
        painted = sharded.paint(ids)
        painted.square().sum().backward()
        return painted.detach(), autoplan.full_tensors(sharded, grads=True)

    for painted, gradients in run_ranks(on_rank, tp):
        torch.testing.assert_close(painted, model.paint(ids).detach())
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                torch.testing.assert_close(gradients[name], parameter.grad)


class Counted(nn.Module):
    """Reads how often each row comes before anything else: a run on shapes alone ends there, whatever it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.ribs = Ribs()
        self.table = nn.Embedding(600, 60_000)  # too large to be run for real

    def forward(self, tide: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if sum(counts.tolist()) != 3:
            raise ValueError("three rows are wanted")
        return self.ribs(tide) + self.table(tide.long().sum(-1))[..., :16]


def test_what_is_inside_a_part_is_fed_where_the_part_itself_cannot_be() -> None:
    model = Painter()
    with torch.device("meta"):
        model.counted = Counted()
    feeds = make_inputs(model, config=model.config).feeds
    assert "counted" not in feeds and "counted.table" in feeds


class Enlarging(nn.Module):
    """Makes pictures of sixteen times the side."""

    shown: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(16, 3, 16, stride=16)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        picture = self.up(latents)
        self.shown.append(picture.shape[-1])
        return picture


def test_a_part_that_makes_large_pictures_runs_on_a_small_one() -> None:
    """Each run of such a decoder costs seconds: it is found by one, and then tried as small as it is fed."""
    model = Painter()
    model.enlarging = Enlarging()
    Enlarging.shown.clear()
    feeds = make_inputs(model, config=model.config).feeds
    assert feeds["enlarging"]["latents"].shape == (2, 16, 4, 4)
    assert Enlarging.shown[0] == 512 and set(Enlarging.shown[1:]) == {64}, Enlarging.shown
