"""frozen: parameters that were frozen become trainable when the plan is carried out.

A style replaces each parameter by a new one, and a new parameter asks for gradients unless it is told otherwise. Frozen
base weights under adapters, frozen norms, frozen towers then train: the optimizer that is made afterwards takes them,
memory grows, and the run is another one than was asked for. (torch's `SequenceParallel` does it to norms; styles of
one's own do it easily.) The finding comes from carrying the plan out on simulated ranks, and names what thawed.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited, few
from autoplan.decide.plan.folding import starred
from autoplan.values import Finding

NAME = "frozen"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    thawed = {starred(name) for name in subject.extra.get("thawed", ())}
    groups: dict[str, list[str]] = {}
    for name in subject.parameters:
        if starred(name) in thawed:
            line = subject.plan.line_for(name)
            groups.setdefault("" if line is None else line.pattern, []).append(name)
    for pattern, names in groups.items():
        size = sum(subject.parameters[name].nbytes for name in names)
        text = f"{subject.folded(names)} was frozen and asks for gradients once the plan is carried out"
        proof = f"{names[0]}: requires_grad is False before and True after, on simulated ranks"
        hint = "let the style hand on requires_grad, or freeze again after sharding"
        places = (pattern,) if pattern else subject.patterns(names)
        yield Finding(NAME, "error", few(places), text, hint, size, proof, places=places)
