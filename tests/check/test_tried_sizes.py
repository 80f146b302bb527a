"""A plan is tried as it will run: as many units on a rank, in training mode, every rank's part of a weight read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, LlamaConfig, MixtralConfig

import autoplan
from autoplan.check.verify.clone import Sizes, tried_sizes
from autoplan.check.verify.on_ranks import unread_parts
from autoplan.hf.shrink import tiny_config
from autoplan.hf.source import resolve
from autoplan.values import ParameterRule, Plan, Runtime

torch.set_num_threads(1)


class Attention(nn.Module):
    """Four heads; `odd` does something else where a rank holds one."""

    def __init__(self, odd: str = "", kv_heads: int = 4, width: int = 32) -> None:
        super().__init__()
        self.table, self.odd, self.groups = nn.Embedding(64, width), odd, 4 // kv_heads
        self.query, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, width // self.groups) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        query, key, value = (
            layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        key, value = (one.repeat_interleave(self.groups, 1) for one in (key, value))
        if self.odd == "branch" and query.shape[1] > 1:
            query = query * 1.3
        mixed = (query @ key.transpose(-1, -2)).softmax(-1) @ value
        if self.odd == "squeeze" and mixed.squeeze(1).dim() == 3:
            mixed = mixed * 0.5
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def splits(plan: autoplan.Plan, name: str) -> bool:
    return any(entry.pattern == name for entry in plan.entries)


@pytest.mark.parametrize(
    ("odd", "kv_heads"),
    [
        ("branch", 4),
        pytest.param("squeeze", 4, marks=pytest.mark.long),
        pytest.param("branch", 2, marks=pytest.mark.long),
        pytest.param("squeeze", 2, marks=pytest.mark.long),
    ],
)
def test_what_branches_on_one_head_is_found_where_a_rank_has_one(odd: str, kv_heads: int) -> None:
    model = Attention(odd, kv_heads)
    many, one = autoplan.plan(model, tp_size=2), autoplan.plan(model, tp_size=4)
    assert (many.proof.trial.ranks, one.proof.trial.ranks) == (2, 4)
    if odd == "branch" or kv_heads == 4:
        assert splits(many, "out") and not splits(one, "out")


def test_what_does_not_is_split_on_one_head_each() -> None:
    plan = autoplan.plan(Attention(), tp_size=4)
    assert splits(plan, "out") and "tried on 4 simulated ranks" in " ".join(str(plan).split())


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(6, 3, 3), (10, 5, 5)])
def test_a_clone_splits_over_any_number_of_ranks_what_the_model_splits(heads: int, kv_heads: int, ranks: int) -> None:
    """Four key heads are not divisible by three: attention was replicated in the clone, and nobody said so."""
    config = LlamaConfig(
        hidden_size=16 * heads,
        intermediate_size=30 * heads,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=320,
    )
    report = autoplan.verify(config, tp_size=ranks, checks=["parameters", "forward"])
    assert report.ok and report.details["communication"][0].forward["all_reduce"][0] == 2


def test_verify_takes_the_plans_own_size() -> None:
    ids = {"ids": torch.randint(0, 64, (2, 6))}
    plan = autoplan.plan(Attention("branch"), tp_size=4, prove="none", inputs=ids)
    assert autoplan.verify(Attention("branch"), plan, tp_size=2, inputs=ids).ok  # two heads on a rank
    report = autoplan.verify(Attention("branch"), plan, inputs=ids)
    assert not report.ok and report.tp_size == 4


LLAMA: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "vocab_size": 4096}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "tried", "left"),
    [
        (32, 8, 2, 2, (8, 4)),  # several of both: nothing special
        (32, 8, 8, 4, (8, 4)),  # one key head
        (32, 32, 32, 4, (4, 4)),  # one head of each
        (32, 8, 16, 4, (8, 2)),  # two ranks share a key head
        (32, 8, 32, 4, (4, 2)),
        (8, 2, 2, 4, (8, 4)),
        (32, 1, 8, 2, (8, 1)),
    ],
)
def test_a_clone_leaves_on_a_rank_what_the_plan_leaves(
    heads: int, kv_heads: int, tp: int, tried: int, left: tuple[int, int]
) -> None:
    config = LlamaConfig(num_attention_heads=heads, num_key_value_heads=kv_heads, **LLAMA)
    (source, sizes), *_ = tried_sizes(resolve(config), Sizes(tp))
    tiny = tiny_config(config, ranks=source.ranks)
    assert sizes.tp == tried and (tiny.num_attention_heads, tiny.num_key_value_heads) == left
    assert tiny.hidden_size == tiny.num_attention_heads * tiny.head_dim


def test_experts_are_one_on_a_rank_where_the_plan_leaves_one() -> None:
    config = MixtralConfig(num_attention_heads=32, num_key_value_heads=16, num_local_experts=8, **LLAMA)
    (source, sizes), *_ = tried_sizes(resolve(config), Sizes(8, 8))
    tiny = tiny_config(config, ranks=source.ranks)
    assert (sizes.tp, sizes.ep, tiny.num_local_experts) == (4, 4, 4)
    assert tiny.num_key_value_heads == 8 and tiny.num_attention_heads == 16  # of both several, as in the plan


def test_own_sizes_are_those_of_the_plan_up_to_a_bound() -> None:
    def own(model: Any, tp: int) -> list[int]:
        return [sizes.tp for _, sizes in tried_sizes(resolve(model), Sizes(tp), own=True)]

    config = GPT2Config(n_embd=96, n_head=12, n_layer=2)
    assert (own(config, 2), own(config, 4), own(config, 12), own(config, 64)) == ([2], [4, 2], [8, 2], [8, 2])
    assert (own(Attention(), 3), own(Attention(), 8), own(Attention(), 16)) == ([3, 2], [8, 2], [2])


class Norm(nn.Module):
    """Batch norm over a stream, or over head dims, where the heads of all ranks count."""

    def __init__(self, over: str) -> None:
        super().__init__()
        self.over, self.norm = over, nn.BatchNorm1d(8 if over == "heads" else 32)
        self.into, self.out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.over == "stream":
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        hidden = torch.tanh(self.into(x))
        if self.over == "heads":
            hidden = self.norm(hidden.reshape(-1, 8)).view(hidden.shape)
        return x + self.out(hidden)


class Norms(nn.Module):
    def __init__(self, over: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Norm(over) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("over", ["heads", "stream"])
@pytest.mark.parametrize("sequence", [False, True])
def test_statistics_of_batch_norm_are_those_of_all_ranks(over: str, sequence: bool) -> None:
    model, inputs = Norms(over), {"x": torch.randn(2, 8, 32)}
    plan = autoplan.plan(model, tp_size=2, sequence_parallel=sequence, inputs=inputs)
    assert plan.proof.ok and (over == "heads" or splits(plan, "blocks.*.into"))
    report = autoplan.verify(model, plan, inputs=inputs)
    assert report.ok and "training" in report.details["checked"]


class Counted(nn.Module):
    """Only in training, and where no code of its class says so, it takes a mean over what a rank holds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x))
        _note(self, hidden)
        return x + self.down(hidden)


