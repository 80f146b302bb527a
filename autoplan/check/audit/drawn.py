"""What a page draws of plans that somebody wrote: for each of them, what it does to which weights, in few lines."""

from __future__ import annotations

from autoplan.check.audit.subject import Audited, Said
from autoplan.common.patterns import Universe, fold_names
from autoplan.decide.plan.flow import flow_of
from autoplan.decide.plan.folding import Names
from autoplan.values import CutsOf, Drawn


def drawn_of(*subjects: Audited) -> Drawn:
    """All of one model."""
    trace = subjects[0].solution.trace
    flow = flow_of(trace, subjects[0].stacks, Names(trace))
    return Drawn(flow, tuple(_side(subject) for subject in subjects))


def _side(subject: Audited) -> CutsOf:
    groups: dict[tuple[int | None, str], list[str]] = {}
    for weight in subject.weights:
        groups.setdefault((weight.said.dim, cut_text(weight.said)), []).append(weight.name)
    known = Universe(name for names in groups.values() for name in names)
    cuts = ((pattern, dim, text) for (dim, text), names in groups.items() for pattern in fold_names(names, known))
    return CutsOf(subject.plan.name, tuple(cuts))


def gathers(said: Said) -> bool:
    return said.dim is not None and said.line is not None and said.line.style == "colwise_gather_output"


def cut_text(said: Said) -> str:
    """What is done to a weight, for people."""
    if said.dim is None:
        return "whole"
    gathered = ", output gathered" if gathers(said) else ""
    return f"cut along dim {said.dim}, {len(said.rows[0])} rows on rank 0, from {said.rows[0][0]}{gathered}"
