"""Example inputs: the forward runs on them, they are always the same, and nothing else is disturbed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from releases import since
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PretrainedConfig

from autoplan.capture.called import call, calls_the_model
from autoplan.capture.draw import Draw, evaluate
from autoplan.capture.dry_run import tried
from autoplan.common.errors import CaptureError, SourceError
from autoplan.hf.inputs.make import make_inputs
from autoplan.hf.source import resolve


def feeds_for(model: nn.Module, **options: Any) -> dict[str, dict[str, Any]]:
    return make_inputs(model, **options).feeds


class Tokens(nn.Module):
    """The common shape of a hand-written decoder: ids, positions from their length, optional targets."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.place, self.head = nn.Embedding(97, 16), nn.Embedding(64, 16), nn.Linear(16, 97)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.token(idx) + self.place(torch.arange(idx.size(1), device=idx.device)))


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(784, 10)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        return self.inner(picture.flatten(1))


class Denoiser(nn.Module):
    """Three arguments: two widths that linears tell, and time steps that nothing tells."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.x, self.context = nn.Linear(16, 48), nn.Linear(24, 48), nn.Linear(20, 48)

    def forward(self, x: torch.Tensor, steps: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        angles = steps[:, None] * torch.exp(-torch.arange(8) / 8.0)[None]
        time = self.time(torch.cat([angles.cos(), angles.sin()], -1))[:, None]
        return self.x(x) + time + self.context(context).mean(1, keepdim=True)


class Patches(nn.Module):
    """The table of positions fixes the size of the picture: 14 * 14 patches of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.place = nn.Conv2d(3, 32, 16, 16), nn.Parameter(torch.zeros(1, 196, 32))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.patch(image).flatten(2).transpose(1, 2) + self.place


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(24)), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor, causal: bool) -> torch.Tensor:
        return self.inner(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(50, 16)

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.token(tokens).masked_fill(~mask[..., None], 0.0)


class Looks(nn.Module):
    """Python looks at the values: only a real run gets through."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(50, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.token(ids) if (ids > 3).any() else 2 * self.token(ids)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(12, 20, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) @ self.weight


CASES: list[tuple[type[nn.Module], dict[str, Any]]] = [
    (Tokens, {"idx": (3, 5)}),
    (Flat, {"picture": (3, 784)}),
    (Denoiser, {"x": (3, 5, 24), "steps": (3,), "context": (3, 5, 20)}),
    (Patches, {"image": (3, 3, 224, 224)}),
    (Normed, {"x": (3, 5, 24), "causal": None}),
    (Masked, {"tokens": (3, 5), "mask": (3, 5)}),
    (Looks, {"ids": (3, 5)}),
    (Recurrent, {"x": (3, 5, 12)}),
    (Product, {"x": (3, 5, 12)}),
]


@pytest.mark.parametrize(("kind", "shapes"), CASES, ids=lambda x: getattr(x, "__name__", ""))
def test_plain_modules(kind: type[nn.Module], shapes: dict[str, Any]) -> None:
    """The same inputs for the module on meta and on the CPU; the forward runs; the random state stays."""
    model = kind()
    with torch.device("meta"):
        empty = kind()
    state = torch.get_rng_state()
    made = feeds_for(model, batch=3, length=5)["forward"]
    again = feeds_for(empty, batch=3, length=5)["forward"]
    assert torch.equal(state, torch.get_rng_state())
    assert {n: tuple(v.shape) if isinstance(v, torch.Tensor) else None for n, v in made.items()} == shapes
    for name, value in made.items():
        same = torch.equal(value, again[name]) if isinstance(value, torch.Tensor) else value == again[name]
        assert same, name
    model(**made)


def test_ids_reach_up_to_the_rows_of_their_table() -> None:
    ids = feeds_for(Tokens(), batch=8, length=60)["forward"]["idx"]
    assert 60 < ids.max() < 97 and ids.min() >= 0


def test_floats_have_the_dtype_of_the_model() -> None:
    assert feeds_for(Product().double())["forward"]["x"].dtype == torch.float64


def test_deriving_leaves_no_trace() -> None:
    model = Recurrent().train()
    model.register_forward_hook(lambda *_: None)
    before = {n: p.clone() for n, p in model.named_parameters()}
    feeds_for(model)
    assert model.training and len(model._forward_hooks) == 1 and not model.cell._forward_pre_hooks
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_what_cannot_be_derived_is_named() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, record: object) -> torch.Tensor:
            return self.inner(record.decode("utf-8"))

    with pytest.raises(CaptureError, match=r"Nested.forward\(record: object\)(.|\n)*inputs={'record': torch"):
        feeds_for(Nested())


def test_arguments_without_names_are_passed_by_position() -> None:
    class Star(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, /, y: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            first, second, third = rest
            return self.inner(x) + self.inner(y) + self.inner(first) * self.inner(second) * self.inner(third)

    model = Star()
    feed = feeds_for(model)["forward"]
    assert feed.keys() == {"x", "y", "*rest"} and len(feed["*rest"]) == 3
    assert call(model, feed).shape == feed["x"].shape


def test_a_wrong_width_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 5)
            self.outer = nn.Linear(6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.outer(self.inner(x))

    with pytest.raises(CaptureError, match="self.outer") as caught:
        feeds_for(Odd())
    assert "x=float [2, 10, 6] ->" in str(caught.value)


# --------------------------------------------------------------------------------------------- the user's inputs


def test_the_users_inputs_are_taken_as_they_are() -> None:
    x = torch.ones(1, 4)
    assert feeds_for(nn.Linear(4, 4), inputs={"input": x})["forward"]["input"] is x
    two = feeds_for(nn.Linear(4, 4), inputs={"short": {"input": x}, "long": {"input": x}})
    assert list(two) == ["short", "long"]


@pytest.mark.parametrize("wrong", [{}, [1], {1: torch.ones(1)}])
def test_inputs_that_are_none(wrong: Any) -> None:
    with pytest.raises(CaptureError, match="inputs="):
        feeds_for(nn.Linear(4, 4), inputs=wrong)


# ------------------------------------------------------------------------------------------------- transformers

RUNS = ["llama", "gpt2", "falcon", "mixtral", "mamba2", "t5", "bert", "whisper:WhisperForConditionalGeneration", "vit"]
RUNS += ["wav2vec2", "llava", "qwen2_vl", "reformer"]


@pytest.mark.parametrize("text", RUNS)
@pytest.mark.parametrize(("variant", "batch", "length"), [(0, 2, 10), (1, 3, 12)])
def test_tiny_clones_run(text: str, variant: int, batch: int, length: int) -> None:
    source = resolve(text)
    model = source.tiny(variant)
    for keywords in feeds_for(model, batch=batch, length=length).values():
        with torch.no_grad():
            out = model(**keywords)
        first = next(v for v in out.values() if isinstance(v, torch.Tensor))
        assert torch.isfinite(first).all() and first.std() > 0


def test_a_model_on_meta_gets_real_inputs_of_the_same_values() -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=96, eos_token_id=21
    )
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    made = feeds_for(empty)["text"]
    assert made["input_ids"].device.type == "cpu" and made["use_cache"] is False
    assert torch.equal(made["input_ids"], feeds_for(LlamaForCausalLM(config))["text"]["input_ids"])
    assert not torch.equal(made["input_ids"], feeds_for(empty, seed=1)["text"]["input_ids"])
    many = feeds_for(empty, batch=50, length=50)["text"]["input_ids"]
    assert not (many == 21).any(), "a special token is no example"


@pytest.mark.parametrize("text", ["llava:LlavaForConditionalGeneration", "qwen2_vl:Qwen2VLForConditionalGeneration"])
def test_a_picture_reaches_the_vision_tower(text: str) -> None:
    """On the text alone no parameter of the tower gets a gradient; with a picture those do."""
    model = resolve(text).tiny()
    reached: dict[str, set[str]] = {}
    for feed, keywords in feeds_for(model).items():
        model.zero_grad()
        model(**keywords).logits.square().sum().backward()
        reached[feed] = {name for name, p in model.named_parameters() if p.grad is not None and p.dim() > 1}
    assert list(reached) == ["text", "image"]
    assert {n for n in reached["image"] if "vis" in n} and not {n for n in reached["text"] if "vis" in n}


def test_a_decoder_alone_gets_an_encoders_states() -> None:
    model = resolve("marian:MarianForCausalLM").tiny()
    feeds = feeds_for(model)
    assert list(feeds) == ["text", "cross"]
    model(**feeds["cross"]).logits.square().sum().backward()
    assert model.model.decoder.layers[0].encoder_attn.k_proj.weight.grad is not None


@pytest.mark.parametrize(
    ("text", "expected", "release"),
    [
        ("chameleon:ChameleonForConditionalGeneration", {"text", "image"}, (5, 10)),
        ("dots3_note:Dots3NoteForConditionalGeneration", {"text", "image", "audio"}, (5, 24)),
        ("inkling_mm_model:InklingForConditionalGeneration", {"text", "image", "audio"}, (5, 14)),
        ("luke:LukeForMaskedLM", {"text", "entities"}, (5, 10)),
        ("neomme:NeoMMEForMaskedLM", {"text", "image"}, (5, 18)),
        ("phi4_multimodal:Phi4MultimodalForCausalLM", {"text", "image", "audio", "image_audio"}, (5, 10)),
        ("vibevoice_asr:VibeVoiceAsrForConditionalGeneration", {"text", "audio"}, (5, 10)),
    ],
)
def test_what_a_type_reads_beside_text(text: str, expected: set[str], release: tuple[int, int]) -> None:
    since(release, text)
    assert set(calls_the_model(feeds_for(resolve(text).tiny()))) == expected  # other feeds call parts of it


class Listener(nn.Module):
    """Takes an encoder's states, whether or not it says that it is a decoder; `hears` says what it does with them."""

    def __init__(self, hears: bool) -> None:
        super().__init__()
        self.config = PretrainedConfig(hidden_size=16, vocab_size=97)
        self.token, self.ear, self.head = nn.Embedding(97, 16), nn.Linear(16, 16), nn.Linear(16, 97)
        self.hears = hears

    def forward(self, input_ids: torch.Tensor, encoder_hidden_states: torch.Tensor | None = None) -> torch.Tensor:
        x = self.token(input_ids)
        if self.hears and encoder_hidden_states is not None:
            x = x + self.ear(encoder_hidden_states).mean(1, keepdim=True)
        return self.head(x)


@pytest.mark.parametrize(("hears", "expected"), [(True, ["text", "cross"]), (False, ["text"])])
def test_states_are_given_to_who_uses_them(hears: bool, expected: list[str]) -> None:
    model = Listener(hears)
    assert list(make_inputs(model, config=model.config).feeds) == expected


def test_what_a_call_reads_is_known() -> None:
    model = Listener(True)
    ids, states = torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 4, 16)
    assert tried(model, {"input_ids": ids}).used == {"token.weight", "head.weight", "head.bias"}
    assert tried(model, {"input_ids": ids, "encoder_hidden_states": states}).used >= {"ear.weight", "ear.bias"}
    assert isinstance(tried(model, {"input_ids": torch.zeros(2, 3)}).failure, RuntimeError)


