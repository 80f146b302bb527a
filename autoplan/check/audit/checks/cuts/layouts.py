"""layouts: a weight is cut along a dim that cannot be cut, or into other rows than its neighbours.

Each dim is an axis that other tensors share; a cut along the wrong one meets them with other rows, or with a part where
all was expected.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import EXACT_ALONE, Audited, Weight
from autoplan.common.layout import Layout
from autoplan.values import Finding
from autoplan.values.reasons import sentence

NAME = "layouts"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[Weight]] = {}
    for weight in subject.weights:
        line, reason = weight.said.line, _wrong_cut(subject, weight)
        if line is not None and reason and line.style not in EXACT_ALONE:
            groups.setdefault((line.pattern, reason), []).append(weight)
    for (pattern, reason), weights in groups.items():
        names = [weight.name for weight in weights]
        text, right = f"shards dim {weights[0].said.dim} of {names[0]}: {reason}", weights[0].fact.dim
        hint = "replicate it" if right is None else f"shard dim {right}"
        yield subject.suspect(NAME, pattern, text, hint, names=names)


def _wrong_cut(subject: Audited, weight: Weight) -> str:
    said, fact = weight.said, weight.fact
    if said.dim is None or not weight.is_matrix:
        return ""
    if said.dim != fact.dim:
        held = [c for c in subject.solution.classes if (fact.names[0], said.dim) in c.parameters]
        whys = sentence(c.reason for c in held if c.reason is not None)
        other = f"its neighbours are sharded along dim {fact.dim}" if fact.dim is not None else ""
        return "; ".join(filter(None, [whys, other])) or "no neighbour is sharded that way"
    if subject.wanted_rows(weight) != said.rows and Layout.parse(fact.layout or "1").contiguous(subject.tp_size):
        rows = len(subject.wanted_rows(weight)[0])
        return f"rank 0 holds other rows than its neighbours, whose shards have {rows} of {fact.shape[said.dim]}"
    return ""
