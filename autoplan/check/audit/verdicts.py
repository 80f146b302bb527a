"""One word for each entry of a plan (same, costlier, different, wrong, or dead), and what a page draws of it.

*same*: it cuts what analysis would cut, in the same rows. *costlier*: it is right, and holds or moves more (a weight
left whole, an output gathered). *different*: right, and cut in another way. *wrong*: a finding at error level is about
it. *dead*: it matches nothing, and so does nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from autoplan.check.audit.lines import Line
from autoplan.check.audit.subject import Audited, Said, Weight
from autoplan.common.patterns import Universe, fold_names, is_under, matches
from autoplan.decide.plan.folding import Names, flow_of
from autoplan.values import AllGather, CutsOf, Drawn, Finding


def verdicts(subject: Audited, findings: Iterable[Finding]) -> dict[str, str]:
    """The verdict of every line, by pattern."""
    findings = tuple(findings)
    errors = [place for f in findings if f.level == "error" and f.kind != "follows" for place in f.about]
    dead = {finding.where for finding in findings if finding.check == "dead-keys"}
    return {
        line.pattern: "dead" if line.pattern in dead else _verdict(subject, line, errors) for line in subject.plan.lines
    }


def _verdict(subject: Audited, line: Line, errors: list[str]) -> str:
    weights = subject.of_line(line)
    names = [name for weight in weights for name in weight.names]
    if any(place == line.pattern or any(is_under(place, name) for name in names) for place in errors):
        return "wrong"
    kinds = {_kind(subject, weight) for weight in weights if weight.is_matrix} or {
        _kind(subject, weight) for weight in weights
    }
    gathers = line.style == "colwise_gather_output" and not any(
        matches(gather.pattern, weight.module)
        for weight in weights
        for gather in subject.solution.runtime.of(AllGather)
    )
    if kinds <= {"same"}:
        return "costlier" if gathers else "same"
    return "costlier" if kinds <= {"same", "whole"} else "different"


def _kind(subject: Audited, weight: Weight) -> str:
    said, fact = weight.said, weight.fact
    if said.dim is None:
        return "same" if fact.dim is None else "whole"
    if fact.dim == said.dim and subject.wanted_rows(weight) == said.rows:
        return "same"
    return "different"


def held_bytes(subject: Audited) -> tuple[int, int]:
    """Bytes of parameters that rank 0 holds: under this plan, and as analysis would split."""
    ours = theirs = 0
    for weight in subject.weights:
        fact, said = weight.fact, weight.said
        size = fact.shape[said.dim] if said.dim is not None else 1
        theirs += weight.bytes * len(said.rows[0]) // size if said.dim is not None and said.rows else weight.bytes
        if fact.dim is None:
            ours += weight.bytes
        else:
            ours += weight.bytes * len(subject.wanted_rows(weight)[0]) // fact.shape[fact.dim]
    return theirs, ours


def unsplit_share(subject: Audited) -> float:
    """Of the bytes of matrices that can be split, the share that this plan leaves whole."""
    able = [weight for weight in subject.weights if weight.is_matrix and weight.fact.dim is not None]
    total = sum(weight.bytes for weight in able)
    return round(sum(weight.bytes for weight in able if weight.said.dim is None) / total, 4) if total else 0.0


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
