"""Stacks are found from structure alone, whatever holds them and whatever anything is called."""

from __future__ import annotations

import pytest
import torch
import transformers
from layer_law import examined
from renamer import renamed_copy
from torch import nn

from autoplan.hf.stacks import layers, stacks_of
from autoplan.hf.type_rules import architectures
from autoplan.values import Fold, ModuleVisit, Stack, Trace
from autoplan.values.module_tree import ModuleNode, ModuleTree, ParameterShape

WIDTH = 8


class Mlp(nn.Module):
    def __init__(self, width: int = WIDTH, out: int | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, out or width)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))


class Block(nn.Module):
    def __init__(self, cross: bool = False) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), Mlp()
        if cross:
            self.cross = Attention()


class MambaLike(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(WIDTH), Mlp()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH)


class Mixture(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count)
        self.experts = nn.ModuleList(Mlp() for _ in range(count))


class MixtureBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mixture = nn.LayerNorm(WIDTH), Attention(), Mixture()


class Holder(nn.Module):
    """Any modules as attributes, and a forward, so that it is no mere list."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Stage(Holder):
    pass


def blocks(count: int, make=Block) -> list[nn.Module]:
    return [make() for _ in range(count)]


def shared(count: int) -> nn.ModuleList:
    return nn.ModuleList([Block()] * count)


CONTAINERS = {
    "module list": (lambda: nn.ModuleList(blocks(3)), "s.0 s.1 s.2"),
    "sequential": (lambda: nn.Sequential(*blocks(3)), "s.0 s.1 s.2"),
    "dictionary with any keys": (lambda: nn.ModuleDict({"x": Block(), "zz": Block()}), "s.x s.zz"),
    "pipeline part with holes": (lambda: nn.ModuleDict({"3": Block(), "7": Block(), "9": Block()}), "s.3 s.7 s.9"),
    "lists in a list": (
        lambda: nn.ModuleList([nn.ModuleList(blocks(2)), nn.ModuleList(blocks(1))]),
        "s.0.0 s.0.1 s.1.0",
    ),
    "lists in a dictionary": (
        lambda: nn.ModuleDict({"a": nn.ModuleList(blocks(2)), "b": nn.Sequential(*blocks(2))}),
        "s.a.0 s.a.1 s.b.0 s.b.1",
    ),
    "norm and table next to the blocks in one dictionary": (
        lambda: nn.ModuleDict({"t": nn.Embedding(50, WIDTH), "h": nn.ModuleList(blocks(2)), "n": nn.LayerNorm(WIDTH)}),
        "s.h.0 s.h.1",
    ),
    "stages": (
        lambda: nn.ModuleList(Stage(inner=nn.ModuleList(blocks(2)), norm=nn.LayerNorm(WIDTH)) for _ in range(2)),
        "s.0.inner.0 s.0.inner.1 s.1.inner.0 s.1.inner.1",
    ),
    "hybrid of two classes": (lambda: nn.ModuleList([Block(), MambaLike(), MambaLike()]), "s.0 s.1 s.2"),
    "one of each": (lambda: nn.ModuleList([Block(), MambaLike()]), "s.0 s.1"),
    "experts in every second": (lambda: nn.ModuleList([Block(), MixtureBlock(), Block()]), "s.0 s.1 s.2"),
    "bare feed-forwards": (lambda: nn.ModuleList(blocks(3, Mlp)), "s.0 s.1 s.2"),
    "equal attributes": (lambda: Holder(first=Block(), second=Block(), head=nn.Linear(WIDTH, 3)), "s.first s.second"),
    "one block": (lambda: nn.ModuleList(blocks(1)), "s.0"),
    "one block listed often": (lambda: shared(3), "s.0"),
}


@pytest.mark.parametrize("case", CONTAINERS)
def test_containers_are_flattened(case):
    make, expected = CONTAINERS[case]
    stack = one(Holder(s=make()))
    assert " ".join(stack.fqns) == expected


def one(model: nn.Module) -> Stack:
    found = layers(model)
    assert len(found) == 1, found
    return found[0]


def test_mergers_side_by_side_are_units_if_something_reads_them():
    """They all read one width and write another, which a stack reads: no heads."""
    mergers = nn.ModuleList(Mlp(3 * WIDTH, WIDTH) for _ in range(3))
    model = Holder(mergers=mergers, text=nn.ModuleList(blocks(2)))
    assert [(stack.name, len(stack.fqns)) for stack in layers(model)] == [("mergers", 3), ("text", 2)]
    unread = Holder(heads=nn.ModuleList(Mlp(3 * WIDTH, 5) for _ in range(3)), text=nn.ModuleList(blocks(2)))
    assert [stack.name for stack in layers(unread)] == ["text"]


NO_STACK = {
    "experts": lambda: Mixture(),
    "experts and a router of raw weights": lambda: Holder(gate=nn.Linear(WIDTH, 6), experts=Mixture(6)),
    "norms": lambda: nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4)),
    "linear heads": lambda: nn.ModuleList(nn.Linear(WIDTH, 30) for _ in range(4)),
    "heads of two layers": lambda: nn.ModuleList(Mlp(WIDTH, 3) for _ in range(4)),
    "tables": lambda: nn.ModuleList(nn.Sequential(nn.Embedding(20, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(4)),
    "a small network": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("case", NO_STACK)
def test_what_repeats_without_being_layers(case):
    assert layers(Holder(part=NO_STACK[case]())) == ()


def test_two_stacks_of_one_length():
    model = Holder(a=Holder(list=nn.ModuleList(blocks(3))), b=Holder(list=nn.ModuleList(blocks(3))))
    assert [stack.name for stack in layers(model)] == ["a.list", "b.list"]
    siblings = Holder(a=nn.ModuleList(blocks(3)), b=nn.ModuleList(blocks(3, MambaLike)))
    assert [stack.name for stack in layers(siblings)] == ["a", "b"]
    in_a_dictionary = nn.ModuleDict({"a": nn.ModuleList(blocks(3)), "b": nn.ModuleList(blocks(3, MambaLike))})
    assert [len(stack.fqns) for stack in layers(Holder(d=in_a_dictionary))] == [3, 3]


def test_wrappers_and_aliases_count_once():
    inner = Holder(list=nn.ModuleList(blocks(3)))
    inner.also = inner.list
    inner.again = nn.ModuleList(list(inner.list))
    assert one(Holder(module=Holder(wrapped=inner))).fqns == tuple(f"module.wrapped.list.{i}" for i in range(3))


def test_notes_say_what_was_assumed():
    assert "one layer" in one(Holder(s=nn.ModuleList(blocks(1)))).note
    assert "3 calls of 1 modules" in one(Holder(s=shared(3))).note
    assert "attributes" in one(Holder(x=Holder(a=Block(), b=Block()))).note
    parts = nn.ModuleList(nn.ModuleList([Attention(), Mlp()]) for _ in range(2))
    assert one(Holder(s=parts)).fqns == ("s.0.0", "s.0.1", "s.1.0", "s.1.1")
    assert "no block class" in one(Holder(s=parts)).note
    common, sharing = Mlp(), blocks(2)
    for block in sharing:
        block.common = common
    assert "one module shared by 2 blocks" in one(Holder(s=nn.ModuleList(sharing))).note


def test_parallel_lists_are_taken_alternately():
    lists = {
        "one": nn.ModuleList(blocks(2, Attention)),
        "norms": nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2)),
        "two": nn.ModuleList(blocks(2, Mlp)),
    }
    stack = one(Holder(m=Holder(**lists)))
    assert stack.fqns == ("m.one.0", "m.two.0", "m.one.1", "m.two.1")
    assert "no block class: 2 parallel lists" in stack.note


KINDS = {
    "ids": (lambda: Holder(t=nn.Embedding(50, WIDTH), s=nn.ModuleList(blocks(2))), ["encoder"]),
    "image": (
        lambda: Holder(c=nn.Conv2d(3, WIDTH, 4), p=nn.Embedding(9, WIDTH), s=nn.ModuleList(blocks(2))),
        ["vision"],
    ),
    "spectrogram": (lambda: Holder(c=nn.Conv2d(1, WIDTH, 4), s=nn.ModuleList(blocks(2))), ["audio"]),
    "signal": (lambda: Holder(c=nn.Conv1d(20, WIDTH, 4), s=nn.ModuleList(blocks(2))), ["audio"]),
    "numbers": (lambda: Holder(c=nn.Linear(20, WIDTH), s=nn.ModuleList(blocks(2))), ["other"]),
    "cross-attention": (
        lambda: Holder(
            t=nn.Embedding(50, WIDTH),
            e=Holder(s=nn.ModuleList(blocks(2))),
            d=Holder(s=nn.ModuleList(Block(cross=True) for _ in range(2))),
        ),
        ["encoder", "decoder"],
    ),
    "image and text": (
        lambda: Holder(
            v=Holder(c=nn.Conv2d(3, WIDTH, 4), s=nn.ModuleList(blocks(2))),
            t=Holder(t=nn.Embedding(50, WIDTH), s=nn.ModuleList(blocks(2, MambaLike))),
        ),
        ["vision", "encoder"],
    ),
}


@pytest.mark.parametrize("case", KINDS)
def test_kinds_follow_what_feeds_a_stack(case):
    make, expected = KINDS[case]
    assert [stack.kind for stack in layers(make())] == expected


class Causal(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tril(torch.ones(4, 4))


def test_a_triangular_mask_makes_a_decoder_and_its_absence_is_said():
    parts = {"t": nn.Embedding(50, WIDTH), "s": nn.ModuleList(blocks(2))}
    assert (one(Causal(**parts)).kind, one(Causal(**parts)).note) == ("decoder", "")
    assert "no evidence that it is causal" in one(Holder(**parts)).note


# ----------------------------------------------------------------------------------------------- models as published

PUBLISHED = {
    "LlamaForCausalLM": ("llama", {}, [("model.layers", "decoder", 32)]),
    "GPT2LMHeadModel": ("gpt2", {}, [("transformer.h", "decoder", 12)]),
    "BartForConditionalGeneration": (
        "bart",
        {},
        [("model.encoder.layers", "encoder", 12), ("model.decoder.layers", "decoder", 12)],
    ),
    "BartModel": ("bart", {}, [("encoder.layers", "encoder", 12), ("decoder.layers", "decoder", 12)]),
    "T5ForConditionalGeneration": ("t5", {}, [("encoder.block", "encoder", 6), ("decoder.block", "decoder", 6)]),
    "BertForMaskedLM": ("bert", {}, [("bert.encoder.layer", "encoder", 12)]),
    "WhisperForConditionalGeneration": (
        "whisper",
        {},
        [("model.encoder.layers", "audio", 4), ("model.decoder.layers", "decoder", 4)],
    ),
    "XLMWithLMHeadModel": ("xlm", {}, [("transformer.attentions+ffns", "decoder", 24)]),
    "AlbertForMaskedLM": ("albert", {}, [("albert.encoder.albert_layer_groups", "encoder", 1)]),
    "Zamba2ForCausalLM": ("zamba2", {}, [("model.layers", "decoder", 54)]),
    "FunnelForMaskedLM": (
        "funnel",
        {},
        [("funnel.encoder.blocks", "encoder", 12), ("funnel.decoder.layers", "encoder", 2)],
    ),
    "MixtralForCausalLM": ("mixtral", {}, [("model.layers", "decoder", 32)]),
    "SwinModel": ("swin", {}, [("encoder.layers", "vision", 12)]),
    "LlavaForConditionalGeneration": (
        "llava",
        {},
        [("model.vision_tower.encoder.layers", "vision", 24), ("model.language_model.layers", "decoder", 32)],
    ),
}  # fmt: skip
RENAMED = ("LlamaForCausalLM", "GPT2LMHeadModel", "BartForConditionalGeneration", "T5ForConditionalGeneration",
           "BertForMaskedLM", "WhisperForConditionalGeneration", "XLMWithLMHeadModel", "Zamba2ForCausalLM")  # fmt: skip


def build(model_class: type[nn.Module], model_type: str, **settings: object) -> nn.Module:
    config = transformers.AutoConfig.for_model(model_type, **settings)
    with torch.device("meta"):
        return model_class(config)


@pytest.mark.parametrize("class_name", PUBLISHED)
def test_published_models(class_name):
    model_type, settings, expected = PUBLISHED[class_name]
    found = layers(build(getattr(transformers, class_name), model_type, **settings))
    assert [(stack.name, stack.kind, len(stack.fqns)) for stack in found] == expected


@pytest.mark.parametrize("class_name", RENAMED)
def test_names_do_not_matter(class_name):
    model_type, settings, _ = PUBLISHED[class_name]
    original = getattr(transformers, class_name)
    module, names = renamed_copy(original.__module__)

    def renamed(fqn: str) -> str:
        return ".".join("+".join(names.get(key, key) for key in part.split("+")) for part in fqn.split("."))

    expected = [
        Stack(renamed(stack.name), stack.kind, tuple(map(renamed, stack.fqns)), stack.note)
        for stack in layers(build(original, model_type, **settings))
    ]
    found = layers(build(getattr(module, names[class_name]), model_type, **settings))
    assert not any(word in stack.fqns[0] for stack in found for word in ("layer", "block", "h.0"))
    assert [stack.fqns for stack in found] == [stack.fqns for stack in expected]
    assert [(stack.name, stack.kind) for stack in found] == [(stack.name, stack.kind) for stack in expected]


# ------------------------------------------------------------------------------------------------------ with a trace


def traced(*modules: str, folds: tuple[Fold, ...] = ()) -> Trace:
    visits = tuple(ModuleVisit(name, modules[:place].count(name), (), (), (0, 0)) for place, name in enumerate(modules))
    return Trace((), (), (), visits, {}, folds=folds)


def test_a_trace_orders_and_counts():
    model = Holder(s=nn.ModuleList(blocks(3)))
    assert layers(model, traced("s", "s.2", "s.0", "s.1"))[0].fqns == ("s.2", "s.0", "s.1")
    assert layers(model, traced("s.2", "s.0"))[0].fqns == ("s.0", "s.1", "s.2")
    assert "6 calls of 3 modules" in layers(model, traced(*["s.0", "s.1", "s.2"] * 2))[0].note
    fold = Fold("s", (("2", "1"),))
    assert layers(model, traced("s.0", "s.1", folds=(fold,)))[0].note == layers(model)[0].note


def test_analysis_needs_only_plain_data():
    weight = (ParameterShape("w", (4, 4), 64, 0),)
    leaf = {"container": False, "children": ()}
    nodes = [ModuleNode(("",), 0, "Model", False, (), (("list", 1),))]
    nodes.append(ModuleNode(("list",), 1, "List", True, (), (("0", 2), ("1", 3))))
    for place in range(2):
        first = 4 + 2 * place
        children = (("a", first), ("b", first + 1))
        nodes.append(ModuleNode((f"list.{place}",), 2, "Block", False, (), children))
    for place in range(2):
        for key in "ab":
            nodes.append(ModuleNode((f"list.{place}.{key}",), 3, "Part", parameters=weight, **leaf))
    assert [stack.fqns for stack in stacks_of(ModuleTree(tuple(nodes)))] == [("list.0", "list.1")]


@pytest.mark.slow
@pytest.mark.parametrize("mapping", ["causal_lm", "image_text", "seq2seq", "masked_lm", "speech"])
def test_the_law_of_discovery_holds_for_every_architecture(mapping):
    """Coverage, counts as in the config, and the same without names."""
    rows = [examined(model_type, class_name) for model_type, class_name in architectures(mapping)]
    assert [row for row in rows if not row.problem and not row.fine] == []
    assert sum(not row.problem for row in rows) >= 0.95 * len(rows)


def test_what_has_no_forward_is_no_block() -> None:
    class Low(nn.Module):
        """Equal lists of matrices, and equal holders of them."""

        def __init__(self) -> None:
            super().__init__()
            self.u, self.v = (nn.ParameterList(nn.Parameter(torch.randn(8, 16)) for _ in range(2)) for _ in range(2))
            self.one, self.two = (nn.Module() for _ in range(2))
            for holder in (self.one, self.two):
                holder.up, holder.down = nn.Parameter(torch.randn(8, 16)), nn.Parameter(torch.randn(16, 8))

    assert layers(Low()) == ()
