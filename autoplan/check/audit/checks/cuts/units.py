"""units: what is cut is not divisible by the tensor-parallel size.

Features may be divisible where heads are not: 2 key/value heads of 128 features over 4 ranks leave half a head each.
The unit is the head, the group, the expert, the channel.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from autoplan.axes.terms import factors, find, segments
from autoplan.check.audit.subject import EXACT_ALONE, Audited, Weight
from autoplan.common.layout import Layout
from autoplan.values import Finding
from autoplan.values.reasons import DoesNotDivide

NAME = "units"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    if subject.plan.plan is not None:
        return
    legal = ", ".join(map(str, subject.solution.legal_tp))
    groups: dict[tuple[str, int, int], list[Weight]] = {}
    for weight in subject.weights:
        unit = _broken_unit(subject, weight)
        if unit is not None and weight.said.line is not None:
            groups.setdefault((weight.said.line.pattern, *unit), []).append(weight)
    for (pattern, count, width), weights in groups.items():
        tp = subject.tp_size
        text = f"{weights[0].name} has {count} units of {width} rows, not divisible by tp={tp}"
        hint = f"valid tp: {legal}; or replicate it"
        names = [weight.name for weight in weights]
        if subject.ran_at_full_size:
            yield subject.suspect(NAME, pattern, text, hint, names=names)
        else:
            proof = f"a rank would hold {count * width / tp:g} rows: {count / tp:g} units"
            yield Finding(NAME, "error", pattern, text, hint, proof=proof)


def _broken_unit(subject: Audited, weight: Weight) -> tuple[int, int] | None:
    """(number of units, rows in a unit) where a cut leaves parts of units on ranks."""
    said, fact = weight.said, weight.fact
    if said.dim is None or not weight.is_matrix or said.line is None or said.line.style in EXACT_ALONE:
        return None
    size = fact.shape[said.dim]
    if fact.dim == said.dim and fact.layout is not None and "@" in fact.layout:
        # Key/value heads shared by groups of ranks: a plain cut is right only where it gives the same rows.
        units = next((part.size for part in Layout.parse(fact.layout).parts if part.split), 1)
        same = subject.wanted_rows(weight) == said.rows
        return None if same or units % subject.tp_size == 0 else (units, size // units)
    for axis in subject.solution.classes:
        if (fact.names[0], said.dim) in axis.parameters and isinstance(axis.reason, DoesNotDivide):
            width = _width(subject, fact.names[0], said.dim, axis.size)
            if width > 1 or (subject.plan.dialect == "torch" and size % subject.tp_size):
                return axis.size, width
    return None


def _width(subject: Audited, parameter: str, dim: int, units: int) -> int:
    """Return the rows of one unit: what follows it in the segments of this dim."""
    term = subject.solution.axes.of(subject.solution.trace.by_name[parameter])[dim]
    for segment in segments(find(term)):
        sizes = [find(part).size for part in factors(find(segment))]
        if units in sizes:
            return prod(sizes[sizes.index(units) + 1 :])
    return 1
