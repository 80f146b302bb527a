"""norms: a statistic (norm, softmax, top-k, mean) over an axis that is split.

Each rank then normalises by its own share. OLMo2's query and key norms run over all heads at once: cut by heads, a rank
knows only half of the mean square. Shapes fit, and the numbers are wrong. The statistic must be summed over ranks, or
the axis gathered before.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Subject
from autoplan.values import Finding

NAME = "norms"
_STATISTICS = frozenset({"norm", "softmax", "topk", "reduce", "reduce_lin", "cumsum"})


def run(subject: Subject, found: tuple[Finding, ...]) -> Iterator[Finding]:
    if subject.plan.plan is not None:
        return
    for axis in subject.solution.classes:
        kinds = {event for event in axis.events if any(word in event for word in _STATISTICS)} - {"reduce_lin"}
        if not kinds:
            continue
        weights = [subject.by_name[name] for name, _ in axis.parameters if name in subject.by_name]
        dims = dict(axis.parameters)
        cut = [w for w in weights if w.is_matrix and w.said.dim is not None and w.said.dim == dims.get(w.fact.names[0])]
        cut = [w for w in cut if w.said.line and "gather" not in w.said.line.style]
        over = [w.name for w in weights if not w.is_matrix]
        if cut:
            what = f" by {subject.folded(over)}" if over else ""
            text = f"{cut[0].name} is cut along an axis of {axis.size} over which a statistic is taken{what}"
            hint = "sum the statistic over ranks (autoplan does), or gather the output first (colwise_gather_output)"
            names = [*over, *(w.name for w in cut)]
            yield subject.suspect(NAME, subject.folded(w.module for w in cut), text, hint, names=names)
