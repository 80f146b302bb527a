"""The dataflow of a run, contracted to what a person would draw on a whiteboard: a networkx graph of few nodes.

A trace has thousands of ops; a picture of a block has ten boxes. Roles are recognised on the picture, so this file
draws it. What is contracted, and what stays:

- an elementwise op or a view with one data source is passed through (an activation function, a cast, a transpose);
- several sources that all come from one node and keep its size are one value again (rotary embedding, x * sigmoid(x));
- a weight contraction, a lookup, a convolution, a norm, an attention, a scan each become one node with its parameters;
- `split`, `cat`, and two-source joins (`mul`, `add`) stay: with splits contracted away a packed gate-up projection
  looks like a plain one;
- constants (masks, rotary tables, positions) are not drawn.

A write into a view changes the whole tensor, so the tensor that the view looks into is a `write` box from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import networkx as nx

from autoplan.analyse.flow import Dim, Flow, Node
from autoplan.analyse.regions import collapse_scans, draw_attention, prune
from autoplan.analyse.weight_views import View, as_lookup, follow_view, whole_view
from autoplan.values import Op, Ref, Trace

__all__ = ["dataflow"]

@dataclass(frozen=True)
class Value:
    """What a tensor holds: a node's value, one parameter seen through views, or a constant (neither)."""

    node: int | None = None
    weight: View | None = None
    activated: bool = False  # went through a nonlinear function since the node
    from_input: bool = False  # a constant that is an input of the model, unchanged but for its shape


CONSTANT = Value()

_SPLITS = {"split", "split_with_sizes", "chunk", "unbind", "slice", "select", "narrow"}
_CONTRACTIONS = {"mm", "addmm", "bmm", "baddbmm", "mv", "dot", "linear", "matmul", "_grouped_mm", "addmv", "addbmm"}
_BIASED = {"addmm", "baddbmm", "addmv", "addbmm"}
_STATISTICS = {"mean", "var", "var_mean", "std", "std_mean", "linalg_vector_norm", "norm", "native_layer_norm"}
_NAMED = {
    "_softmax": "softmax",
    "_safe_softmax": "softmax",
    "softmax": "softmax",
    "topk": "topk",
    "sort": "topk",
    "argmax": "topk",
    "cumsum": "cumsum",
    "cumprod": "cumsum",
    "logcumsumexp": "cumsum",
    "sum": "sum",
    "amax": "sum",
    "index": "pick",
    "index_select": "pick",
    "gather": "pick",
    "scatter": "scatter",
    "scatter_": "scatter",
    "scatter_add": "scatter",
    "scatter_add_": "scatter",
    "index_add": "scatter",
    "index_add_": "scatter",
    "index_put": "scatter",
    "index_put_": "scatter",
    "linalg_solve_triangular": "cumsum",
}
_NONLINEAR = {
    *("relu", "gelu", "silu", "sigmoid", "tanh", "softplus", "mish", "elu", "leaky_relu", "hardtanh", "hardswish"),
    *("exp", "erf", "relu6", "selu", "celu", "threshold", "hardsigmoid", "log_sigmoid_forward", "prelu"),
}
_JOINS = {"mul": "mul", "mul_": "mul", "div": "mul", "div_": "mul", "cat": "cat", "stack": "cat"}
_FUSED_ATTENTION = ("_scaled_dot_product", "scaled_dot_product")
_NORMS = {"native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm", "native_group_norm"}
_VIEWS = _SPLITS | {"view", "t", "transpose", "permute", "unsqueeze", "squeeze", "expand"}
_VIEWS |= {"alias", "detach", "diagonal"}


def dataflow(trace: Trace) -> Flow:
    """Draw the picture of a trace."""
    artist = _Artist(trace)
    for op in trace.ops:
        artist.draw(op)
    artist.draw_outputs()
    prune(artist.graph)
    collapse_scans(artist.graph)
    prune(artist.graph)
    artist.graph.graph["tensors"] = artist.boxes_of_borders()
    return artist.graph


