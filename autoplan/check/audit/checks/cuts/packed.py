"""packed: a fused weight (query, key, value; gate, up) is cut as if it were one.

A plain cut gives rank 0 all queries and no value; shapes stay legal and the output is wrong. Each segment must be cut
by itself. (transformers' packed styles know two equal segments, no more.)
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited, Weight
from autoplan.common.layout import Layout
from autoplan.values import Finding

NAME = "packed"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    groups: dict[tuple[str, str], list[Weight]] = {}
    for weight in subject.weights:
        said, fact = weight.said, weight.fact
        if said.line is None or said.dim is None or said.dim != fact.dim or fact.layout is None:
            continue
        packed = not Layout.parse(fact.layout).one_run(subject.tp_size) and "@" not in fact.layout
        if (packed or said.parts > 1) and subject.wanted_rows(weight) != said.rows and weight.is_matrix:
            groups.setdefault((said.line.pattern, fact.layout), []).append(weight)
    for (pattern, layout), weights in groups.items():
        first = weights[0]
        how = "in two equal halves" if first.said.parts > 1 else "as one run of rows"
        names = [weight.name for weight in weights]
        text = f"{first.name} holds {_segments(layout)} along dim {first.fact.dim}, but is sharded {how}"
        hint = "shard each segment separately (autoplan's packed_colwise does), or replicate it"
        if first.said.line is not None and first.said.line.style == "colwise_gather_output":
            continue
        yield subject.suspect(NAME, pattern, text, hint, names=names)


def _segments(layout: str) -> str:
    parts = Layout.parse(layout)
    if parts.kind != "concatenation":
        return "interleaved segments"
    return f"segments of {' + '.join(str(part.size) for part in parts.parts)} rows"
