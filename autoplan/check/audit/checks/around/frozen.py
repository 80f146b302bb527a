"""frozen: parameters that were frozen become trainable when the plan is carried out.

A style replaces each parameter by a new one, which asks for gradients unless told otherwise (torch's `SequenceParallel`
does so to norms). The optimizer then trains base weights, norms or towers. Seen on simulated ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited
from autoplan.common.patterns import starred
from autoplan.emit.words import few
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
        text = f"{subject.folded(names)} was frozen, but requires grad once the plan is applied"
        proof = f"{names[0]}: requires_grad is False before and True after, on simulated ranks"
        hint = "preserve requires_grad in the style, or freeze again after sharding"
        places = (pattern,) if pattern else subject.patterns(names)
        yield Finding(NAME, "error", few(places), text, hint, size, proof, places=places)
