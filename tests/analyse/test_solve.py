"""Choosing, placing, editing: what the solver makes of small models, and the counts it must not exceed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoplan
from autoplan.analyse.infer import infer_axes
from autoplan.analyse.solve import solve
from autoplan.analyse.splits.model_ends import vocabularies
from autoplan.axes.terms import find
from autoplan.capture.capture import capture_fake, capture_real
from autoplan.hf.inputs.make import make_inputs
from autoplan.hf.source import resolve
from autoplan.values import Boundary, Instruction, IntegerEdit


def solution_of(model_type: str, tp: int = 2):
    source = resolve(model_type)
    clone = source.tiny(experts="batched_mm")
    feeds = make_inputs(clone, config=clone.config, model_type=source.model_type).feeds
    return solve(capture_real(clone, feeds).trace, tp)


def name_of(instruction: Instruction) -> str:
    return type(instruction).__name__


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("mistral", "4!*32"),  # grouped query heads
        ("gpt_neox", "8!*48"),  # per head: query, key, value
        ("phi3", "8!*16|8!*16|8!*16"),  # packed query, key, value
        ("falcon", "(8!|1|1)*16"),  # query heads, then one shared key and value
    ],
)
def test_packings_are_read_off(model_type, layout):
    layouts = {fact.layout for fact in solution_of(model_type).parameters if fact.layout}
    assert layout in layouts, layouts


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "gemma2", "gpt2"])
def test_two_reductions_a_block_each_way(model_type):
    """Megatron's count: one sum at each region's exit, one at its entry."""
    inside = [one for one in solution_of(model_type).runtime.of(Boundary) if ".0." in one.pattern]
    assert sorted(map(name_of, inside)) == ["AllReduce", "AllReduce", "AllReduceGradient", "AllReduceGradient"]


def test_one_reduction_where_regions_lie_side_by_side():
    """Attention and feed-forward have a norm each, and are added to the stream together."""
    inside = [one for one in solution_of("gpt_neox").runtime.of(Boundary) if ".0." in one.pattern]
    sums = ["AllReduce", "AllReduceGradient", "AllReduceGradient"]
    assert sorted(map(name_of, inside)) == [*sums, "JoinPartial", "WithholdPartial"]


def test_integers_are_edited_where_they_come_from():
    edits = {(e.attribute, e.old, e.new) for e in solution_of("gpt2").runtime.of(IntegerEdit)}
    assert ("split_size", 128, 64) in edits
    assert all(edit.old > edit.new for edit in solution_of("opt").runtime.of(IntegerEdit))


class Looks(nn.Module):
    """Rows of two tables: of token ids, and of positions that are rounded to numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(32, 8), nn.Embedding(32, 8)

    def forward(self, ids: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return self.words(ids[:, 1:].transpose(0, 1)) + self.places(where.long().transpose(0, 1))


def test_a_table_is_a_vocabulary_if_ids_are_given_as_such():
    ids, where = torch.randint(32, (2, 5)), torch.rand(2, 4) * 31
    trace = capture_real(Looks(), {"forward": {"ids": ids, "where": where}}).trace
    axes = infer_axes(trace)
    assert vocabularies(trace, axes) == {find(axes.of(trace.by_name["words.weight"])[0])}


def test_fewer_key_heads_than_ranks_are_shared():
    solution = solution_of("mistral", tp=8)  # 8 query heads in 4 groups
    facts = {fact.names[0].rsplit(".", 2)[-2]: fact for fact in solution.parameters}
    assert facts["q_proj"].layout == "4!4@2*2!2@1*16"
    assert (facts["k_proj"].layout, facts["k_proj"].gradient) == ("4!4@2*16", "shared")
    assert 8 in solution.legal_tp


def test_nothing_of_the_model_is_touched():
    model = resolve("gpt2").tiny()
    before = {name: (id(p), p.clone()) for name, p in model.named_parameters()}
    config, state = model.config.to_dict(), torch.get_rng_state()
    autoplan.plan(model, 2)
    assert all(id(p) == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    assert model.config.to_dict() == config
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_folding_changes_nothing():
    """A stack of seven blocks is planned through three of them, and the plan is that of all seven."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=160, num_hidden_layers=7)).eval()
    feeds = make_inputs(model, config=model.config).feeds
    folded = capture_fake(model, feeds)
    assert folded.trace.folds
    whole = solve(capture_fake(model, feeds, folded=False).trace, 2)
    through = solve(folded.trace, 2)
    layouts = {fact.names[0]: fact.layout for fact in whole.parameters}
    assert all(layouts[fact.names[0]] == fact.layout for fact in through.parameters)


class Tapped(nn.Module):
    """The last block's output feeds a head: a sum that is needed there is needed by no other block."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(160, 64)
        self.blocks = nn.ModuleList(Feedforward() for _ in range(depth))
        self.head = nn.Linear(64, 160, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("depth", [2, 3, 5])
def test_the_last_block_is_not_like_the_others(depth):
    report = autoplan.verify(Tapped(depth).double(), checks=("forward",))
    assert report.ok, report


class HandsOn(nn.Module):
    """Returns its input together with what it made of it: a hook at its entry would act on later readers too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.down(torch.relu(self.up(x)))


class WithHandedOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(160, 64), HandsOn(), HandsOn()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        same, made = self.first(self.embed(ids))
        _, more = self.second(same)
        return same + made + more


def test_what_a_module_hands_on_is_left_alone():
    report = autoplan.verify(WithHandedOn().double(), checks=("forward",))
    assert report.ok, report
