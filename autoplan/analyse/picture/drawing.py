"""What is drawn so far: the boxes of a picture, and which box or parameter every tensor's value comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

import networkx as nx

from autoplan.analyse.picture.flow import Dim, Flow, Node, node_of
from autoplan.analyse.picture.weight_views import View, whole_view
from autoplan.values import Op, Trace

__all__ = ["CONSTANT", "Canvas", "Value"]


@dataclass(frozen=True)
class Value:
    """What a tensor holds: a box's value, one parameter seen through views, or a constant (neither)."""

    node: int | None = None
    weight: View | None = None
    activated: bool = False  # went through a nonlinear function since the box
    from_input: bool = False  # an input of the model, unchanged but for its shape


CONSTANT = Value()


class Canvas:
    """Boxes, arrows, and the value of every tensor."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.flow: Flow = nx.DiGraph()
        self.values: dict[int, Value] = {}
        self.bases: dict[int, int] = {}  # a view's tensor -> the tensor it looks into
        self.written: set[int] = set()  # bases that were changed through a view
        self._parameters: dict[int, int] = {}
        self._input: int | None = None
        for index, tensor in enumerate(trace.tensors):
            matrix = tensor.kind == "buffer" and tensor.differentiable and len(tensor.shape) > 1
            if tensor.kind == "parameter" or matrix or tensor.quantised:
                self.values[index] = Value(weight=whole_view(index, len(tensor.shape)))
            elif tensor.kind == "input":
                self.values[index] = Value(node=self.input_box() if tensor.differentiable else None, from_input=True)

    # ------------------------------------------------------------------------------------------------ tensors

    def value(self, tensor: int) -> Value:
        base = self.bases.get(tensor, tensor)
        if base in self.written and prod(self.shape(tensor)) == prod(self.shape(base)):
            tensor = base
        return self.values.get(tensor, CONSTANT)

    def shape(self, tensor: int) -> tuple[int, ...]:
        return self.trace.tensors[tensor].shape

    def name(self, tensor: int) -> str:
        return self.trace.tensors[tensor].names[0]

    def dim(self, parameter: int, dim: int | None) -> Dim:
        return Dim(self.shape(parameter)[dim] if dim is not None else 0, self.name(parameter), dim)

    # ------------------------------------------------------------------------------------------------ boxes

    def add(self, node: Node, sources: Iterable[int] = ()) -> int:
        box = self.flow.number_of_nodes()
        self.flow.add_node(box, node=node)
        for source in sources:
            self.join(source, box)
        return box

    def join(self, source: int, reader: int, port: str = "") -> None:
        ports = self.flow.edges[source, reader]["ports"] if self.flow.has_edge(source, reader) else frozenset[str]()
        self.flow.add_edge(source, reader, ports=ports | {port} if port else ports)

    def node(self, box: int) -> Node:
        return node_of(self.flow, box)

    def change(self, box: int, node: Node) -> Value:
        self.flow.nodes[box]["node"] = node
        return Value(node=box)

    def new(self, kind: str, op: Op, sources: Iterable[int]) -> Value:
        return Value(node=self.add(Node(kind, op.module), sources))

    def box_of(self, value: Value) -> int | None:
        """The box that gives a value; a parameter used as data gets one of its own."""
        return self.parameter_box(value.weight) if value.weight is not None else value.node

    def input_box(self) -> int:
        """All inputs of the model are one box: what they are called is not for rules."""
        if self._input is None:
            self._input = self.add(Node("input"))
        return self._input

    def parameter_box(self, view: View) -> int:
        """A parameter used as data: a class token, an attention sink, a table added to the input."""
        if view.parameter not in self._parameters:
            dims = (("over", self.dim(view.parameter, 0)),) if self.shape(view.parameter) else ()
            name = self.name(view.parameter)
            self._parameters[view.parameter] = self.add(Node("parameter", name.rpartition(".")[0], (name,), dims))
        return self._parameters[view.parameter]

    def size(self, box: int) -> int | None:
        """Elements of the value that a box gives."""
        found: int | None = self.flow.nodes[box].get("size")
        return found

    def measure(self, box: int, tensor: int) -> None:
        self.flow.nodes[box].setdefault("size", prod(self.shape(tensor)))

    def ancestry(self, box: int) -> list[int]:
        """The box and the values it is a part or a statistic of, nearest first."""
        line = [box]
        while self.node(line[-1]).kind in ("split", "statistic", "sum"):
            line.append(next(iter(self.flow.predecessors(line[-1]))))
        return line
