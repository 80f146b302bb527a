"""experts: partial sums of experts, router and shared expert must each be summed once.

A plan that cuts expert weights must say what sums their output (`moe_tp_experts` on the module that holds them), and
leave the router whole: which expert is taken must be decided from all scores.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited, Weight
from autoplan.common.patterns import holders
from autoplan.values import Finding

NAME = "experts"
_SUMS = ("moe_tp_experts", "all_reduce")


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    if subject.plan.plan is not None:
        return
    for axis in subject.solution.classes:
        if not any("topk" in event for event in axis.events):
            continue
        for name, dim in axis.parameters:
            weight = subject.by_name.get(name)
            if weight is not None and weight.is_matrix and weight.said.dim == dim and weight.said.line is not None:
                text = f"{name} scores {axis.size} choices; sharded, each rank would see only some of the scores"
                yield subject.suspect(NAME, weight.said.line.pattern, text, "replicate the router", names=[name])
    if subject.plan.dialect != "transformers":
        return
    stacks: dict[str, list[Weight]] = {}
    for weight in subject.weights:
        if len(weight.fact.shape) == 3 and weight.said.dim is not None:
            stacks.setdefault(weight.module, []).append(weight)
    summing = [line for line in subject.plan.lines if line.style in _SUMS]
    silent = {
        module: weights
        for module, weights in stacks.items()
        if not any(
            subject.plan.reaches(line, place) for line in summing for place in (module, *holders(module)) if place
        )
    }
    if silent:
        names = [weight.name for weights in silent.values() for weight in weights]
        where = tuple(dict.fromkeys(w.said.line.pattern for ws in silent.values() for w in ws if w.said.line))
        text = f"{names[0]} is sharded, but the experts' partial outputs are never summed"
        hint = f"{subject.folded(silent)!r}: 'moe_tp_experts'"
        yield subject.suspect(NAME, where, text, hint, names=names)
