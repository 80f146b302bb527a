"""Boxes that read parameters: contractions, lookups, convolutions, norms, scales; and attention, which reads none.

Each function draws one op on the canvas and returns the value of its result. The dims of the weight are named by what
they do there ("in" is contracted, "out" is free), whatever order the parameter stores them in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoplan.analyse.picture.drawing import Canvas, Value
from autoplan.analyse.picture.flow import Node
from autoplan.analyse.picture.regions import draw_attention
from autoplan.analyse.picture.weight_views import View, as_lookup
from autoplan.ops import op_record
from autoplan.ops.convolutions import groups_of, transposed
from autoplan.ops.records.answers import Drawn
from autoplan.values import Op, Ref

__all__ = ["contraction", "convolution", "fused_attention", "fused_norm", "lookup", "weighted"]


def lookup(canvas: Canvas, op: Op, tensors: Sequence[int], choices: set[int]) -> Value | None:
    """table[index]. Weights picked for chosen experts stay weights, and so do the biases picked next to them."""
    table, index = tensors[0], tensors[1:]
    view = canvas.value(table).weight
    if view is None:
        return None
    stacked = len(canvas.shape(view.parameter)) > 2 or choices.intersection(index)
    if op_record(op.name).drawn is Drawn.ROWS and (stacked or len(canvas.shape(table)) < 2):
        chosen = next((canvas.value(t).node for t in index if canvas.value(t).node is not None), view.chosen)
        return Value(weight=replace(as_lookup(view, len(canvas.shape(index[0]))), chosen=chosen))
    dims = (("rows", canvas.dim(view.parameter, view.dims[0])), ("width", canvas.dim(view.parameter, view.dims[1])))
    box = canvas.add(Node("embedding", op.module, (canvas.name(view.parameter),), dims))
    for tensor in index:
        source = canvas.input_box() if canvas.value(tensor).from_input else canvas.value(tensor).node
        if source is not None:
            canvas.join(source, box, "index")
    return Value(node=box)


def contraction(canvas: Canvas, op: Op) -> Value:
    """A product that sums over a dim: of a value with a weight, or of two values."""
    operands = [argument.id for argument in op.args if isinstance(argument, Ref)]
    product = op_record(op.name).product
    assert product is not None
    bias = canvas.value(operands.pop(0)) if product.bias == 0 else Value()
    left, right = (canvas.value(operand) for operand in operands[:2])
    if right.weight is not None:
        weight, data, transposed = right.weight, left, product.of_rows
    elif left.weight is not None:
        weight, data, transposed = left.weight, right, True
    else:
        return _product_of_values(canvas, op, left, right)
    node = _contracting_node(canvas, op, weight, transposed)
    if bias.weight is not None:
        node = replace(node, parameters=(*node.parameters, canvas.name(bias.weight.parameter)))
    source = canvas.box_of(data)
    box = canvas.add(node, () if source is None else (source,))
    if weight.chosen is not None:
        canvas.join(weight.chosen, box, "choice")
    return canvas.new("add", op, (bias.node, box)) if bias.node is not None else Value(node=box)


def _contracting_node(canvas: Canvas, op: Op, weight: View, transposed: bool) -> Node:
    parameter, dims = weight.parameter, weight.dims
    contracted, free = (dims[-1], dims[-2]) if transposed and len(dims) > 1 else (dims[-2:][0], dims[-1])
    named = [("in", canvas.dim(parameter, contracted))]
    if len(dims) > 1:
        named.append(("out", canvas.dim(parameter, free)))
    stacked = len(canvas.shape(parameter)) > 2
    if stacked:
        others = [dim for dim in dims if dim is not None and dim not in (contracted, free)]
        named.append(("stack", canvas.dim(parameter, others[0] if others else 0)))
    names = (canvas.name(parameter), *map(canvas.name, weight.companions))
    return Node("stacked" if stacked else "linear", op.module, names, tuple(named))


def _product_of_values(canvas: Canvas, op: Op, left: Value, right: Value) -> Value:
    first, second = canvas.box_of(left), canvas.box_of(right)
    if first is None or second is None:
        return Value(node=first if first is not None else second)
    attention = draw_attention(canvas.flow, first, second, op.module)
    if attention is not None:
        return Value(node=attention)
    box = canvas.add(Node("matmul", op.module))
    canvas.join(first, box, "left")
    canvas.join(second, box, "right")
    return Value(node=box)


def convolution(canvas: Canvas, op: Op) -> Value | None:
    """A convolution; grouped ones are "depthwise", whose only dim that counts is the channels."""
    data, weight, bias, groups = op.args[0].id, op.args[1].id, op.args[2], groups_of(op)
    view, source = canvas.value(weight).weight, canvas.value(data).node
    if view is None or source is None:
        return None
    out, inner = (1, 0) if transposed(op) else (0, 1)
    dims = [("out", canvas.dim(view.parameter, view.dims[out]))]
    if groups == 1:
        dims.insert(0, ("in", canvas.dim(view.parameter, view.dims[inner])))
    read = [view, canvas.value(bias.id).weight if isinstance(bias, Ref) else None]
    names = tuple(canvas.name(item.parameter) for item in read if item is not None)
    return Value(
        node=canvas.add(Node("conv" if groups == 1 else "depthwise", op.module, names, tuple(dims)), (source,))
    )


def fused_norm(canvas: Canvas, op: Op) -> Value:
    """layer_norm and its like as one op."""
    operands = [canvas.value(argument.id) for argument in op.args if isinstance(argument, Ref)]
    views = [operand.weight for operand in operands[1:] if operand.weight is not None]
    names = tuple(canvas.name(view.parameter) for view in views)
    dims = tuple(("over", canvas.dim(view.parameter, view.dims[-1])) for view in views[:1])
    source = canvas.box_of(operands[0])
    return Value(node=canvas.add(Node("norm", op.module, names, dims), () if source is None else (source,)))


def fused_attention(canvas: Canvas, op: Op) -> Value:
    """scaled_dot_product_attention and its like as one op."""
    box = canvas.add(Node("attend", op.module))
    operands = [item for item in (*op.args, *op.kwargs.values()) if isinstance(item, Ref)]
    for port, operand in zip(("q", "k", "v", "bias", "bias", "bias"), operands, strict=False):
        source = canvas.box_of(canvas.value(operand.id))
        if source is not None:
            canvas.join(source, box, port)
    return Value(node=box)


def weighted(canvas: Canvas, op: Op, box: int, views: list[View]) -> Value:
    """One value and a parameter, elementwise: a norm's own weight, a bias, or a scale or shift."""
    known = canvas.node(box)
    names = tuple(canvas.name(view.parameter) for view in views)
    dims = tuple(("over", canvas.dim(view.parameter, _last_dim(canvas, view))) for view in views[:1])
    if known.kind == "norm" and len(known.parameters) < 2:
        return canvas.change(box, replace(known, parameters=known.parameters + names, dims=known.dims or dims))
    if any(_multiplies(canvas, name) for name in names):
        return Value(node=box)  # a weight that is adjusted, to be measured: no scale of what it is adjusted by
    kind = "shift" if op_record(op.name).drawn is Drawn.ADD else "scale"
    if kind == "shift" and _is_bias(canvas, known, views):
        return canvas.change(box, replace(known, parameters=known.parameters + names))
    return Value(node=canvas.add(Node(kind, op.module, names, dims), (box,)))


def _multiplies(canvas: Canvas, parameter: str) -> bool:
    """Is this the weight of a contraction?"""
    nodes = (canvas.node(box) for box in canvas.flow)
    return any(node.kind in ("linear", "stacked") and node.parameters[:1] == (parameter,) for node in nodes)


def _last_dim(canvas: Canvas, view: View) -> int | None:
    """The parameter's dim that the last dim of the view runs over; a vector has but one, however it is viewed."""
    if len(canvas.shape(view.parameter)) == 1:
        return 0
    return view.dims[-1] if view.dims else None


def _is_bias(canvas: Canvas, known: Node, views: list[View]) -> bool:
    """Added to a contraction's output, as wide as it is, by the module that owns both: its bias, only written apart."""
    out = known.dim("out")
    names = (*known.parameters, *(canvas.name(view.parameter) for view in views))
    widths = [canvas.shape(view.parameter)[-1] for view in views if canvas.shape(view.parameter)]
    alone = known.kind in ("linear", "stacked") and len(known.parameters) == 1
    return alone and len({name.rpartition(".")[0] for name in names}) == 1 and out is not None and widths == [out.size]
