"""Graphs in and out: the recording as an FX graph, and graph modules and exported programs as models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoplan
from autoplan.common.patterns import matches
from autoplan.hf.source import resolve
from autoplan.planning import capture_source


def test_every_op_is_a_node_with_its_module():
    model = resolve("gpt2").tiny()
    trace = capture_source(resolve(model), model).trace
    graph = autoplan.fx_graph(model)
    called = [n for n in graph.nodes if n.op == "call_function" and "getitem" not in n.name]
    assert len(called) == len(trace.ops)
    product = next(n for n in called if n.target is torch.ops.aten.addmm.default)
    assert product.meta["module"] == "transformer.h.0.attn.c_attn"
    assert product.meta["shape"] == (20, 384)
    assert {n.target for n in graph.nodes if n.op == "get_attr"} >= {"transformer.h.0.attn.c_attn.weight"}
    assert "aten" in str(graph)


# ------------------------------------------------------------------------------------------- graphs that are models


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.packed, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 80), nn.Linear(80, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.size(0), x.size(1), x.size(2)
        packed = self.packed(self.norm(x)).split(32, -1)
        query, key, value = (packed[i].view(batch, length, 4, 8).transpose(1, 2) for i in range(3))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(128, 32, padding_idx=70), nn.Linear(32, 128, bias=False)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.table(ids)))


IDS = torch.arange(18).view(2, 9) * 7 % 128
MATRICES = {name for name, p in Decoder().named_parameters() if p.dim() > 1}


def graph_of(kind: str) -> Any:
    torch.manual_seed(0)
    model = Decoder()
    if kind == "symbolic trace":
        return torch.fx.symbolic_trace(model)
    program = torch.export.export(model, (IDS,))
    return program if kind == "program" else program.module()


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")  # torch copies its own graphs so
@pytest.mark.parametrize("kind", ["symbolic trace", "program", "its module"])
def test_planned_and_exact(kind: str) -> None:
    graph = graph_of(kind)
    inputs = None if kind == "program" else {"ids": IDS}  # a program brings its own
    plan = autoplan.plan(graph, 2, inputs=inputs)
    assert plan.proof.ok and not plan.findings, plan.findings
    cut = [rule.pattern for rule in plan.runtime.parameters if rule.dim is not None]
    assert all(any(matches(pattern, name) for pattern in cut) for name in MATRICES), plan
    packed = next(feed for feed in plan.entries if feed.pattern.endswith("packed"))
    assert packed.role == "fused query, key, value", packed
    report = autoplan.verify(graph, plan, 2, inputs=inputs, checks=["parameters", "forward", "state_dict"])
    assert report.ok and max(report.gradients.values()) < 1e-10, report.findings
