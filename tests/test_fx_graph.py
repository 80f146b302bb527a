"""The recording as an FX graph."""

from __future__ import annotations

import torch

from autoplan.capture.capture import capture_fake
from autoplan.capture.fx_graph import fx_graph
from autoplan.capture.inputs import make_inputs
from autoplan.capture.source import resolve


def test_every_op_is_a_node_with_its_module():
    model = resolve("gpt2").tiny()
    trace = capture_fake(model, make_inputs(model, config=model.config).entries).trace
    graph = fx_graph(trace)
    called = [n for n in graph.nodes if n.op == "call_function" and "getitem" not in n.name]
    assert len(called) == len(trace.ops)
    product = next(n for n in called if n.target is torch.ops.aten.addmm.default)
    assert product.meta["module"] == "transformer.h.0.attn.c_attn"
    assert product.meta["shape"] == (20, 384)
    assert {n.target for n in graph.nodes if n.op == "get_attr"} >= {"transformer.h.0.attn.c_attn.weight"}
    assert "aten" in str(graph)
