"""The least that a split needs: known figures, never more than a plan moves, and the same by every algorithm."""

from __future__ import annotations

import functools

import networkx as nx
import pytest
import torch
from networkx.algorithms.flow import boykov_kolmogorov, dinitz
from slow_cases import marked
from torch import nn

import autoplan
from autoplan.analyse.placement import minimum_cut
from autoplan.hf.source import resolve
from autoplan.values import AllReduceGradient


def _blocks(model_type):
    return autoplan.plan(resolve(model_type).tiny(), 2, prove="none").communication


def _bytes(kinds):
    return sum(size for _, size in kinds.values())


@pytest.mark.parametrize("model_type", marked(["mixtral", "gpt_oss", "qwen2_moe"], slow=["gpt_oss"]))
def test_a_router_costs_no_sum(model_type):
    """The gradient of routing weights can stay a part up to where the router reads, and be summed with all others."""
    for block in _blocks(model_type):
        assert block.least_forward == block.least_backward and block.least_forward[0] == 2, block
        assert _bytes(block.backward) > block.least_backward[1], "what the plan could save is told"


@pytest.mark.parametrize(("model_type", "least"), [("gpt_neox", (1, 1)), ("falcon_h1", (2, 2)), ("rwkv", (3, 2))])
def test_least_of_branches(model_type, least):
    """Branches with a norm each; branches that are scaled; values that are mixed before three products read them."""
    for block in _blocks(model_type):
        assert (block.least_forward[0], block.least_backward[0]) == least, block


FAMILIES = ["llama", "falcon", "olmo2", "mamba2", "jamba", "bart", "t5", "deepseek_v2", "gpt_bigcode", "cohere2_moe"]


@pytest.mark.parametrize("model_type", marked(FAMILIES, slow=FAMILIES[6:]))
def test_no_plan_moves_less(model_type):
    for block in _blocks(model_type):
        moved = _bytes(block.forward) + _bytes(block.backward)
        assert moved >= block.least_forward[1] + block.least_backward[1] > 0, block


@pytest.mark.parametrize("algorithm", [boykov_kolmogorov, dinitz])
def test_every_algorithm_finds_the_same_sums(algorithm, monkeypatch):
    """Of all cheapest answers those with the fewest "yes" are taken: there is one such set."""
    found = []
    least_sums = minimum_cut.least_sums

    def noted(*args):
        found.append(least_sums(*args))
        with monkeypatch.context() as patch:
            patch.setattr(nx, "minimum_cut", functools.partial(nx.minimum_cut, flow_func=algorithm))
            found.append(least_sums(*args))
        return found[0]

    monkeypatch.setattr("autoplan.analyse.moved.least_sums", noted)
    _blocks("qwen2_moe")
    assert found[0] == found[1] and len(found[0]) > 4


@pytest.mark.parametrize("algorithm", [boykov_kolmogorov, dinitz])
def test_every_algorithm_places_the_same_sums(algorithm, monkeypatch):
    model = resolve("qwen2_moe").tiny()
    usual = autoplan.plan(model, 2, prove="none").to_dict()
    monkeypatch.setattr(nx, "minimum_cut", functools.partial(nx.minimum_cut, flow_func=algorithm))
    assert autoplan.plan(model, 2, prove="none").to_dict() == usual


class Block(nn.Module):
    """Two norms read the stream, so a gradient that stayed partial all the way up would need one sum less."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(16), nn.LayerNorm(16)
        self.gate, self.up, self.down = nn.Linear(16, 48), nn.Linear(16, 48), nn.Linear(48, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.gate(self.norm(x))) * self.up(self.other_norm(x)))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 16), nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def test_what_blocks_return_has_a_whole_gradient():
    """Callers collect it with hooks, and compute losses from it."""
    plan = autoplan.plan(Stack(), 2, inputs={"ids": torch.arange(14).view(2, 7)}, prove="none")
    sums = {one.pattern for one in plan.runtime.instructions if isinstance(one, AllReduceGradient)}
    assert sums == {"layers.*.norm", "layers.*.other_norm"}, sums


class Scaled(nn.Module):
    """Two row-wise products, the first times a scale for each token or each number, before they are added."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.up, self.down, self.other = nn.Linear(16, 48), nn.Linear(48, 16, bias=False), nn.Linear(48, 16, bias=False)
        self.scale = nn.Linear(16, numbers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.up(x))
        return x + self.down(h) * torch.tanh(self.scale(x)) + self.other(h)


