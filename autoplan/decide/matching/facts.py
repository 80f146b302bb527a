"""The picture with facts: layouts and axis classes written on the dims of boxes, and which outputs are gathered."""

from __future__ import annotations

from dataclasses import replace

from autoplan.analyse.picture.flow import Dim, Flow, Node, node_of
from autoplan.analyse.solve import Solution
from autoplan.values import refs

__all__ = ["gathered_parameters", "with_facts"]


def with_facts(flow: Flow, solution: Solution) -> Flow:
    """A copy of the picture in which every dim knows how it lies on ranks and which axes it has."""
    layouts = {
        (name, fact.dim): fact.layout for fact in solution.parameters if fact.dim is not None for name in fact.names
    }
    classes: dict[tuple[str, int], set[str]] = {}
    for fact in solution.classes:
        for name, dim in fact.parameters:
            classes.setdefault((name, dim), set()).add(str(fact.id))
    gathered = gathered_parameters(solution)

    def know(dim: Dim) -> Dim:
        place = (dim.parameter, dim.dim if dim.dim is not None else -1)
        return replace(dim, layout=layouts.get(place), classes=frozenset(classes.get(place, ())))

    def informed(node: Node) -> Node:
        dims = tuple((field, know(dim)) for field, dim in node.dims)
        return replace(node, dims=dims, gathered=not gathered.isdisjoint(node.parameters))

    known = flow.copy()
    for box in known:
        known.nodes[box]["node"] = informed(node_of(flow, box))
    return known


def gathered_parameters(solution: Solution) -> frozenset[str]:
    """Weights whose product is gathered from all ranks."""
    axes, tensors = solution.axes, solution.trace.tensors
    calls = [call for call in solution.trace.calls if not axes.gathered.isdisjoint(range(*call.ops))]
    read = {axes.sources[t] for call in calls for t in refs((call.args, call.kwargs)) if t in axes.sources}
    return frozenset(name for weight in read if len(axes.of(weight)) > 1 for name in tensors[weight].names)
