"""What a picture of the dataflow is made of: boxes (`Node`) with dimensions (`Dim`), in a networkx graph (`Flow`).

Boxes carry their `Node` under "node", arrows the reader's "ports" at which the value arrives. Kinds of boxes, and the
dims they have:

    input, output          what enters and leaves the model
    linear                 contraction with a weight: in, out
    stacked                the same with a stack of weights (experts, one matrix per head): in, out, stack
    embedding              lookup in a table: rows, width
    conv, depthwise        convolution: in, out (depthwise: out)
    norm                   over
    scale, shift           a value times, or plus, a parameter: over
    parameter              a parameter used as data: over
    attend                 softmax attention; ports q, k, v, bias
    scan                   state-space or linear attention
    mul, add, cat, split, mix, sum, softmax, topk, pick, scatter, write, matmul, cumsum   what they say

An arrow's port "activated" says that the value went through a nonlinear function on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import networkx as nx

from autoplan.ops import op_record
from autoplan.ops.records.answers import Shows
from autoplan.ops.records.record import writes_in_place
from autoplan.values import Obstacle, Op, Ref, Symbolic, Trace

if TYPE_CHECKING:
    import networkx as nx

Flow: TypeAlias = "nx.DiGraph[int]"


@dataclass(frozen=True)
class Dim:
    """A dimension of a box's weight: the parameter and dim that it is, and facts that are added later."""

    size: int
    parameter: str = ""
    dim: int | None = None
    layout: str | None = None
    classes: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Node:
    """One box: its kind, the module whose Python ran it, the parameters it reads, the dims of its weight."""

    kind: str
    module: str = ""
    parameters: tuple[str, ...] = ()
    dims: tuple[tuple[str, Dim], ...] = ()
    gathered: bool = False  # a fact added later: its output is gathered from all ranks

    def dim(self, field: str) -> Dim | None:
        return dict(self.dims).get(field)


def node_of(flow: Flow, box: int) -> Node:
    node: Node = flow.nodes[box]["node"]
    return node


# Views of a parameter: the parameter's dim that each dim of the view runs over.
#
# Linear layers read `weight.t()`, experts read `weight[choice]` or `weight.transpose(1, 2)`, attention reads chunks
# of one packed weight. To tell which dim of the parameter a matmul contracts, the dims are followed through such ops.


@dataclass(frozen=True)
class View:
    """`dims[i]` is the parameter's dim that dim i of the view runs over; None: none of them, or unknown.

    `chosen`: the box whose values selected from the parameter's first dim (the chosen experts). `companions`: the
    scales and zero points that a quantised parameter was combined with.
    """

    parameter: int
    dims: tuple[int | None, ...]
    chosen: int | None = None
    companions: tuple[int, ...] = ()


def whole_view(parameter: int, rank: int) -> View:
    return View(parameter, tuple(range(rank)))


def dequantised(view: View, others: list[View], stored: tuple[int, ...], after: tuple[int, ...]) -> View:
    """Return the view after a step of dequantisation: once the stored shape is back its dims are known again."""
    companions = dict.fromkeys(
        (*view.companions, *(n for other in others for n in (other.parameter, *other.companions)))
    )
    companions.pop(view.parameter, None)
    back = len(after) == len(stored) and all(size % old == 0 for size, old in zip(after, stored, strict=True))
    dims: tuple[int | None, ...] = view.dims if len(view.dims) == len(after) else (None,) * len(after)
    if back and None in dims:
        dims = tuple(range(len(stored)))
    return replace(view, dims=dims, companions=tuple(companions))


