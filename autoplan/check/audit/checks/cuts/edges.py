"""edges: what one layer hands on is not what the next one takes.

Each style says how its input and output lie on ranks (whole, a shard, a part of the sequence). From a weight to the
next that contract the same axis the two must agree; where shapes fit by chance nothing raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from autoplan.analyse.picture.flow import Node, node_of
from autoplan.check.audit.subject import Audited, Weight
from autoplan.common.patterns import starred
from autoplan.values import Finding

NAME = "edges"
Lies = Literal["whole", "a shard", "a part of the sequence", ""]
_GATHERED: tuple[Lies, Lies] = ("a part of the sequence", "whole")
_CONTRACTIONS = ("linear", "stacked", "conv")
_SHARDED_OUT, _SHARDED_IN = ("colwise", "packed_colwise"), ("rowwise", "packed_rowwise")
_KNOWN = (*_SHARDED_OUT, *_SHARDED_IN, "colwise_gather_output", "rowwise_split_input", "replicate")


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    if subject.plan.plan is not None or subject.level == "note":
        return  # what a plan of ours hands on is derived, not said; and what is exact agrees
    groups: dict[tuple[str, str, Lies, Lies], list[tuple[Weight, Weight]]] = {}
    # Norms and prepared inputs may gather the sequence between two layers
    gathers = any(line.style in ("sequence_parallel", "local_params") for line in subject.plan.lines)
    for giver, taker in _edges(subject):
        gives, takes = _lies(subject, giver, "output"), _lies(subject, taker, "input")
        if gathers and (gives, takes) == _GATHERED:
            continue
        if gives and takes and gives != takes:
            groups.setdefault((starred(giver.module), starred(taker.module), gives, takes), []).append((giver, taker))
    for (_, _, gives, takes), pairs in groups.items():
        givers, takers = zip(*pairs, strict=True)
        text = f"outputs {gives}, but {takers[0].module} expects {takes}"
        hint = f"shard both or neither: {subject.folded(t.module for t in takers)} reads it"
        where = subject.patterns(giver.module for giver in givers)
        yield subject.suspect(NAME, where, text, hint, names=[w.name for w in (*givers, *takers)])


def _edges(subject: Audited) -> Iterator[tuple[Weight, Weight]]:
    """Weights of which the second contracts the very axis that the first makes."""
    flow, seen = subject.flow, set()
    for box in flow:
        taken = _weight(subject, node_of(flow, box), "in")
        if taken is None:
            continue
        for other in _makers(flow, box):
            given = _weight(subject, node_of(flow, other), "out")
            if given is None or not given[1] & taken[1] or (given[0].name, taken[0].name) in seen:
                continue
            seen.add((given[0].name, taken[0].name))
            yield from subject.alike(given[0], taken[0])


def _makers(flow: Any, box: int) -> Iterator[int]:
    """The contractions that a box's data come from, through whatever has no weights to contract."""
    todo, seen = list(flow.predecessors(box)), set()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if node_of(flow, current).kind in _CONTRACTIONS:
            yield current
        else:
            todo += flow.predecessors(current)


def _weight(subject: Audited, node: Node, side: str) -> tuple[Weight, set[int]] | None:
    """The weight that a box contracts, and the axes of its input or output dim."""
    dim = node.dim(side) if node.kind in _CONTRACTIONS else None
    if dim is None or dim.dim is None or dim.parameter not in subject.by_name:
        return None
    place = (subject.by_name[dim.parameter].fact.names[0], dim.dim)
    return subject.by_name[dim.parameter], {fact.id for fact in subject.solution.classes if place in fact.parameters}


def _lies(subject: Audited, weight: Weight, side: Literal["input", "output"]) -> Lies:
    """Return how a layer's input or output lies on ranks by its style; "" if unknown."""
    line = weight.said.line
    if line is None:
        return "whole"
    if line.style not in _KNOWN:
        return ""
    # What a style object of torch itself says about this side comes first
    layouts = getattr(subject.plan.raw.get(line.pattern), f"{side}_layouts", None)
    layout = layouts[0] if isinstance(layouts, (list, tuple)) and layouts else layouts
    dim = getattr(layout, "dim", None)
    if dim is not None:
        return "a shard" if dim in (-1, 2) else "a part of the sequence"
    sharded = line.style in (_SHARDED_OUT if side == "output" else _SHARDED_IN)
    return "a shard" if sharded and type(layout).__name__ != "Replicate" else "whole"
