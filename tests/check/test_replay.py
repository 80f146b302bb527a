"""The permutation law and graph replay: right splits pass, any misplaced row or forgotten sum is named."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from small_models import give_random_values
from torch import nn
from torch.nn import functional as F

from autoplan.analyse.infer import Shards, infer_axes
from autoplan.axes.terms import concatenation, factors, find, leaf, leaves, product, segments
from autoplan.capture.recorder import record
from autoplan.check.permute import check_permutations, permuted_indices
from autoplan.check.replay import replay
from autoplan.common.layout import Layout


class Block(nn.Module):
    """Grouped-query attention with a packed q, k, v, full-width key norm, gated MLP: what has to be cut with care."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.qkv = nn.Linear(24, 4 * 6 + 2 * 6 + 2 * 6)
        self.query_norm, self.key_norm = nn.LayerNorm(24), nn.LayerNorm(12)
        self.out = nn.Linear(24, 24)
        self.gate_up = nn.Linear(24, 20, bias=False)
        self.down = nn.Linear(10, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).split([24, 12, 12], -1)
        q, k, v = (t.view(batch, length, -1, 6).transpose(1, 2) for t in (self.query_norm(q), self.key_norm(k), v))
        k, v = (t[:, :, None].expand(batch, 2, 2, length, 6).reshape(batch, 4, length, 6) for t in (k, v))
        mixed = torch.softmax(q @ k.transpose(2, 3), -1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, 24))
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 24)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(24, 30, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass
class Study:
    """A model, what it did, and what is split."""

    model: nn.Module
    feeds: dict
    trace: object
    recording: object
    axes: object
    marks: dict

    def shards(self, more: dict | None = None, tp: int = 2) -> Shards:
        return Shards(self.trace, self.axes, {**self.marks, **(more or {})}, tp)

    def axis(self, name: str, dim: int):
        """The split axis in a parameter's dim."""
        inside = {find(part) for part in leaves(self.axes.of(self.trace.by_name[name])[dim])}
        (term,) = self.shards().split_leaves(self.trace.by_name[name]) & inside
        return term


@pytest.fixture
def study() -> Study:
    torch.manual_seed(0)
    model = give_random_values(Model()).double().eval()
    feeds = {"forward": {"ids": torch.randint(30, (2, 5))}}
    trace, recording = record(copy.deepcopy(model), feeds, keep_values=True)
    axes = infer_axes(trace)
    marks = {}
    for block in ("blocks.0", "blocks.1"):
        queries = segments(axes.of(trace.by_name[f"{block}.qkv.weight"])[0])[0]
        gate = segments(axes.of(trace.by_name[f"{block}.gate_up.weight"])[0])[0]
        marks |= {factors(queries)[0]: "!", gate: "!"}  # groups of heads, hidden features
    return Study(model, feeds, trace, recording, axes, marks)


# ------------------------------------------------------------------------------------------------ permutation law


def test_permuted_indices_follow_products_and_concatenations() -> None:
    heads, width = leaf(3), leaf(2)
    packed = concatenation([product([heads, width]), leaf(2), heads])
    order = [1, 2, 0]
    assert permuted_indices(packed, {heads: order}.get) == [2, 3, 4, 5, 0, 1, 6, 7, 9, 10, 8]
    assert permuted_indices(product([heads, width]), {width: [1, 0]}.get) == [1, 0, 3, 2, 5, 4]
    assert permuted_indices(packed, {leaf(3): order}.get) is None


def test_every_split_axis_obeys_the_law(study: Study) -> None:
    before = copy.deepcopy(study.model.state_dict())
    outcome = check_permutations(study.model, study.feeds, study.trace, study.axes, study.marks)
    assert len(outcome.passed) == len(study.marks) == 4 and not outcome.failed and not outcome.left_out
    assert all(torch.equal(tensor, before[name]) for name, tensor in study.model.state_dict().items())


@pytest.mark.parametrize("forgotten", ["blocks.0.qkv.weight", "blocks.0.qkv.bias", "blocks.0.out.weight"])
def test_a_parameter_left_out_breaks_the_law(study: Study, forgotten: str) -> None:
    """As if analysis had not seen that this parameter has the axis."""
    number = study.trace.by_name[forgotten]
    dims = {**study.axes.dims, number: tuple(leaf(term.size) for term in study.axes.of(number))}
    outcome = check_permutations(study.model, study.feeds, study.trace, replace(study.axes, dims=dims), study.marks)
    assert outcome.failed == {study.axis("blocks.0.out.weight", 1): pytest.approx(1, abs=1)}
    assert len(outcome.passed) == 3


def test_a_split_head_is_compared_with_its_output_permuted(study: Study) -> None:
    head = study.axes.of(study.trace.by_name["head.weight"])[0]
    outcome = check_permutations(study.model, study.feeds, study.trace, study.axes, [head])
    assert outcome.passed == [head]


def test_rows_looked_up_by_number_are_left_out(study: Study) -> None:
    rows = study.axes.of(study.trace.by_name["embedding.weight"])[0]
    outcome = check_permutations(study.model, study.feeds, study.trace, study.axes, [rows])
    assert outcome.left_out == {rows: "its rows are looked up by index"}


# ------------------------------------------------------------------------------------------------ replay


@pytest.mark.parametrize("tp", [1, 2])
def test_replay_is_exact_and_counts_reductions(study: Study, tp: int) -> None:
    played = replay(study.trace, study.recording, study.shards(tp=tp))
    assert played.ok and played.split_ops > 40
    names = ("query_norm", "key_norm", "out", "down")
    assert played.reductions == {f"blocks.{block}.{name}": 1 for block in (0, 1) for name in names}


def test_vocabulary_may_be_split_unevenly(study: Study) -> None:
    rows, head = (study.axes.of(study.trace.by_name[f"{name}.weight"])[0] for name in ("embedding", "head"))
    played = replay(study.trace, study.recording, Shards(study.trace, study.axes, {rows: "!", head: "!"}, 4))
    assert played.ok and played.reductions == {"embedding": 1}


class Tampered(Shards):
    """Shards in which one parameter's dim is cut as if it were `text`."""

    def __init__(self, study: Study, name: str, dim: int, text: str) -> None:
        super().__init__(study.trace, study.axes, study.marks, 2)
        self.where, self.dim, self.text = study.trace.by_name[name], dim, text

    def layouts(self, tensor: int):
        found = list(super().layouts(tensor))
        if tensor == self.where:
            found[self.dim] = Layout.parse(self.text)
        return tuple(found)


@pytest.mark.parametrize(
    ("name", "dim", "text"),
    [
        ("blocks.0.qkv.weight", 0, "48!"),  # packed, cut contiguously
        ("blocks.1.gate_up.weight", 0, "20!"),
        ("blocks.0.qkv.weight", 0, "4!*6|2!2@2*6|2!*6"),  # keys of the wrong head
        ("blocks.1.out.weight", 1, "12*2!"),
        ("blocks.0.key_norm.weight", 0, "6*2!"),
        ("blocks.1.down.weight", 1, "5*2!"),
    ],
)
def test_a_weight_laid_out_wrongly_is_noticed(study: Study, name: str, dim: int, text: str) -> None:
    played = replay(study.trace, study.recording, Tampered(study, name, dim, text))
    assert not played.ok
    assert played.findings[0].where.startswith(name.rpartition(".")[0].rpartition(".")[0])


def test_a_weight_cut_along_both_dims_is_noticed(study: Study) -> None:
    """Partial sums of different rows cannot be added over ranks."""
    features = study.axes.of(study.trace.by_name["embedding.weight"])[1]
    played = replay(study.trace, study.recording, study.shards({features: "!"}))
    assert "blocks.0.qkv" in {finding.where for finding in played.findings}


def test_a_split_across_softmax_is_noticed(study: Study) -> None:
    (positions,) = study.axes.of(study.trace.by_name["<input>.forward.ids"])[1:]
    played = replay(study.trace, study.recording, Shards(study.trace, study.axes, {positions: "!"}, 5))
    assert not played.ok
