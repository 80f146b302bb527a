"""Models with towers: pictures and sounds reach them, they are cut, and the sharded model is right however called."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from mesh_toys import mesh_of
from slow_cases import marked
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from transformers import PretrainedConfig

import autoplan
from autoplan.capture.called import calls_the_model
from autoplan.capture.capture import capture_fake
from autoplan.capture.dry_run import tried
from autoplan.capture.known_values import KnownValues
from autoplan.check.ranks.run import run_ranks
from autoplan.hf.inputs.make import feeds_for, make_inputs
from autoplan.hf.source import resolve

# model, the method that makes features, what of the feed it takes
FAMILIES = {
    "one picture": ("llava:LlavaForConditionalGeneration", "image", "get_image_features", ("pixel_values",)),
    "tiles, a parameter of the method's own": (
        "llava_next:LlavaNextForConditionalGeneration",
        "image",
        "get_image_features",
        ("pixel_values", "image_sizes"),
    ),
    "patches with a grid": (
        "qwen2_5_vl:Qwen2_5_VLForConditionalGeneration",
        "image",
        "get_image_features",
        ("pixel_values", "image_grid_thw"),
    ),
    "sound": (
        "audioflamingo3:AudioFlamingo3ForConditionalGeneration",
        "audio",
        "get_audio_features",
        ("input_features", "input_features_mask"),
    ),
}


def features(made: Any) -> torch.Tensor:
    made = getattr(made, "pooler_output", made)
    return made if isinstance(made, torch.Tensor) else torch.cat([part.flatten(0, -2) for part in made])


@pytest.mark.parametrize(
    ("planned", "family"),
    marked(
        product(("all feeds", "text only"), FAMILIES),
        slow=[("text only", family) for family in FAMILIES if family not in ("sound", "one picture")],
    ),
)
def test_a_sharded_model_is_called_in_every_way(family: str, planned: str) -> None:
    """With text, with a picture, by the method that makes features; planned with a picture or without one."""
    text, feed, method, taken = FAMILIES[family]
    model = resolve(text).tiny()
    feeds = feeds_for(model)
    given = {name: feeds[feed][name] for name in taken}
    with torch.no_grad():
        expected = {name: model(**keywords).logits for name, keywords in feeds.items()}
        expected["features"] = features(getattr(model, method)(**given))
    inputs = feeds if planned == "all feeds" else feeds["text"]
    plan = autoplan.plan(model, tp_size=2, inputs=inputs, prove="none")
    cut = [rule.pattern for rule in plan.runtime.parameters if rule.dim is not None]
    assert any("tower" in name or "visual" in name for name in cut) == (planned == "all feeds")

    def rank_body(rank: int) -> dict[str, torch.Tensor]:
        sharded = autoplan.parallelize(copy.deepcopy(model), mesh_of(tp=2), plan, gather_logits=True)
        with torch.no_grad():
            found = {"features": features(getattr(sharded, method)(**given))}
            found |= {name: sharded(**keywords).logits for name, keywords in feeds.items()}
        return found

    for found in run_ranks(rank_body, 2):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-8)


# ------------------------------------------------------------------------------------------- numbers that are known


class CountsInPython(nn.Module):
    """Counts tokens, sizes a value by them, and uses a weight: fake tensors alone cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(32, 16), nn.Linear(16, 8)

    def forward(self, ids: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        places = (ids == 7).nonzero()
        rows = [self.table.weight[:n] for n in grid.prod(-1).tolist()]
        if len(places) != sum(len(part) for part in rows):
            raise ValueError("as many as the grid says")
        x = self.table(ids).masked_scatter((ids == 7).unsqueeze(-1), torch.cat(rows))
        return self.out(x)


def test_integers_are_known_on_fake_tensors() -> None:
    ids = torch.tensor([[1, 7, 7, 2], [7, 7, 3, 4]])
    captured = capture_fake(CountsInPython(), {"": {"ids": ids, "grid": torch.tensor([[1, 2], [2, 1]])}})
    assert not captured.trace.real
    assert any(op.name == "masked_scatter" for op in captured.trace.ops)


def test_what_touches_a_weight_stays_fake() -> None:
    with KnownValues(FakeTensorMode(allow_non_fake_inputs=True)) as known:
        mask, floats = known.admit(torch.tensor([True, False])), known.admit(torch.randn(2))
        assert not isinstance(mask, FakeTensor) and isinstance(floats, FakeTensor)
        assert int(mask.sum()) == 1 and isinstance(torch.where(mask, floats, 0.0), FakeTensor)
        assert isinstance(torch.zeros(2), FakeTensor) and torch.arange(3).tolist() == [0, 1, 2]
        with pytest.raises(RuntimeError, match="overwritten with unknown values"):
            mask.logical_and_(floats > 0)


# ------------------------------------------------------------------------------------------------- several at once


class Senses(nn.Module):
    """Sees and hears, and hears with another layer while it sees. Its placeholders are named by its towers' configs."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PretrainedConfig(vocab_size=97, hidden_size=16, num_mel_bins=6)
        self.config.eye = PretrainedConfig(image_size=8, patch_size=4, image_token_id=90)
        self.config.ear = PretrainedConfig(audio_token_id=91)
        self.token, self.look, self.head = nn.Embedding(97, 16), nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 97)
        self.hear, self.hear_and_see = nn.Linear(6, 16), nn.Linear(6, 16)

    def get_image_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.look(pixel_values).flatten(2).transpose(1, 2)

    def get_audio_features(self, input_features: torch.Tensor, seeing: bool = False) -> torch.Tensor:
        return (self.hear_and_see if seeing else self.hear)(input_features)

    def forward(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        input_features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x, found = self.token(input_ids), {}
        if pixel_values is not None:
            found[90] = self.get_image_features(pixel_values)
        if input_features is not None:
            found[91] = self.get_audio_features(input_features, pixel_values is not None)
        for token, features in found.items():
            if int((input_ids == token).sum()) != features.shape[0] * features.shape[1]:
                raise ValueError("a placeholder for each feature")
            x = x.masked_scatter((input_ids == token).unsqueeze(-1), features)
        return self.head(x)


class OneAtATime(Senses):
    """Hears the same whether it sees or not: together they show nothing new."""

    def get_audio_features(self, input_features: torch.Tensor, seeing: bool = False) -> torch.Tensor:
        return self.hear(input_features)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Senses, ["text", "image", "audio", "image_audio"]), (OneAtATime, ["text", "image", "audio"])],
)
def test_a_picture_and_a_sound_in_one_prompt_where_that_shows_more(kind: type[Senses], expected: list[str]) -> None:
    model = kind()
    feeds = make_inputs(model, config=model.config).feeds
    assert list(calls_the_model(feeds)) == expected
    plan = autoplan.plan(model, tp_size=2, inputs=feeds)
    assert autoplan.verify(model, plan, tp_size=2, inputs=feeds).ok


def test_a_tower_is_fed_by_its_own_config_where_the_prompt_does_not_run() -> None:
    """Its features are wider than the text that they go into, so nothing but the tower itself can be called."""
    model = resolve("qwen2_5_vl").tiny()
    config = copy.deepcopy(model.config)
    config.vision_config.out_hidden_size = 2 * config.text_config.hidden_size
    with torch.device("meta"):
        apart = type(model)(config).double()
    made = make_inputs(apart, config=config, model_type="qwen2_5_vl")
    assert any("do not match" in note for note in made.notes)
    tower = made.feeds["model.visual"]
    assert tower["grid_thw"].shape[1] == 3 and tried(apart.model.visual, dict(list(tower.items())[1:])).complete


# ------------------------------------------------------------------------------------------------- stems are gathered


class Stem(nn.Module):
    """A picture's patches become the stream: everyone reads them whole."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 32, 4, 4)
        self.up, self.down, self.out = nn.Linear(32, 64), nn.Linear(64, 32), nn.Parameter(torch.randn(32, 48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = x + self.down(F.gelu(self.up(x)))
        return F.layer_norm(x.contiguous() @ self.out, (48,))


class WholeSizeOfAShard(nn.Module):
    """The width of a value of which ranks have shards is the size of one that they have whole."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide, self.last = nn.Linear(32, 64), nn.Linear(64, 128), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.narrow(x)
        batch, length, width = y.shape
        return self.last(F.layer_norm(self.wide(y.tanh()).reshape(batch, length * 2, width), (64,)))


class Pooled(nn.Module):
    """torch's own attention, in one call: a query that pools a picture, then the picture on itself, under masks."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, 32))
        self.pool = nn.MultiheadAttention(32, 4, batch_first=True)
        self.itself = nn.MultiheadAttention(32, 4, batch_first=True, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(x.shape[:2], dtype=torch.bool)
        hidden[:, -2:] = True
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y = x + self.itself(x, x, x, attn_mask=future, need_weights=False)[0]
        pooled, weights = self.pool(self.query.expand(x.shape[0], -1, -1), y, y, key_padding_mask=hidden)
        return torch.cat([pooled, y * weights.transpose(1, 2)], dim=1)


class Upsampled(nn.Module):
    """A transposed convolution on shards of its channels: its bias is added once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Conv1d(32, 64, 3, padding=1), nn.ConvTranspose1d(64, 32, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.transpose(1, 2)
        return y.repeat_interleave(2, -1) + self.down(self.up(y).tanh())


class Standardised(nn.Module):
    """Statistics over a weight's inputs: were those cut, no rank could know them. The MLP is cut all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = F.batch_norm(self.second.weight[None], None, None, training=True)[0]
        x = x + F.linear(self.first(x).tanh(), weight)
        return x + self.down(self.up(x).tanh())


@pytest.mark.parametrize(
    ("kind", "shape", "cut"),
    [
        (
            Pooled,
            (2, 8, 32),
            {f"{name}.{w}" for name in ("pool", "itself") for w in ("in_proj_weight", "out_proj.weight")},
        ),
        (Upsampled, (2, 8, 32), {"up.weight", "down.weight"}),
        (Standardised, (2, 8, 32), {"up.weight", "down.weight"}),
        (Stem, (2, 3, 16, 16), {"patch.weight", "up.weight", "down.weight", "out"}),
        (WholeSizeOfAShard, (2, 8, 32), {"narrow.weight", "wide.weight"}),
    ],
)
def test_planned_proven_and_exact(kind: type[nn.Module], shape: tuple[int, ...], cut: set[str]) -> None:
    torch.manual_seed(0)
    model, inputs = kind().double(), {"x": torch.randn(shape, dtype=torch.float64)}
    plan = autoplan.plan(model, tp_size=2, inputs=inputs)
    assert cut <= {rule.pattern for rule in plan.runtime.parameters if rule.dim is not None}, plan
    assert plan.proof.ok, plan.findings
    report = autoplan.verify(model, plan, tp_size=2, inputs=inputs, checks=["parameters", "forward", "state_dict"])
    assert report.ok and max(report.gradients.values()) < 1e-10, report.findings


class Rough(nn.Module):
    """Two convolutions with a norm over groups of channels between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)
        self.wide, self.even, self.narrow = nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.Conv2d(32, 16, 1)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        x = self.stem(picture)
        x = x + self.narrow(F.silu(self.even(self.wide(x))))
        return self.head(x.mean((2, 3)))


def test_groups_of_channels_are_sharded() -> None:
    """The norm's literals (channels, groups) are a rank's own, also when the recorded graph is replayed."""
    picture = {"picture": torch.randn(2, 3, 6, 6).double()}
    model = Rough().double()
    plan = autoplan.plan(model, tp_size=4, inputs=picture)
    assert plan.proof is not None and plan.proof.ok, plan.findings
    assert not {"wide.weight", "narrow.weight", "even.weight"} & {item.fqn for item in plan.replicated}
    assert autoplan.verify(model, plan, tp_size=4, inputs=picture).ok