def test_what_no_entry_reaches_is_noted() -> None:
    made = make_inputs(resolve("qwen2_vl:Qwen2VLForConditionalGeneration").tiny())
    assert any("pixel_values_videos" in note for note in made.notes)


def test_a_missing_config_is_found_on_the_model() -> None:
    assert make_inputs(resolve("llama").tiny()).notes == ()


# --------------------------------------------------------------------------------------------- sizes in rule files


def test_sizes_of_inputs_are_sums_of_products() -> None:
    known = {"batch": 2, "length": 5, "config": LlamaConfig()}
    assert evaluate("2*batch*length+1", known) == 21
    assert evaluate("config.num_attention_heads", known) == 32
    assert evaluate(7, known) == 7
    with pytest.raises(SourceError, match="config.no_such_field"):
        evaluate("config.no_such_field", known)


@pytest.mark.parametrize(
    ("rule", "shape", "dtype"),
    [
        ({"kind": "ids", "shape": ["batch", 3], "high": 4}, (2, 3), torch.int64),
        ({"kind": "uniform", "shape": [4]}, (4,), torch.float32),
        ({"kind": "ones", "shape": [4], "dtype": "bool"}, (4,), torch.bool),
        ({"kind": "rows", "shape": ["batch"], "row": [1, 4, 4]}, (2, 3), torch.int64),
    ],
)
def test_described_inputs(rule: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    made = Draw(0, torch.float32).described(rule, {"batch": 2})
    assert (tuple(made.shape), made.dtype) == (shape, dtype)
    with pytest.raises(SourceError, match="unknown kind"):
        Draw(0, torch.float32).described({"kind": "guess", "shape": [1]}, {})


@pytest.mark.parametrize("row", [[0, 1, [0, 1]], [[0, 1], 1], [[1], [1, 2]], [2**70]])
def test_a_row_that_is_no_row_of_numbers_is_one_error(row: list[Any]) -> None:
    with pytest.raises(SourceError, match="rules/inputs: row is"):
        Draw(0, torch.float32).described({"kind": "rows", "shape": [2], "row": row}, {})
