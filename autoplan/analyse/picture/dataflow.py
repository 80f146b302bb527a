"""The dataflow of a run, reduced to what one would draw on a whiteboard: a networkx graph of few boxes.

A trace has thousands of ops; a picture of a block has ten boxes. Roles are recognised on the picture, which this file
draws. These ops are contracted, and these stay:

- an elementwise op or a view with one data source is passed through (an activation function, a cast, a transpose);
- several sources that all come from one box and keep its size are one value again (rotary embedding, x * sigmoid(x));
- a weight contraction, a lookup, a convolution, a norm, an attention, a scan each become one box with its parameters;
- `split`, `cat`, and two-source joins (`mul`, `add`) stay: with splits contracted away a packed gate-up projection
  looks like a plain one;
- constants (masks, rotary tables, positions) are not drawn.

A write into a view changes the base, so the base is a `write` box from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import prod

from autoplan.analyse.picture.boxes import (
    collapse_scans,
    contraction,
    convolution,
    fused_attention,
    fused_norm,
    lookup,
    prune,
    weighted,
)
from autoplan.analyse.picture.flow import CONSTANT, Canvas, Flow, Node, Value, View, dequantised, follow_view
from autoplan.ops import op_record
from autoplan.ops.creation import makes_anew
from autoplan.ops.records.answers import Drawn, Shows
from autoplan.ops.records.record import writes_in_place
from autoplan.values import Op, Ref, Trace, refs

_SHOWN = (Shows.RESHAPED, Shows.VIEWED)  # results share memory with their source
# Boxes of ops along a dim, and of writes into positions.
_KINDS = {
    Drawn.STATISTIC: "statistic",
    Drawn.SOFTMAX: "softmax",
    Drawn.TOPK: "topk",
    Drawn.CUMSUM: "cumsum",
    Drawn.SUM: "sum",
    Drawn.PICK: "pick",
    Drawn.ROWS: "pick",
    Drawn.SCATTER: "scatter",
}
_JOINS = {Drawn.MUL: "mul", Drawn.CAT: "cat", Drawn.ADD: "add"}


def dataflow(trace: Trace) -> Flow:
    """Draw the picture of a trace."""
    artist = _Artist(trace)
    for op in trace.ops:
        artist.draw(op)
    artist.draw_outputs()
    flow = artist.canvas.flow
    prune(flow)
    collapse_scans(flow)
    prune(flow)
    # The box of each tensor that enters or leaves a module
    crossings = (tensor for visit in trace.visits for _, tensor in (*visit.inputs, *visit.outputs))
    boxes = ((tensor, artist.canvas.value(tensor).node) for tensor in dict.fromkeys(crossings))
    flow.graph["tensors"] = {tensor: box for tensor, box in boxes if box is not None and box in flow}
    return flow


class _Artist:
    """Follows the ops of a trace and draws them."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.canvas = Canvas(trace)
        # Index tensors that select from stacked (3-D) weights: what they select from smaller ones are biases of those
        chosen: set[int] = set()
        for op in self.trace.ops:
            if op_record(op.name).drawn is Drawn.ROWS and isinstance(op.args[0], Ref):
                source = self.trace.tensors[op.args[0].id]
                if source.kind == "parameter" and len(source.shape) > 2:
                    chosen.update(refs(op.args[1:]))
        self.choices = chosen

    def draw(self, op: Op) -> None:
        """Draw one op: its results get values, and views that it writes to change their base."""
        canvas, outputs = self.canvas, op.results
        if not outputs:
            return
        read = refs(op.args[1:2]) if op_record(op.name).overwrites else op.reads
        tensors = list(dict.fromkeys(read))
        if op_record(op.name).shows in _SHOWN and tensors:
            for output in outputs:
                canvas.bases[output] = canvas.bases.get(tensors[0], tensors[0])
        results = self._results(op, tensors, outputs)
        in_place = writes_in_place(op.name)
        for output, result in zip(outputs, results, strict=False):
            if in_place and canvas.bases.get(output, output) != output:
                self._write(op, canvas.bases[output], output, result)
            canvas.values[output] = result
            if result.node is not None:
                canvas.measure(result.node, output)

    def _write(self, op: Op, base: int, view: int, result: Value) -> None:
        """Update the base of a view that was written to: it holds the new value in addition to its old one."""
        canvas = self.canvas
        before, after = canvas.value(base), canvas.box_of(result)
        canvas.written.add(base)
        if after is None or (before.node is not None and before.node in canvas.ancestry(after)):
            return
        if prod(canvas.shape(view)) == prod(canvas.shape(base)):
            canvas.values[base] = result
            return
        target = before.node
        if target is None or canvas.node(target).kind != "write" or canvas.flow.out_degree(target):
            target = canvas.add(Node("write", op.module), () if before.node is None else (before.node,))
        canvas.join(after, target)
        canvas.values[base] = Value(node=target)

    def _results(self, op: Op, tensors: list[int], outputs: Sequence[int]) -> list[Value]:
        canvas = self.canvas
        values = [canvas.value(tensor) for tensor in tensors]
        weights = [value.weight for value in values if value.weight is not None]
        data = [tensor for tensor, value in zip(tensors, values, strict=True) if value.node is not None]
        drawn = op_record(op.name).drawn
        if drawn in (Drawn.LOOKUP, Drawn.ROWS):
            result = lookup(canvas, op, tensors, self.choices)
            if result is not None:
                return [result]
        if makes_anew(op.name):
            return [CONSTANT] * len(outputs)
        if not data and not weights:
            reshaped = len(values) == 1 and values[0].from_input and op_record(op.name).shows in (*_SHOWN, Shows.COPIED)
            return [Value(from_input=reshaped)] * len(outputs)
        if drawn is Drawn.CONTRACTION:
            return [contraction(canvas, op)] * len(outputs)
        stored = next((view for view in weights if self.trace.tensors[view.parameter].quantised), None)
        if not data and stored is not None:
            return [Value(weight=self._dequantised(op, stored, weights, tensors, output)) for output in outputs]
        if not data and len({view.parameter for view in weights}) == 1:
            source = next(t for t, value in zip(tensors, values, strict=True) if value.weight is not None)
            before = canvas.shape(source)
            return [Value(weight=follow_view(op, weights[0], before, canvas.shape(output))) for output in outputs]
        if data:
            special = self._special(op, data[0], outputs)
            if special is not None:
                return special
        return [self._general(op, tensors, output) for output in outputs]

    def _dequantised(self, op: Op, stored: View, weights: list[View], tensors: list[int], output: int) -> View:
        canvas, view = self.canvas, stored
        if len({view.parameter for view in weights}) == 1:
            source = next(t for t in tensors if canvas.value(t).weight is stored)
            view = follow_view(op, stored, canvas.shape(source), canvas.shape(output))
        return dequantised(view, weights, canvas.shape(stored.parameter), canvas.shape(output))

    def _special(self, op: Op, data: int, outputs: Sequence[int]) -> list[Value] | None:
        """Draw ops that have a drawing of their own."""
        drawn = op_record(op.name).drawn
        if drawn is Drawn.CONVOLUTION:
            box = convolution(self.canvas, op)
            return None if box is None else [box]
        if drawn is Drawn.NORM:
            return [fused_norm(self.canvas, op)] * len(outputs)
        if drawn is Drawn.ATTENTION:
            return [fused_attention(self.canvas, op)] * len(outputs)
        if drawn is Drawn.SPLIT:
            return [self._split(op, data, output) for output in outputs]
        if drawn is Drawn.GATED:
            source = self.canvas.value(data).node
            assert source is not None
            halves = [self.canvas.add(Node("split", op.module), (source,)) for _ in range(2)]
            return [self.canvas.new("mul", op, halves)]
        return None

    def _split(self, op: Op, tensor: int, output: int) -> Value:
        source = self.canvas.value(tensor)
        if source.node is None or prod(self.canvas.shape(tensor)) == prod(self.canvas.shape(output)):
            return source
        return self.canvas.new("split", op, (source.node,))

    def _general(self, op: Op, tensors: list[int], output: int) -> Value:
        """Draw the remaining ops: elementwise ops, reductions, joins."""
        canvas, drawn = self.canvas, op_record(op.name).drawn
        boxes = self._sources(op, tensors)
        views: list[View] = [v for v in (canvas.value(tensor).weight for tensor in tensors) if v is not None]
        if drawn in (Drawn.CAT, Drawn.CHOICE) or (views and not boxes):
            boxes += [canvas.parameter_box(view) for view in views]
            views = []
        boxes = list(dict.fromkeys(boxes))
        if not boxes:
            return CONSTANT
        if drawn in _KINDS:
            return canvas.new(_KINDS[drawn], op, boxes)
        if views and len(boxes) == 1:
            return weighted(canvas, op, boxes[0], views)
        boxes += [canvas.parameter_box(view) for view in views]
        activated = drawn is Drawn.ACTIVATION or any(canvas.value(tensor).activated for tensor in tensors)
        if len(boxes) == 1:
            return Value(node=boxes[0], activated=activated)
        result = self._together(op, boxes, output)
        assert result.node is not None
        if result.node in boxes:
            return replace(result, activated=activated)
        if canvas.node(result.node).kind == "mul":
            for tensor in tensors:
                source = canvas.value(tensor)
                if source.node is not None and source.activated:
                    canvas.join(source.node, result.node, "activated")
        return result

    def _sources(self, op: Op, tensors: Iterable[int]) -> list[int]:
        """Return the data sources; masks and indices made from data are ignored if other values carry gradient."""
        drawn = [(tensor, self.canvas.value(tensor).node) for tensor in tensors]
        carrying = [box for tensor, box in drawn if box is not None and self.trace.tensors[tensor].differentiable]
        keeps_indices = _KINDS.get(op_record(op.name).drawn) in ("pick", "scatter")
        return carrying if carrying and not keeps_indices else [box for _, box in drawn if box is not None]

    def _together(self, op: Op, boxes: list[int], output: int) -> Value:
        """Draw an op with several sources: parts of one value that come together again, or values that meet."""
        canvas = self.canvas
        lines = [canvas.ancestry(box) for box in boxes]
        common = [box for box in lines[0] if all(box in line for line in lines[1:])]
        plain = [box for box in boxes if canvas.node(box).kind != "statistic"]
        if common and plain and len(plain) < len(boxes):
            return self._normalised(op, plain[0])
        if len(plain) == 1 and len(boxes) == 2 and self._scaled_before_norm(plain[0], boxes):
            return canvas.change(plain[0], replace(canvas.node(plain[0]), kind="norm"))
        size = prod(canvas.shape(output))
        whole = next((box for box in common if canvas.size(box) == size), None)
        if whole is not None:
            return Value(node=whole)
        if op_record(op.name).drawn is Drawn.ADD and common:  # halves of a rotation, not yet concatenated
            return canvas.new("split", op, common[:1])
        return canvas.new(_JOINS.get(op_record(op.name).drawn, "mix"), op, boxes)

    def _scaled_before_norm(self, scaled: int, boxes: list[int]) -> bool:
        """Return whether this is (w * x) * rsqrt(mean(x * x)), with the weight applied before the statistic."""
        canvas = self.canvas
        statistic = next(box for box in boxes if box != scaled)
        sources = set(canvas.flow.predecessors(scaled))
        return canvas.node(scaled).kind == "scale" and sources <= set(canvas.ancestry(statistic)[1:])

    def _normalised(self, op: Op, source: int) -> Value:
        """Return x * rsqrt(mean(x * x)) as a norm whose weight is still to come."""
        node = self.canvas.node(source)
        if node.kind == "norm" and not node.parameters:
            return Value(node=source)
        return self.canvas.new("norm", op, (source,))

    def draw_outputs(self) -> None:
        """Draw one box for the outputs of the model, and what flows into it."""
        box = self.canvas.add(Node("output"))
        for visit in self.trace.visits:
            for path, tensor in visit.outputs if visit.parent is None else ():
                source = self.canvas.value(tensor).node
                if source is not None:
                    self.canvas.join(source, box, str(path[0]) if path else "")
