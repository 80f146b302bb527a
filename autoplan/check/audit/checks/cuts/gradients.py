"""gradients: a gradient that ranks must sum and do not, or sum twice.

A whole weight that meets only this rank's heads (query and key norms, per-head scalars) gets a part of its gradient on
each rank: forward is exact, and training drifts. A sum of whole gradients makes them tp times too large.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited, Weight
from autoplan.common.patterns import starred
from autoplan.values import Finding

NAME = "gradients"
_PAYS = "replicated_with_grad_allreduce"
_SUMMED = {
    "torch": "give it SequenceParallel(sequence_dim=2, use_local_output=True)",
    "deepspeed": "give it {'partition_type': 'skip', 'grad_allreduce': True}",
}


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    if subject.plan.plan is not None or subject.level == "note":
        return
    wrong = {starred(name): name for name in subject.wrong_names}
    missing: dict[str, list[Weight]] = {}
    twice: dict[str, list[Weight]] = {}
    for weight in subject.weights:
        style = weight.said.line.style if weight.said.line else ""
        pays = style == _PAYS
        showed = subject.numbers is None or any(starred(name) in wrong for name in weight.names)
        if not showed or weight.said.dim is not None:
            continue
        if weight.fact.gradient != "local" and not pays:
            missing.setdefault(starred(weight.name), []).append(weight)
        elif weight.fact.gradient == "local" and pays and weight.fact.dim is None:
            twice.setdefault(starred(weight.name), []).append(weight)
    unsummed = "is replicated, but its partial gradients are never summed"
    summed = "has its full gradient on every rank, but the plan sums it again"
    style = _SUMMED.get(subject.plan.dialect, f"give it the style {_PAYS!r}")
    problems = [(weights, unsummed, style) for weights in missing.values()]
    problems += [(weights, summed, "remove its row") for weights in twice.values()]
    for weights, text, hint in problems:
        names = [weight.name for weight in weights]
        alike = [wrong[starred(name)] for name in names if starred(name) in wrong]
        text = f"{names[0]} {text}"
        yield subject.suspect(NAME, subject.patterns(names), text, hint, names=[*names, *alike])