def _refs(value: Any) -> Iterator[int]:
    if isinstance(value, Ref):
        yield value.id
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _refs(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _refs(item)


class _Artist:
    """Follows the ops of a trace and adds boxes and arrows."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.graph: Flow = nx.DiGraph()
        self.values: dict[int, Value] = {}
        self.bases: dict[int, int] = {}  # a view's tensor -> the tensor it looks into
        self.written: set[int] = set()  # bases that were changed through a view
        self.drawn_parameters: dict[int, int] = {}
        self.inputs: int | None = None
        self.choices = self._expert_choices()
        for index, tensor in enumerate(trace.tensors):
            matrix = tensor.kind == "buffer" and tensor.differentiable and len(tensor.shape) > 1
            if tensor.kind == "parameter" or matrix:
                self.values[index] = Value(weight=whole_view(index, len(tensor.shape)))
            elif tensor.kind == "input":
                box = self.input_box() if tensor.differentiable else None
                self.values[index] = Value(node=box, from_input=True)

    def _expert_choices(self) -> set[int]:
        """Index tensors that pick among stacked (3-D) weights: what they pick of smaller ones are their biases."""
        chosen: set[int] = set()
        for op in self.trace.ops:
            if op.name in ("index", "index_select") and isinstance(op.args[0], Ref):
                source = self.trace.tensors[op.args[0].id]
                if source.kind == "parameter" and len(source.shape) > 2:
                    chosen.update(_refs(op.args[1:]))
        return chosen

    # ------------------------------------------------------------------------------------------ boxes and arrows

    def add(self, node: Node) -> int:
        number = self.graph.number_of_nodes()
        self.graph.add_node(number, node=node)
        return number

    def input_box(self) -> int:
        """All inputs of the model are one box: what they are called is not for rules."""
        if self.inputs is None:
            self.inputs = self.add(Node("input"))
        return self.inputs

    def join(self, source: int, target: int, port: str = "") -> None:
        ports = self.graph.edges[source, target]["ports"] if self.graph.has_edge(source, target) else frozenset()
        self.graph.add_edge(source, target, ports=ports | {port} if port else ports)

    def node(self, number: int) -> Node:
        found: Node = self.graph.nodes[number]["node"]
        return found

    def value(self, tensor: int) -> Value:
        base = self.bases.get(tensor, tensor)
        if base in self.written and prod(self.shape(tensor)) == prod(self.shape(base)):
            tensor = base
        return self.values.get(tensor, CONSTANT)

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self.trace.tensors[tensor].shape

    def name(self, tensor: int) -> str:
        return self.trace.tensors[tensor].names[0]

    def parameter_box(self, view: View) -> int:
        """A parameter used as data: a class token, an attention sink, a table added to the input."""
        if view.parameter not in self.drawn_parameters:
            dims = (("over", self.dim(view.parameter, 0)),) if self.shape(view.parameter) else ()
            name = self.name(view.parameter)
            box = self.add(Node("parameter", name.rpartition(".")[0], (name,), dims))
            self.drawn_parameters[view.parameter] = box
        return self.drawn_parameters[view.parameter]

    def dim(self, parameter: int, dim: int | None) -> Dim:
        return Dim(self.shape(parameter)[dim] if dim is not None else 0, self.name(parameter), dim)

    # ---------------------------------------------------------------------------------------------------- one op

    def draw(self, op: Op) -> None:
        outputs = list(_refs(op.outputs))
        if not outputs:
            return
        in_place = op.name.endswith("_") and not op.name.endswith("__")
        tensors = list(dict.fromkeys(_refs((op.args, op.kwargs))))
        if op.name == "copy_":
            tensors = list(_refs(op.args[1:2]))
        if op.name in _VIEWS and tensors:
            for output in outputs:
                self.bases[output] = self.bases.get(tensors[0], tensors[0])
        results = self._results(op, tensors, outputs)
        for output, result in zip(outputs, results, strict=False):
            if in_place and self.bases.get(output, output) != output:
                self._write(op, self.bases[output], result)
            self.values[output] = result
            box = result.node
            if box is not None and "size" not in self.graph.nodes[box]:
                self.graph.nodes[box]["size"] = prod(self.shape(output))

    def _write(self, op: Op, base: int, result: Value) -> None:
        """A view was written to: its base holds the new value from now on, beside what it held."""
        before, after = self.value(base), self._as_box(result)
        self.written.add(base)
        if after is None or before.node == after or (before.node is not None and before.node in self._ancestry(after)):
            return
        if prod(self.shape(next(_refs(op.outputs)))) == prod(self.shape(base)):
            self.values[base] = result
            return
        target = before.node
        if target is None or self.node(target).kind != "write" or list(self.graph.successors(target)):
            target = self.add(Node("write", op.module))
            if before.node is not None:
                self.join(before.node, target)
        self.join(after, target)
        self.values[base] = Value(node=target)

    def _as_box(self, value: Value) -> int | None:
        return self.parameter_box(value.weight) if value.weight is not None else value.node

    def _results(self, op: Op, tensors: list[int], outputs: list[int]) -> list[Value]:
        values = [self.value(t) for t in tensors]
        weights = [v.weight for v in values if v.weight is not None]
        data = [t for t, v in zip(tensors, values, strict=True) if v.node is not None]
        if op.name == "embedding" or (op.name in ("index", "index_select") and weights and weights[0].parameter >= 0):
            looked_up = self._lookup(op, tensors)
            if looked_up is not None:
                return [looked_up]
        if op.name.endswith("_like") or op.name.startswith("new_"):
            return [CONSTANT] * len(outputs)
        if not data and not weights:
            return [Value(from_input=self._reshapes_input(op, values))] * len(outputs)
        if not data:
            return self._only_weights(op, tensors, outputs, weights)
        if op.name in _CONTRACTIONS:
            return [self._contraction(op, tensors)]
        if op.name in ("convolution", "_convolution"):
            return [self._convolution(op)]
        if op.name in _NORMS or "batch_norm" in op.name:
            return [self._fused_norm(op)] * len(outputs)
        if op.name.startswith(_FUSED_ATTENTION):
            return [self._fused_attention(op)] * len(outputs)
        if op.name in _SPLITS:
            return [self._split(op, data[0], output) for output in outputs]
        if op.name == "glu":
            return [self._glu(op, data[0])]
        return [self._general(op, tensors, output) for output in outputs]

    def _reshapes_input(self, op: Op, values: list[Value]) -> bool:
        return len(values) == 1 and values[0].from_input and (op.name in _VIEWS or op.name in ("_to_copy", "clone"))

    def _only_weights(self, op: Op, tensors: list[int], outputs: list[int], weights: list[View]) -> list[Value]:
        """An op on parameters and constants: one parameter through a view, or several made into a value."""
        if len({view.parameter for view in weights}) == 1 and op.name not in _CONTRACTIONS:
            source = tensors[[self.value(t).weight for t in tensors].index(weights[0])]
            return [Value(weight=follow_view(op, weights[0], self.shape(source), self.shape(o))) for o in outputs]
        if op.name in _CONTRACTIONS:
            return [self._contraction(op, tensors)] * len(outputs)
        return [self._general(op, tensors, output) for output in outputs]

    # ------------------------------------------------------------------------------------------- kinds of boxes

    def _lookup(self, op: Op, tensors: list[int]) -> Value | None:
        table, index = tensors[0], tensors[1:]
        view = self.value(table).weight
        if view is None:
            return None
        stacked = len(self.shape(view.parameter)) > 2 or self.choices.intersection(index)
        if op.name != "embedding" and (stacked or len(self.shape(table)) < 2):
            chosen = next((self.value(t).node for t in index if self.value(t).node is not None), view.chosen)
            return Value(weight=replace(as_lookup(view, len(self.shape(index[0]))), chosen=chosen))
        dims = (("rows", self.dim(view.parameter, view.dims[0])), ("width", self.dim(view.parameter, view.dims[1])))
        box = self.add(Node("embedding", op.module, (self.name(view.parameter),), dims))
        for tensor in index:
            source = self.input_box() if self.value(tensor).from_input else self.value(tensor).node
            if source is not None:
                self.join(source, box, "index")
        return Value(node=box)

    def _contraction(self, op: Op, tensors: list[int]) -> Value:
        operands = [a.id for a in op.args if isinstance(a, Ref)]
        bias = operands.pop(0) if op.name in _BIASED else None
        if op.name == "_grouped_mm" or op.name == "linear":
            bias = None
        left, right = operands[0], operands[1]
        weight, other, transposed = self.value(right).weight, left, False
        if self.value(left).weight is not None and weight is None:
            weight, other, transposed = self.value(left).weight, right, True
        if weight is None:
            return self._activation_product(op, left, right)
        other_box = self._as_box(self.value(other))
        rank = len(self.shape(weight.parameter))
        contracted, free = (-1, -2) if transposed or op.name == "linear" else (-2, -1)
        if len(weight.dims) == 1:
            dims = [("in", self.dim(weight.parameter, weight.dims[0]))]
        else:
            fields = (("in", contracted), ("out", free))
            dims = [(field, self.dim(weight.parameter, weight.dims[d])) for field, d in fields]
        kind = "stacked" if rank > 2 else "linear"
        if rank > 2:
            first = next((d for d in weight.dims if d not in (weight.dims[contracted], weight.dims[free])), 0)
            dims.append(("stack", self.dim(weight.parameter, first if first is not None else 0)))
        parameters = [self.name(weight.parameter)]
        bias_view = self.value(bias).weight if bias is not None else None
        if bias_view is not None:
            parameters.append(self.name(bias_view.parameter))
        box = self.add(Node(kind, op.module, tuple(parameters), tuple(dims)))
        if other_box is not None:
            self.join(other_box, box)
        if weight.chosen is not None:
            self.join(weight.chosen, box, "choice")
        if bias is not None and self.value(bias).node is not None:
            return self._joined("add", op, [self.value(bias).node or 0, box])
        return Value(node=box)

    def _activation_product(self, op: Op, left: int, right: int) -> Value:
        first, second = self._as_box(self.value(left)), self._as_box(self.value(right))
        if first is None or second is None:
            source = first if first is not None else second
            return Value(node=source)
        attention = draw_attention(self.graph, first, second, op.module)
        if attention is not None:
            return Value(node=attention)
        box = self.add(Node("matmul", op.module))
        self.join(first, box, "left")
        self.join(second, box, "right")
        return Value(node=box)

    def _convolution(self, op: Op) -> Value:
        data, weight, bias, transposed, groups = op.args[0].id, op.args[1].id, op.args[2], bool(op.args[6]), op.args[8]
        view, source = self.value(weight).weight, self.value(data).node
        if view is None or source is None:
            return self._general(op, [data, weight], data)
        out, inner = (1, 0) if transposed else (0, 1)
        dims = [("out", self.dim(view.parameter, view.dims[out]))]
        if int(groups) == 1:
            dims.append(("in", self.dim(view.parameter, view.dims[inner])))
        parameters = [self.name(view.parameter)]
        bias_view = self.value(bias.id).weight if isinstance(bias, Ref) else None
        if bias_view is not None:
            parameters.append(self.name(bias_view.parameter))
        kind = "conv" if int(groups) == 1 else "depthwise"
        box = self.add(Node(kind, op.module, tuple(parameters), tuple(dims)))
        self.join(source, box)
        return Value(node=box)

    def _fused_norm(self, op: Op) -> Value:
        refs = [a.id for a in op.args if isinstance(a, Ref)]
        source = self._as_box(self.value(refs[0]))
        views = [self.value(t).weight for t in refs[1:]]
        found = [v for v in views if v is not None]
        dims = tuple(("over", self.dim(v.parameter, v.dims[-1])) for v in found[:1])
        box = self.add(Node("norm", op.module, tuple(self.name(v.parameter) for v in found), dims))
        if source is not None:
            self.join(source, box)
        return Value(node=box)

    def _fused_attention(self, op: Op) -> Value:
        box = self.add(Node("attend", op.module))
        operands = [a for a in op.args if isinstance(a, Ref)] + [a for a in op.kwargs.values() if isinstance(a, Ref)]
        for port, operand in zip(("q", "k", "v", "bias", "bias", "bias"), operands, strict=False):
            source = self._as_box(self.value(operand.id))
            if source is not None:
                self.join(source, box, port)
        return Value(node=box)

    def _split(self, op: Op, tensor: int, output: int) -> Value:
        source = self.value(tensor)
        if source.node is None or self.shape(tensor) == self.shape(output):
            return source
        if prod(self.shape(tensor)) == prod(self.shape(output)):
            return source
        box = self.add(Node("split", op.module))
        self.join(source.node, box)
        return Value(node=box)

    def _glu(self, op: Op, tensor: int) -> Value:
        source = self.value(tensor).node
        assert source is not None
        halves = [self.add(Node("split", op.module)) for _ in range(2)]
        for half in halves:
            self.join(source, half)
        return self._joined("mul", op, halves)

    def _general(self, op: Op, tensors: list[int], output: int) -> Value:
        """Elementwise ops, reductions, joins: what is left."""
        boxes = self._boxes(op, tensors)
        views = [v for v in (self.value(t).weight for t in tensors) if v is not None]
        if op.name in ("cat", "stack", "where") or (views and not boxes):
            boxes += [self.parameter_box(view) for view in views]
            views = []
        boxes = list(dict.fromkeys(boxes))
        if not boxes:
            return CONSTANT
        if op.name in _STATISTICS:
            return self._new("statistic", op, boxes)
        if op.name in _NAMED:
            return self._new(_NAMED[op.name], op, boxes)
        if views and len(boxes) == 1:
            return self._weighted(op, boxes[0], views)
        boxes += [self.parameter_box(view) for view in views]
        activated = op.name.rstrip("_") in _NONLINEAR or any(self.value(t).activated for t in tensors)
        if len(boxes) == 1:
            return Value(node=boxes[0], activated=activated)
        result = self._together(op, boxes, output)
        if result.node in boxes or self.node(result.node or 0).kind != "mul":
            return replace(result, activated=activated and result.node in boxes)
        for tensor in tensors:
            source = self.value(tensor).node
            if source is not None and self.value(tensor).activated:
                self.join(source, result.node or 0, "activated")
        return result

    def _boxes(self, op: Op, tensors: Iterable[int]) -> list[int]:
        """Data sources; masks and indices made from data do not count beside values that carry gradient."""
        drawn = [(t, self.value(t).node) for t in tensors]
        carrying = [n for t, n in drawn if n is not None and self.trace.tensors[t].differentiable]
        keeps_indices = _NAMED.get(op.name) in ("pick", "scatter")
        return carrying if carrying and not keeps_indices else [n for _, n in drawn if n is not None]

    def _together(self, op: Op, boxes: list[int], output: int) -> Value:
        """Several sources: parts of one value come together again, or values meet."""
        lines = [self._ancestry(box) for box in boxes]
        common = [box for box in lines[0] if all(box in line for line in lines[1:])]
        plain = [box for box in boxes if self.node(box).kind != "statistic"]
        if common and plain and len(plain) < len(boxes):
            return self._normalised(op, plain[0])
        size = prod(self.shape(output))
        whole = next((box for box in common if self.graph.nodes[box].get("size") == size), None)
        if whole is not None:
            return Value(node=whole)
        sums = op.name.startswith(("add", "sub", "rsub"))
        if sums and common:  # halves of a rotation, before they are put together again
            return self._new("split", op, common[:1])
        return self._joined(_JOINS.get(op.name, "add" if sums else "mix"), op, boxes)

    def _normalised(self, op: Op, source: int) -> Value:
        """x * rsqrt(mean(x * x)): a norm, with its weight still to come."""
        if self.node(source).kind == "norm" and not self.node(source).parameters:
            return Value(node=source)
        return self._new("norm", op, [source])

    def _weighted(self, op: Op, source: int, views: list[View]) -> Value:
        """One value and a parameter, elementwise: a norm's own weight, a scale, or a bias."""
        names = tuple(self.name(view.parameter) for view in views)
        box, known = source, self.node(source)
        dims = tuple(("over", self.dim(v.parameter, v.dims[-1] if v.dims else None)) for v in views[:1])
        if known.kind == "norm" and len(known.parameters) < 2:
            self.graph.nodes[box]["node"] = replace(known, parameters=known.parameters + names, dims=known.dims or dims)
            return Value(node=box)
        kind = "shift" if op.name.startswith(("add", "sub")) else "scale"
        if kind == "shift" and self._is_bias(known, views):
            self.graph.nodes[box]["node"] = replace(known, parameters=known.parameters + names)
            return Value(node=box)
        box = self.add(Node(kind, op.module, names, dims))
        self.join(source, box)
        return Value(node=box)

    def _is_bias(self, known: Node, views: list[View]) -> bool:
        """Added to a contraction's output, as wide as it is: its bias, only written apart."""
        out = known.dim("out")
        owners = {name.rpartition(".")[0] for name in (*known.parameters, *(self.name(v.parameter) for v in views))}
        widths = [self.shape(view.parameter)[-1] for view in views if self.shape(view.parameter)]
        alone = known.kind in ("linear", "stacked") and len(known.parameters) == 1 and len(owners) == 1
        return alone and out is not None and widths == [out.size]

    def _new(self, kind: str, op: Op, sources: list[int]) -> Value:
        box = self.add(Node(kind, op.module))
        for source in sources:
            self.join(source, box)
        return Value(node=box)

    def _joined(self, kind: str, op: Op, sources: list[int]) -> Value:
        return self._new(kind, op, sources)

    def _ancestry(self, box: int) -> list[int]:
        """The box and the values it is a part or a statistic of, nearest first."""
        line = [box]
        while self.node(line[-1]).kind in ("split", "statistic", "sum"):
            line.append(next(iter(self.graph.predecessors(line[-1]))))
        return line

    def boxes_of_borders(self) -> dict[int, int]:
        """For tensors that enter or leave modules, the box whose value they hold."""
        borders = (t for visit in self.trace.visits for _, t in (*visit.inputs, *visit.outputs))
        boxes = ((tensor, self.value(tensor).node) for tensor in dict.fromkeys(borders))
        return {tensor: box for tensor, box in boxes if box is not None and box in self.graph}

    def draw_outputs(self) -> None:
        """One box for what leaves the model, and what flows into it."""
        box = self.add(Node("output"))
        for visit in self.trace.visits:
            if visit.parent is None:
                for path, tensor in visit.outputs:
                    source = self.value(tensor).node
                    if source is not None:
                        self.join(source, box, str(path[0]) if path else "")
