"""Expert parallelism as an option of a plan: which sizes make sense, and what is said where it does not reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autoplan.common.patterns import matches
from autoplan.decide.plan.folding import Names, starred
from autoplan.decide.rulebook.read import rule_named
from autoplan.values import Capabilities, Finding, LocalExperts, Plan
from autoplan.values.reasons import Reason

if TYPE_CHECKING:
    from autoplan.analyse.solve import Solution
    from autoplan.analyse.splits.experts import Experts

__all__ = ["expert_findings", "experts_of"]

_CHECK = "experts"
_HINT = "ep_size must divide the number of experts, and no written plan may cut them otherwise"


def experts_of(tp_size: int, ep_size: int, capabilities: Capabilities) -> Experts:
    """What the solver is to do with experts."""
    if ep_size == 1 or not capabilities.experts:
        return "inside"
    return "apart" if tp_size > 1 else "alone"


def expert_findings(plan: Plan, solution: Solution) -> tuple[Finding, ...]:
    """Where experts are not placed on different ranks although that was asked for, and why."""
    return tuple(_findings(plan, solution))


def _findings(plan: Plan, solution: Solution) -> Iterator[Finding]:
    names = Names(solution.trace)
    reasons: dict[Reason, list[str]] = {}
    for module, why in solution.experts_inside:
        reasons.setdefault(why.with_paths(starred), []).append(module)
    for reason, modules in reasons.items():
        for pattern in names.fold(modules):
            yield Finding(_CHECK, "warn", pattern, f"not placed on different ranks: {reason}", _HINT)
    told = [module for module, _ in solution.experts_inside]
    for entry in plan.entries:
        owner = entry.pattern if entry.pattern in names.modules else entry.pattern.rpartition(".")[0]
        inside = (rule := rule_named(entry.rule)) is not None and rule.holds_experts
        if inside and not any(matches(owner, module) for module in told):
            text = "these experts are no stack of weights that is told by number who goes where: each is cut inside"
            yield Finding(_CHECK, "warn", entry.pattern, text)
    if not plan.runtime.of(LocalExperts) and not told:
        text = "expert parallelism was asked for and is not applied: no module holds its experts in a stack of weights"
        yield Finding(_CHECK, "warn", "", text)