def follow_view(op: Op, view: View, before: tuple[int, ...], after: tuple[int, ...]) -> View:
    """Return the view after one more op that reads nothing but it (and constants)."""
    dims: list[int | None] = list(view.dims)
    record = op_record(op.name)
    if record.moves is not None:
        dims = record.moves(op, dims, None, len(after))
    elif len(before) != len(after) or (before != after and record.shows is Shows.RESHAPED):
        # A reshape: dims that keep their size, in order, stay known
        result: list[int | None] = []
        position = 0
        for size in after:
            matching = next((i for i in range(position, len(before)) if before[i] == size and size > 1), None)
            result.append(dims[matching] if matching is not None else None)
            position = matching + 1 if matching is not None else position
        dims = result
    return replace(view, dims=tuple(dims)) if len(dims) == len(after) else replace(view, dims=(None,) * len(after))


# The canvas: the boxes drawn so far, and the box or parameter that every tensor's value comes from.


@dataclass(frozen=True)
class Value:
    """The content of a tensor: a box's value, a view of one parameter, or a constant (neither)."""

    node: int | None = None
    weight: View | None = None
    activated: bool = False  # went through a nonlinear function since the box
    from_input: bool = False  # an input of the model, at most reshaped


CONSTANT = Value()


class Canvas:
    """Boxes, arrows, and the value of every tensor."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.flow: Flow = nx.DiGraph()
        self.values: dict[int, Value] = {}
        self.bases: dict[int, int] = {}  # view -> its base
        self.written: set[int] = set()  # bases that were changed through a view
        self.multiplied: set[str] = set()  # weights of contractions
        self._parameters: dict[int, int] = {}
        self._input: int | None = None
        for index, tensor in enumerate(trace.tensors):
            matrix = tensor.kind == "buffer" and tensor.differentiable and len(tensor.shape) > 1
            if tensor.kind == "parameter" or matrix or tensor.quantised:
                self.values[index] = Value(weight=whole_view(index, len(tensor.shape)))
            elif tensor.kind == "input":
                self.values[index] = Value(node=self.input_box() if tensor.differentiable else None, from_input=True)

    # Tensors

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

    # Boxes

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
        """Return the box of a value; a parameter used as data gets a box of its own."""
        return self.parameter_box(value.weight) if value.weight is not None else value.node

    def input_box(self) -> int:
        """Return the one box of all inputs of the model: rules must not depend on their names."""
        if self._input is None:
            self._input = self.add(Node("input"))
        return self._input

    def parameter_box(self, view: View) -> int:
        """Return the box of a parameter used as data: a class token, an attention sink, a table added to the input."""
        if view.parameter not in self._parameters:
            dims = (("over", self.dim(view.parameter, 0)),) if self.shape(view.parameter) else ()
            name = self.name(view.parameter)
            self._parameters[view.parameter] = self.add(Node("parameter", name.rpartition(".")[0], (name,), dims))
        return self._parameters[view.parameter]

    def size(self, box: int) -> int | None:
        """Return the number of elements of a box's value."""
        elements: int | None = self.flow.nodes[box].get("size")
        return elements

    def measure(self, box: int, tensor: int) -> None:
        self.flow.nodes[box].setdefault("size", prod(self.shape(tensor)))

    def ancestry(self, box: int) -> list[int]:
        """Return the box and the values it is a part or a statistic of, nearest first."""
        line = [box]
        while self.node(line[-1]).kind in ("split", "statistic", "sum"):
            line.append(next(iter(self.flow.predecessors(line[-1]))))
        return line


# Find modules that libraries which wrap a module's forward cannot shard, though autoplan can.
#
# transformers and torch shard a linear layer by wrapping its forward: the weight becomes a DTensor, and the output is
# a view of one. That breaks if the code around the module does more than call it:
#
#     edited    the output is changed in place (`x += …`), which autograd forbids for such a view
#     read      another module's code reads the weight directly (`F.linear(x, self.proj.weight)`), and gets a DTensor
#     shape     the weight is no [out, in] matrix of a module that declares its widths (a convolution, a custom class)
#     count     a module above reads an integer of its own that must keep its value: some libraries divide whatever is
#               called `num_heads` above a layer that they shard
#
# All are read off the trace. They hinder exports only; nothing here decides what is split.


