"""Boxes of a picture: ops that read weights, and regions (attention, scans) contracted to one box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import networkx as nx

from autoplan.analyse.picture.flow import Canvas, Flow, Node, Value, View, node_of
from autoplan.ops import op_record
from autoplan.ops.convolutions import groups_of, transposed
from autoplan.ops.records.answers import Drawn
from autoplan.values import Op, Ref

# Regions that become one box: attention written out in steps, and scans (state-space and linear attention).
#
# Attention may be one fused op or matmul, scale, mask, softmax, dropout, matmul: both are drawn as one `attend` box
# with ports q, k, v and bias. A scan (Mamba, RWKV, delta rules) is a web of products, cumulative sums and writes that
# every model implements differently: each web of such ops and glue in one module becomes one `scan` box, which keeps
# the per-head parameters that the web reads (decay, skip, step bias).

# Kinds allowed between the scores and the probabilities, and those that transform probabilities.
_BETWEEN = {"softmax", "add", "mul", "mix", "cat", "split", "scale", "shift", "pick", "scatter", "write", "sum", "norm"}
_SCAN_CORE = {"matmul", "cumsum"}  # or writes in a loop over time, with arithmetic
_ARITHMETIC = {"mul", "add", "mix", "scale", "shift"}
_GLUE = _SCAN_CORE | _ARITHMETIC | {"write", "cat", "sum", "softmax", "pick", "scatter", "statistic"}


def draw_attention(flow: Flow, first: int, second: int, module: str) -> int | None:
    """Draw probabilities @ values as an `attend` box, if the first operand comes from a softmax of scores."""
    probabilities, values = (first, second) if _is_softmax_of_scores(flow, first) else (second, first)
    if not _is_softmax_of_scores(flow, probabilities):
        return None
    box = flow.number_of_nodes()
    flow.add_node(box, node=Node("attend", module))
    for source, port in _sources_of_scores(flow, probabilities):
        _arrow(flow, source, box, port)
    _arrow(flow, values, box, "v")
    return box


def _is_softmax_of_scores(flow: Flow, box: int) -> bool:
    """Return whether some way up from `box` through joins meets a softmax and then a product of activations."""
    seen, waiting, is_softmax = set(), [(box, False)], False
    while waiting:
        current, below_softmax = waiting.pop()
        if (current, below_softmax) in seen:
            continue
        seen.add((current, below_softmax))
        kind = node_of(flow, current).kind
        if kind == "matmul":
            is_softmax = is_softmax or below_softmax
        elif kind in _BETWEEN:
            passed = below_softmax or kind == "softmax"
            waiting.extend((source, passed) for source in flow.predecessors(current))
    return is_softmax


def _sources_of_scores(flow: Flow, probabilities: int) -> list[tuple[int, str]]:
    """Return the sources of the scores: both sides of each product of activations, and everything added on the way."""
    scores: list[tuple[int, str]] = []
    seen, waiting = {probabilities}, [probabilities]
    while waiting:
        for source in flow.predecessors(waiting.pop()):
            if source in seen:
                continue
            seen.add(source)
            kind = node_of(flow, source).kind
            if kind == "matmul":
                for operand in flow.predecessors(source):
                    ports = flow.edges[operand, source]["ports"]
                    scores += [(operand, "q")] * ("left" in ports) + [(operand, "k")] * ("right" in ports)
            elif kind in _BETWEEN and (kind in ("softmax", "add", "mix", "cat") or _has_scores(flow, source)):
                waiting.append(source)
            else:
                scores.append((source, "bias"))
    return scores


def _has_scores(flow: Flow, box: int) -> bool:
    """Return whether a way up from here, through the allowed kinds, reaches a product of activations."""
    kind = node_of(flow, box).kind
    return kind == "matmul" or (kind in _BETWEEN and any(_has_scores(flow, up) for up in flow.predecessors(box)))


def _arrow(flow: Flow, source: int, target: int, port: str) -> None:
    ports = flow.edges[source, target]["ports"] if flow.has_edge(source, target) else frozenset[str]()
    flow.add_edge(source, target, ports=ports | ({port} - {""}))


def prune(flow: Flow) -> None:
    """Remove boxes without readers and without parameters: halves of a rotation, scores of an attention."""
    waiting = [box for box in flow if not flow.out_degree(box)]
    while waiting:
        box = waiting.pop()
        if box not in flow or flow.out_degree(box):
            continue
        node = node_of(flow, box)
        if node.kind not in ("output", "input") and not node.parameters:
            waiting.extend(flow.predecessors(box))
            flow.remove_node(box)


def collapse_scans(flow: Flow) -> None:
    """Replace each web of glue that holds a scan's op by one box."""
    glue = {box for box in flow if _is_glue(flow, box)}
    lateness = _lateness(flow, glue)
    webs: nx.Graph[int] = nx.Graph()
    webs.add_nodes_from(sorted(glue))
    webs.add_edges_from((a, b) for a, b in flow.edges if {a, b} <= glue and lateness[a] == lateness[b])
    for members in list(nx.connected_components(webs)):
        kinds = {node_of(flow, box).kind for box in members}
        if len(members) > 1 and (kinds & _SCAN_CORE or ("write" in kinds and kinds & _ARITHMETIC)):
            _collapse(flow, sorted(members))


