"""The picture with facts: layouts and axis classes written on the dims of boxes, and which outputs are gathered."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autoplan.analyse.flow import Dim, Flow, Node, node_of
from autoplan.analyse.solve import Solution

__all__ = ["gathered_modules", "with_facts"]


def with_facts(flow: Flow, solution: Solution) -> Flow:
    """A copy of the picture in which every dim knows how it lies on ranks and which axes it has."""
    layouts = {
        (name, fact.dim): fact.layout for fact in solution.parameters if fact.dim is not None for name in fact.names
    }
    classes: dict[tuple[str, int], set[str]] = {}
    for fact in solution.classes:
        for name, dim in fact.parameters:
            classes.setdefault((name, dim), set()).add(str(fact.id))
    gathered = gathered_modules(solution)

    def know(dim: Dim) -> Dim:
        place = (dim.parameter, dim.dim if dim.dim is not None else -1)
        return replace(dim, layout=layouts.get(place), classes=frozenset(classes.get(place, ())))

    def informed(node: Node) -> Node:
        dims = tuple((field, know(dim)) for field, dim in node.dims)
        return replace(node, dims=dims, gathered=node.module in gathered)

    known = flow.copy()
    for box in known:
        known.nodes[box]["node"] = informed(node_of(flow, box))
    return known


def gathered_modules(solution: Solution) -> frozenset[str]:
    """Modules whose output is gathered from all ranks."""
    hooks: Iterable[str] = (
        hook.pattern for hook in solution.runtime.hooks if hook.action == "gather" and hook.side == "output"
    )
    return frozenset(hooks)