_WIDTHS = ({"in_features", "out_features"}, {"num_embeddings", "embedding_dim"})


def obstacles(trace: Trace, modules: Iterable[str]) -> tuple[Obstacle, ...]:
    """Return the obstacles of these modules, each kind once for each module."""
    names = dict.fromkeys(modules)
    obstructions = [
        *_edited(trace, names),
        *_read_elsewhere(trace, names),
        *_odd_shapes(trace, names),
        *_counts(trace, names),
    ]
    return tuple(dict.fromkeys(obstructions))


def _edited(trace: Trace, modules: dict[str, None]) -> Iterator[Obstacle]:
    """Yield modules whose output is written to, directly or through a view, by code outside the module."""
    bases: dict[int, int] = {}
    for op in trace.ops:
        # A result that shares memory with the first input
        if op_record(op.name).shows in (Shows.RESHAPED, Shows.VIEWED) and op.args and isinstance(op.args[0], Ref):
            source = bases.get(op.args[0].id, op.args[0].id)
            bases.update((output, source) for output in op.results if output != source)
    makers: dict[int, dict[str, None]] = {}
    for visit in trace.visits:
        for _, tensor in visit.outputs if visit.module in modules else ():
            makers.setdefault(bases.get(tensor, tensor), {})[visit.module] = None
    for op in trace.ops:
        if writes_in_place(op.name) and op.args and isinstance(op.args[0], Ref):
            for module in makers.get(bases.get(op.args[0].id, op.args[0].id), ()):
                if not _is_in(op.module, module):
                    yield Obstacle(module, "edited", by=op.module)


def _read_elsewhere(trace: Trace, modules: dict[str, None]) -> Iterator[Obstacle]:
    owners = {
        index: dict.fromkeys(name.rpartition(".")[0] for name in tensor.names)  # in order: plans are the same each time
        for index, tensor in enumerate(trace.tensors)
        if tensor.kind == "parameter"
    }
    for op in trace.ops:
        for tensor in op.reads:
            for module in owners.get(tensor, ()):
                if module in modules and not any(_is_in(op.module, owner) for owner in owners[tensor]):
                    yield Obstacle(module, "read", by=op.module)


def _odd_shapes(trace: Trace, modules: dict[str, None]) -> Iterator[Obstacle]:
    for tensor in trace.tensors:
        for name in tensor.names if tensor.kind == "parameter" else ():
            module, _, own = name.rpartition(".")
            if module not in modules or own != "weight" or len(tensor.shape) < 2:
                continue
            if len(tensor.shape) != 2:
                yield Obstacle(module, "shape", dims=len(tensor.shape))
            elif not any(widths <= trace.attributes.get(module, {}).keys() for widths in _WIDTHS):
                yield Obstacle(module, "shape")


def _counts(trace: Trace, modules: dict[str, None]) -> Iterator[Obstacle]:
    """Yield the integers that modules above these read from themselves. (Whether a plan divides them is not asked.)"""
    above = {module[:place] for module in modules for place, letter in enumerate(module) if letter == "."}
    read: list[Any] = [(call.args, call.kwargs) for call in trace.calls]
    read += [origin for origin, _ in trace.escapes] + [(left, right) for _, left, right, _ in trace.comparisons]
    for module, attribute in dict.fromkeys(pair for value in read for pair in _attributes_in(value)):
        if module in above and not attribute.startswith("config."):
            yield Obstacle(module, "count", attribute=attribute)


def _attributes_in(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (module, attribute) of the integers mentioned in recorded arguments."""
    if isinstance(value, Symbolic):
        value = value.origin
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        if len(value) == 4 and value[0] == "attr":
            yield value[1], value[2]
        else:
            for item in value:
                yield from _attributes_in(item)


def _is_in(module: str, outer: str) -> bool:
    return module == outer or module.startswith(f"{outer}.") or not outer