def _lateness(flow: Flow, glue: set[int]) -> dict[int, int]:
    """Return the number of boundaries on the longest way to the end: other boxes, and changes of module. Boxes of one
    web have one lateness: no way leads out of it and back in, so it can become one box."""
    late: dict[int, int] = {}
    for box in reversed(list(nx.topological_sort(flow))):
        module = node_of(flow, box).module
        late[box] = max(
            (late[r] + (r not in glue or node_of(flow, r).module != module) for r in flow.successors(box)), default=0
        )
    return late


def _is_glue(flow: Flow, box: int) -> bool:
    node = node_of(flow, box)
    if node.kind == "split":
        return all(_is_glue(flow, source) for source in flow.predecessors(box))
    return node.kind in _GLUE


def _collapse(flow: Flow, members: list[int]) -> None:
    inside = set(members)
    parameters = tuple(dict.fromkeys(name for box in members for name in node_of(flow, box).parameters))
    sources = {source for member in members for source in flow.predecessors(member)} - inside
    box = _attention_among(flow, sources)
    if box is None:
        box = max(flow) + 1
        flow.add_node(box, node=Node("scan", node_of(flow, members[0]).module, parameters))
        for source in sorted(sources):
            _arrow(flow, source, box, "")
    else:  # arithmetic on an attention's own ingredients (a sink in the denominator) is part of it
        own = node_of(flow, box)
        flow.nodes[box]["node"] = replace(own, parameters=own.parameters + parameters)
    for member in members:
        for reader in set(flow.successors(member)) - inside:
            for port in flow.edges[member, reader]["ports"] or {""}:
                _arrow(flow, box, reader, port)
    _absorb_parameters(flow, box)
    flow.remove_nodes_from(members)


def _attention_among(flow: Flow, sources: set[int]) -> int | None:
    """Return the attention among the sources, if all other sources are sources of that attention, too."""
    for box in sorted(sources):
        others = sources - {box} - set(flow.predecessors(box))
        if node_of(flow, box).kind == "attend" and all(node_of(flow, other).kind == "parameter" for other in others):
            return box
    return None


def _absorb_parameters(flow: Flow, box: int) -> None:
    """Move parameters that only the web reads into its box."""
    for source in list(flow.predecessors(box)):
        node = node_of(flow, source)
        if node.kind == "parameter" and flow.out_degree(source) == 1:
            own = node_of(flow, box)
            flow.nodes[box]["node"] = replace(own, parameters=own.parameters + node.parameters)


# Boxes that read parameters: contractions, lookups, convolutions, norms, scales; and attention, which reads none.
#
# Each function draws one op on the canvas and returns the value of its result. The dims of the weight are named by
# their function ("in" is contracted, "out" is free), whatever order the parameter stores them in.


def lookup(canvas: Canvas, op: Op, tensors: Sequence[int], choices: set[int]) -> Value | None:
    """Draw table[index]. Weights selected for chosen experts stay weights, and so do the biases selected with them."""
    table, index = tensors[0], tensors[1:]
    view = canvas.value(table).weight
    if view is None:
        return None
    stacked = len(canvas.shape(view.parameter)) > 2 or choices.intersection(index)
    if op_record(op.name).drawn is Drawn.ROWS and (stacked or len(canvas.shape(table)) < 2):
        chosen = next((canvas.value(t).node for t in index if canvas.value(t).node is not None), view.chosen)
        rows = view.dims[:1] * len(canvas.shape(index[0]))  # the index's dims run over the weight's first
        return Value(weight=replace(view, dims=rows + view.dims[1:], chosen=chosen))
    dims = (("rows", canvas.dim(view.parameter, view.dims[0])), ("width", canvas.dim(view.parameter, view.dims[1])))
    box = canvas.add(Node("embedding", op.module, (canvas.name(view.parameter),), dims))
    for tensor in index:
        source = canvas.input_box() if canvas.value(tensor).from_input else canvas.value(tensor).node
        if source is not None:
            canvas.join(source, box, "index")
    return Value(node=box)