class Model(nn.Module):
    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 16), nn.ModuleList(Scaled(numbers) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(("numbers", "least"), [(1, (1, 1)), (16, (3, 1))])
def test_what_multiplies_a_part_is_counted(numbers, least):
    """A scale gets a part of its gradient if the sum waits for the other branch. A thin layer hands that up to what it
    reads. Where the scale is as wide as the stream its product is gathered, which wants a whole gradient: to sum that
    costs what the other sum would save."""
    plan = autoplan.plan(Model(numbers), 2, inputs={"ids": torch.arange(14).view(2, 7)}, prove="none")
    for block in plan.communication:
        assert (block.least_forward[0], block.least_backward[0]) == least, block


class Narrowed(nn.Module):
    """Queries and keys are one value, which a part of the block made with a sum inside."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                layer(given).unflatten(-1, (4, 4)).transpose(1, 2)
                for layer, given in ((self.q, query), (self.k, key), (self.v, value))
            )
            mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
            return self.o(mixed)

    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.norm = nn.Linear(16, 32), nn.Linear(32, 16), nn.LayerNorm(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.down(torch.relu(self.up(x))))

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.attention, self.norm = self.Narrow(), self.Attention(), nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = self.narrow(x)
        return self.norm(x + self.attention(both, both, x))


def test_what_a_part_of_a_block_returns_is_summed_there():
    """Callers collect what blocks return, not what their parts do: one sum does for both names."""
    model = Model(1)
    model.layers = nn.ModuleList(Narrowed() for _ in range(2))
    plan = autoplan.plan(model, 2, inputs={"ids": torch.arange(14).view(2, 7)}, prove="none")
    summed = {(one.pattern, one.path) for one in plan.runtime.of(AllReduceGradient)}
    assert ("layers.*.narrow.norm", ()) in summed
    assert summed.isdisjoint({("layers.*.attention", ("query",)), ("layers.*.attention", ("key",))})
    assert autoplan.verify(model, plan, inputs={"ids": torch.arange(14).view(2, 7)}, checks=["forward"]).ok


class FewerKeys(nn.Module):
    """Attention of one head, whose width is cut, over keys at every second place (as in CvT)."""

    def __init__(self) -> None:
        super().__init__()
        fewer = nn.Conv2d(32, 32, 3, padding=1, stride=2, groups=32, bias=False)
        self.norm = nn.Sequential(fewer, nn.BatchNorm2d(32))
        self.q, self.kv = nn.Conv2d(32, 64, 1, bias=False), nn.Conv2d(32, 128, 1, bias=False)
        self.out = nn.Conv2d(64, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.q(x), *self.kv(self.norm(x)).chunk(2, dim=1))
        q, k, v = (part.flatten(2).transpose(1, 2) for part in parts)
        mixed = torch.softmax(q @ k.transpose(1, 2), -1) @ v
        return x + self.out(mixed.transpose(1, 2).unflatten(2, x.shape[2:]))


def test_a_sum_to_which_no_call_adds_a_part_has_its_readers() -> None:
    """The cut may sum a gradient where it is cheapest, although it is whole there: its traffic raised ValueError."""
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), FewerKeys(), FewerKeys()).eval()
    plan = autoplan.plan(model, 2, inputs={"input": torch.randn(2, 3, 8, 8)}, prove="none")
    assert [entry.style for entry in plan.entries if entry.pattern.endswith("out")] == ["rowwise"]
    assert all(block.ratio is None or block.ratio >= 1 for block in plan.communication)
