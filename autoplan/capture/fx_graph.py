"""Show a trace as a `torch.fx.Graph`: to print, to draw, to post-process with FX's own tools.

Every aten op is a node in the order in which it ran; parameters and buffers are `get_attr` nodes under their names,
inputs are placeholders. `node.meta` has what the trace knows: "module" (whose Python made the op), "shape", "dtype".
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from autoplan.values import Op, Ref, Symbolic, TensorInfo, Trace


def graph_of(trace: Trace) -> fx.Graph:
    """Return the ops of a trace as an FX graph. It shows one run: its sizes are the numbers of that run."""
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}
    for index, tensor in enumerate(trace.tensors):
        node = _source(graph, index, tensor)
        if node is not None:
            node.meta.update(shape=tensor.shape, dtype=tensor.dtype, names=tensor.names)
            nodes[index] = node
    for op in trace.ops:
        node = graph.call_function(_target(op), _plain(op.args, nodes), _plain(op.kwargs, nodes))
        node.meta.update(module=op.module)
        _bind_outputs(graph, op, node, trace, nodes)
    results = tuple(nodes[t] for visit in trace.visits if visit.parent is None for _, t in visit.outputs if t in nodes)
    graph.output(results)
    graph.lint()
    return graph


def _source(graph: fx.Graph, index: int, tensor: TensorInfo) -> fx.Node | None:
    if tensor.kind == "input":
        return graph.placeholder(f"input_{index}")
    if tensor.kind in ("parameter", "buffer") and tensor.names:
        return graph.get_attr(tensor.names[0])
    if tensor.kind == "constant":
        return graph.placeholder(f"constant_{index}")
    return None


def _target(op: Op) -> Any:
    packet = getattr(torch.ops.aten, op.name, None)
    overload = getattr(packet, op.overload, None) if packet is not None else None
    return overload if overload is not None else _unknown(op)


def _unknown(op: Op) -> Any:
    def stands_for(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{op.name}.{op.overload} is not an aten op: the graph can be read, but not run")

    stands_for.__name__ = stands_for.__qualname__ = f"{op.name}_{op.overload}".replace(".", "_").replace(":", "_")
    return stands_for


def _bind_outputs(graph: fx.Graph, op: Op, node: fx.Node, trace: Trace, nodes: dict[int, fx.Node]) -> None:
    """Bind the outputs of an op: several through `getitem`; an op that returns its input gives it a new node."""
    tensors = [(i, item.id) for i, item in enumerate(op.outputs) if isinstance(item, Ref)]
    for position, tensor in tensors:
        info = trace.tensors[tensor]
        output = node if len(op.outputs) == 1 else graph.call_function(operator.getitem, (node, position))
        output.meta.update(module=op.module, shape=info.shape, dtype=info.dtype)
        nodes[tensor] = output


def _plain(value: Any, nodes: dict[int, fx.Node]) -> Any:
    if isinstance(value, Ref):
        return nodes.get(value.id)
    if isinstance(value, Symbolic):
        return value.value
    if isinstance(value, tuple):
        return tuple(_plain(item, nodes) for item in value)
    if isinstance(value, dict):
        return {key: _plain(item, nodes) for key, item in value.items()}
    return value