def _note(module: Any, hidden: torch.Tensor) -> None:
    if module.training:
        module.seen += hidden.detach().numpy().mean()


def test_training_is_tried_and_buffers_are_compared() -> None:
    plan = autoplan.plan(Counted(), tp_size=2, inputs={"x": torch.randn(2, 8, 32)})
    assert not splits(plan, "down") or plan.proof.failed


class Halves(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.words, self.types, self.how = nn.Embedding(64, 32), nn.Embedding(2, 32), how

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.how == "zeros":
            kinds = torch.zeros_like(input_ids)
        elif self.how == "new":
            kinds = input_ids.new_zeros(input_ids.shape)
        else:
            kinds = (input_ids > 3).long() if self.how == "compared" else input_ids * 0
        return self.words(input_ids) + self.types(kinds)


@pytest.mark.parametrize("how", ["zeros", "new", "compared", "product"])
def test_every_rank_s_rows_are_read_or_the_plan_says_which_were_not(how: str) -> None:
    plan = autoplan.plan(Halves(how), tp_size=2)
    said = [finding for finding in plan.findings if "it was not used" in finding.message]
    below = 2 if how == "product" else 64
    assert f"ids below {below} " in plan.fed[0].given and [one.where for one in said] == ["words.weight"] * (below == 2)
    given = autoplan.plan(Halves(how), tp_size=2, inputs={"input_ids": torch.randint(0, 30, (2, 6))})
    assert "the part of rank 1 in the trial" in str([one.message for one in given.findings])


def test_unread_parts_are_those_that_no_run_reached() -> None:
    plan = Plan("m", 4, runtime=Runtime(parameters=(ParameterRule("w", 0, "8!"), ParameterRule("whole"))))
    one, other = torch.zeros(8, 3), torch.zeros(8, 3)
    one[1, 2] = other[7, 0] = 1.0
    found = [{"w": one, "whole": one}, {"w": other}]
    assert unread_parts(found, plan=plan) == {"w": (1, 2)} and unread_parts([{"w": one + 1}], plan=plan) == {}
