"""Regions that become one box: attention written out in steps, and scans (state-space and linear attention).

Attention may be one fused op or matmul, scale, mask, softmax, dropout, matmul: both are drawn as one `attend` box with
ports q, k, v and bias. A scan (Mamba, RWKV, delta rules) is a web of products, cumulative sums and writes that no two
models spell alike: everything glued together in one module that holds such an op becomes one `scan` box, which keeps
the per-head parameters that the web reads (decay, skip, step bias).
"""

from __future__ import annotations

from dataclasses import replace

import networkx as nx

from autoplan.analyse.picture.flow import Flow, Node, node_of

__all__ = ["collapse_scans", "draw_attention", "prune"]

# What may lie between the scores and the probabilities, and what turns probabilities into others.
_BETWEEN = {"softmax", "add", "mul", "mix", "cat", "split", "scale", "shift", "pick", "scatter", "write", "sum", "norm"}
_SCAN_CORE = {"matmul", "cumsum"}  # or values written one by one, as loops over time do, besides arithmetic
_ARITHMETIC = {"mul", "add", "mix", "scale", "shift"}
_GLUE = _SCAN_CORE | _ARITHMETIC | {"write", "cat", "sum", "softmax", "pick", "scatter", "statistic"}


def draw_attention(flow: Flow, first: int, second: int, module: str) -> int | None:
    """probabilities @ values: an `attend` box, if the first operand comes from a softmax of scores."""
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
    """Does every way up from `box` through joins meet a softmax, and is there a product of activations above one?"""
    seen, waiting, found = set(), [(box, False)], False
    while waiting:
        current, below_softmax = waiting.pop()
        if (current, below_softmax) in seen:
            continue
        seen.add((current, below_softmax))
        kind = node_of(flow, current).kind
        if kind == "matmul":
            found = found or below_softmax
        elif kind in _BETWEEN:
            passed = below_softmax or kind == "softmax"
            waiting.extend((source, passed) for source in flow.predecessors(current))
    return found


def _sources_of_scores(flow: Flow, probabilities: int) -> list[tuple[int, str]]:
    """What the scores are made of: both sides of each product of activations, and everything added on the way."""
    found: list[tuple[int, str]] = []
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
                    found += [(operand, "q")] * ("left" in ports) + [(operand, "k")] * ("right" in ports)
            elif kind in _BETWEEN and (kind in ("softmax", "add", "mix", "cat") or _has_scores(flow, source)):
                waiting.append(source)
            else:
                found.append((source, "bias"))
    return found


def _has_scores(flow: Flow, box: int) -> bool:
    """Does a way up from here, through what may lie between, reach a product of activations?"""
    kind = node_of(flow, box).kind
    return kind == "matmul" or (kind in _BETWEEN and any(_has_scores(flow, up) for up in flow.predecessors(box)))


def _arrow(flow: Flow, source: int, target: int, port: str) -> None:
    ports = flow.edges[source, target]["ports"] if flow.has_edge(source, target) else frozenset[str]()
    flow.add_edge(source, target, ports=ports | ({port} - {""}))


def prune(flow: Flow) -> None:
    """Remove boxes that nobody reads and that no parameter lies in: halves of a rotation, scores of an attention."""
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
    """How many boundaries lie on the longest way to the end: other boxes, and changes of module.

    Boxes of one web have one lateness: no way leads out of it and back in, so it can become one box.
    """
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
    """The attention that is read, if all else that is read is what that attention reads, too."""
    for box in sorted(sources):
        others = sources - {box} - set(flow.predecessors(box))
        if node_of(flow, box).kind == "attend" and all(node_of(flow, other).kind == "parameter" for other in others):
            return box
    return None


def _absorb_parameters(flow: Flow, box: int) -> None:
    """Parameters that the web alone reads belong to it."""
    for source in list(flow.predecessors(box)):
        node = node_of(flow, source)
        if node.kind == "parameter" and flow.out_degree(source) == 1:
            own = node_of(flow, box)
            flow.nodes[box]["node"] = replace(own, parameters=own.parameters + node.parameters)