def contraction(canvas: Canvas, op: Op) -> Value:
    """Draw a product that sums over a dim: of a value with a weight, or of two values."""
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
    read = operands[0] if weight is right.weight else operands[1]
    if data == Value() and len(canvas.shape(read)) < 2:  # power iteration with a vector, no layer
        return Value()
    parameter, dims = weight.parameter, weight.dims
    contracted, free = (dims[-1], dims[-2]) if transposed and len(dims) > 1 else (dims[-2:][0], dims[-1])
    named = [("in", canvas.dim(parameter, contracted))]
    if len(dims) > 1:
        named.append(("out", canvas.dim(parameter, free)))
    flattened = len(dims) == 2 and 0 in (contracted, free)  # a kernel viewed as one matrix, out x (in * size)
    stacked = len(canvas.shape(parameter)) > 2 and not flattened
    if stacked:
        others = [dim for dim in dims if dim is not None and dim not in (contracted, free)]
        named.append(("stack", canvas.dim(parameter, others[0] if others else 0)))
    names = (canvas.name(parameter), *map(canvas.name, weight.companions))
    node = Node("stacked" if stacked else "linear", op.module, names, tuple(named))
    if bias.weight is not None:
        node = replace(node, parameters=(*node.parameters, canvas.name(bias.weight.parameter)))
    source = canvas.box_of(data)
    canvas.multiplied.add(names[0])
    box = canvas.add(node, () if source is None else (source,))
    if weight.chosen is not None:
        canvas.join(weight.chosen, box, "choice")
    return canvas.new("add", op, (bias.node, box)) if bias.node is not None else Value(node=box)


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
    """Draw a convolution; grouped ones are "depthwise", where only the channels count."""
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
    """Draw a norm that is one op, such as layer_norm."""
    operands = [canvas.value(argument.id) for argument in op.args if isinstance(argument, Ref)]
    views = [operand.weight for operand in operands[1:] if operand.weight is not None]
    names = tuple(canvas.name(view.parameter) for view in views)
    dims = tuple(("over", canvas.dim(view.parameter, view.dims[-1])) for view in views[:1])
    source = canvas.box_of(operands[0])
    return Value(node=canvas.add(Node("norm", op.module, names, dims), () if source is None else (source,)))


def fused_attention(canvas: Canvas, op: Op) -> Value:
    """Draw an attention that is one op, such as scaled_dot_product_attention."""
    box = canvas.add(Node("attend", op.module))
    operands = [item for item in (*op.args, *op.kwargs.values()) if isinstance(item, Ref)]
    for port, operand in zip(("q", "k", "v", "bias", "bias", "bias"), operands, strict=False):
        source = canvas.box_of(canvas.value(operand.id))
        if source is not None:
            canvas.join(source, box, port)
    return Value(node=box)


def weighted(canvas: Canvas, op: Op, box: int, views: list[View]) -> Value:
    """Draw an elementwise op of one value and a parameter: a norm's own weight, a bias, or a scale or shift."""
    node = canvas.node(box)
    names = tuple(canvas.name(view.parameter) for view in views)
    dims = tuple(("over", canvas.dim(view.parameter, _last_dim(canvas, view))) for view in views[:1])
    if node.kind == "norm" and len(node.parameters) < 2:
        return canvas.change(box, replace(node, parameters=node.parameters + names, dims=node.dims or dims))
    if canvas.multiplied.intersection(names):
        return Value(node=box)  # a weight measured on its own input (spectral norm) is no scale
    kind = "shift" if op_record(op.name).drawn is Drawn.ADD else "scale"
    if kind == "shift" and _is_bias(canvas, node, views):
        return canvas.change(box, replace(node, parameters=node.parameters + names))
    return Value(node=canvas.add(Node(kind, op.module, names, dims), (box,)))


def _last_dim(canvas: Canvas, view: View) -> int | None:
    """Return the parameter's dim that the last dim of the view runs over; a vector has only one, however viewed."""
    if len(canvas.shape(view.parameter)) == 1:
        return 0
    return view.dims[-1] if view.dims else None


def _is_bias(canvas: Canvas, contraction: Node, views: list[View]) -> bool:
    """Return whether the module that owns a contraction adds a vector of its width: its bias, written apart."""
    out = contraction.dim("out")
    names = (*contraction.parameters, *(canvas.name(view.parameter) for view in views))
    widths = [canvas.shape(view.parameter)[-1] for view in views if canvas.shape(view.parameter)]
    alone = contraction.kind in ("linear", "stacked") and len(contraction.parameters) == 1
    return alone and len({name.rpartition(".")[0] for name in names}) == 1 and out is not None and widths == [out.size]
