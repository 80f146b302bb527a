"""The picture of a run: what is contracted, what stays, and that spelling does not matter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from small_models import Decoder, PackedDecoder, ids
from torch import nn
from torch.nn import functional as F

from autoplan.analyse.picture.dataflow import dataflow
from autoplan.analyse.picture.flow import Flow, node_of
from autoplan.capture.recorder import record


def picture(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Flow:
    return dataflow(record(model, {"forward": inputs})[0])


def arrows(flow: Flow) -> list[str]:
    """Arrows as text: a box is its parameters' last module, or its kind."""

    def name(box: int) -> str:
        node = node_of(flow, box)
        return f"{node.kind}:{node.parameters[0].split('.')[-2]}" if node.parameters else node.kind

    return sorted(
        f"{name(a)} -> {name(b)}" + "".join(f".{port}" for port in sorted(flow.edges[a, b]["ports"]))
        for a, b in flow.edges
    )


BLOCK = """
input -> embedding:table.index
embedding:table -> norm:first
embedding:table -> add
norm:first -> linear:q
norm:first -> linear:k
norm:first -> linear:v
linear:q -> attend.q
linear:k -> attend.k
linear:v -> attend.v
attend -> linear:o
linear:o -> add
add -> norm:second
add -> add
norm:second -> linear:gate
norm:second -> linear:up
linear:gate -> mul.activated
linear:up -> mul
mul -> linear:down
linear:down -> add
add -> norm:last
norm:last -> linear:head
linear:head -> output
"""


def test_a_decoder_block() -> None:
    assert arrows(picture(Decoder(inner=(56,)), ids())) == sorted(BLOCK.strip().splitlines())


def test_splits_stay_visible() -> None:
    drawn = arrows(picture(PackedDecoder(), ids()))
    assert drawn.count("linear:qkv -> split") == 3
    assert drawn.count("linear:both -> split") == 2
    assert {"split -> attend.q", "split -> attend.k", "split -> attend.v", "split -> mul.activated"} <= set(drawn)


class Spelled(nn.Module):
    """x -> a linear -> something elementwise on its output -> a linear."""

    def __init__(self, middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.middle = middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.middle(self.up(x)))


def rotated(x: torch.Tensor) -> torch.Tensor:
    halves = torch.cat((-x[..., 4:], x[..., :4]), dim=-1)
    return x * torch.cos(torch.arange(8.0)) + halves * torch.sin(torch.arange(8.0))


def rotated_by_parts(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    turn = torch.arange(4.0)
    return torch.cat((first * turn.cos() - second * turn.sin(), second * turn.cos() + first * turn.sin()), dim=-1)


def written(x: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(x)
    result[..., :4] = x[..., :4]
    result[..., 4:] = x[..., 4:] * 2
    return result


@pytest.mark.parametrize(
    "middle",
    [
        F.gelu,
        lambda x: x * torch.sigmoid(x),
        lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x.pow(3)))),
        lambda x: F.relu(x).square(),
        lambda x: x.view(2, 5, 4, 2).transpose(1, 2).transpose(1, 2).reshape(2, 5, 8),
        lambda x: x.masked_fill(torch.arange(8) > 90, 0.0),
        lambda x: x.add_(1).mul_(3),
        rotated,
        rotated_by_parts,
    ],
    ids=["gelu", "silu", "tanh-gelu", "squared-relu", "views", "mask", "in-place", "rotary", "rotary-by-parts"],
)
def test_what_acts_on_one_value_is_passed_through(middle: Callable[[torch.Tensor], torch.Tensor]) -> None:
    drawn = arrows(picture(Spelled(middle), {"x": torch.rand(2, 5, 6)}))
    assert drawn == ["input -> linear:up", "linear:down -> output", "linear:up -> linear:down"]


def test_a_value_put_together_by_writes_is_seen() -> None:
    drawn = arrows(picture(Spelled(written), {"x": torch.rand(2, 5, 6)}))
    assert {"linear:up -> split", "split -> write", "write -> linear:down"} <= set(drawn)


class Norms(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight, self.bias = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "layer_norm":
            return F.layer_norm(x, (6,), self.weight, self.bias)
        if self.kind == "layer_norm by hand":
            x = x - x.mean(-1, keepdim=True)
            return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * self.weight + self.bias
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (1 + self.weight) * (x * root) if self.kind == "rms, one more" else (self.weight * x) * root


@pytest.mark.parametrize("kind", ["layer_norm", "layer_norm by hand", "rms, one more", "rms, weight first"])
def test_norms_are_one_box_however_they_are_written(kind: str) -> None:
    flow = picture(Norms(kind), {"x": torch.rand(2, 5, 6)})
    norms = [node_of(flow, box) for box in flow if node_of(flow, box).kind == "norm"]
    assert [norm.parameters[0] for norm in norms] == ["weight"]
    assert {node_of(flow, box).kind for box in flow} == {"input", "norm", "output"}


class Scan(nn.Module):
    """A recurrence over time, written as a loop: one box, with its decay."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.decay = nn.Parameter(torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys, values = self.keys(x), self.values(x)
        state, result = torch.zeros(x.shape[0], 8), torch.zeros_like(keys)
        for step in range(x.shape[1]):
            state = state * torch.exp(-self.decay) + keys[:, step] * values[:, step]
            result[:, step] = state
        return self.out(result)


def test_a_recurrence_is_one_box_with_its_parameters() -> None:
    flow = picture(Scan(), {"x": torch.rand(2, 5, 6)})
    scans = [box for box in flow if node_of(flow, box).kind == "scan"]
    assert [node_of(flow, box).parameters for box in scans] == [("decay",)]
    assert [node_of(flow, box).parameters[0] for box in flow.successors(scans[0])] == ["out.weight"]


def test_dims_are_named_by_what_they_do() -> None:
    """A weight stored the other way round (transformers' Conv1D) has its contracted dim first."""

    class Stored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(6, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, self.weight)

    stored = picture(Stored(), {"x": torch.rand(3, 6)})
    usual = picture(nn.Linear(6, 8), {"input": torch.rand(3, 6)})
    found = [next(node_of(f, b) for b in f if node_of(f, b).kind == "linear") for f in (stored, usual)]
    assert [[(name, dim.size, dim.dim) for name, dim in node.dims] for node in found] == [
        [("in", 6, 0), ("out", 8, 1)],
        [("in", 6, 1), ("out", 8, 0)],
    ]


def test_the_graph_has_no_circles_and_no_dead_boxes() -> None:
    import networkx as nx

    for model, inputs in ((Decoder(head_norm=True), ids()), (Scan(), {"x": torch.rand(2, 5, 6)})):
        flow = picture(model, inputs)
        assert nx.is_directed_acyclic_graph(flow)
        assert [node_of(flow, box).kind for box in flow if not flow.out_degree(box)] == ["output"]
