"""The solution where whole experts are placed on different ranks, rather than each of them cut inside.

Modules that hold stacks of experts are put in boxes (experts.py) and everything is solved as ever. One whose experts
cannot be placed so after all is opened again, so that it is cut inside, and the solution says why.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from autoplan.analyse.infer import infer_axes
from autoplan.analyse.solve import Solution, solve
from autoplan.analyse.splits.experts import ExpertStack, boxed, expert_edits, find_experts, split_stacks
from autoplan.analyse.splits.requests import NO_DEMANDS, Demands
from autoplan.values import IntegerEdit, Trace
from autoplan.values.reasons import ExpertsDoNotDivide, ExpertsWhole, OnlyExperts, Reason

__all__ = ["Experts", "solve_experts"]

Experts = Literal["inside", "apart", "alone"]


def solve_experts(
    trace: Trace, tp: int, *, experts: Experts = "inside", demands: Demands = NO_DEMANDS, **how: Any
) -> Solution:
    """With experts cut "inside", whole on different ranks ("apart"), or that with nothing else split ("alone")."""
    if experts == "inside":
        return solve(trace, tp, demands=demands, **how)
    axes = infer_axes(trace)
    stacks = find_experts(trace, axes)
    if experts == "alone":
        demands = demands.with_whole(trace, _others(trace, stacks), OnlyExperts())
    inside: dict[str, Reason] = {s.module: ExpertsDoNotDivide(s.experts, tp) for s in stacks if s.experts % tp}
    while True:
        used = tuple(stack for stack in stacks if stack.module not in inside)
        found = solve(boxed(trace, used), tp, demands=demands, **how)
        assert found.shards is not None
        apart = split_stacks(used, found.shards)
        if len(apart) == len(used):
            break
        inside |= {stack.module: _why_not(stack, trace, found) for stack in used if stack not in apart}
    known = {(edit.pattern, edit.name, edit.index) for edit in found.runtime.of(IntegerEdit)}
    edits = [e for e in expert_edits(trace, axes, used, tp) if (e.pattern, e.name, e.index) not in known]
    sites = [stack.site for stack in used]
    others = [one for one in found.runtime.instructions if not isinstance(one, IntegerEdit)]
    runtime = replace(found.runtime, instructions=(*sites, *found.runtime.of(IntegerEdit), *edits, *others))
    return replace(found, trace=trace, runtime=runtime, experts_inside=tuple(inside.items()))


def _why_not(stack: ExpertStack, trace: Trace, found: Solution) -> Reason:
    """Why the axis of a module's experts is whole in a solution."""
    weight = trace.tensors[stack.stack[0]].names[0]
    places = (fact for fact in found.classes if (weight, 0) in fact.parameters)
    reasons = [fact.reason for fact in places if fact.reason is not None]
    return ExpertsWhole(reasons[0] if reasons else None)


def _others(trace: Trace, stacks: tuple[ExpertStack, ...]) -> set[int]:
    """All parameters but the experts'."""
    held = {number for stack in stacks for number in stack.stack}
    return {number for number, info in enumerate(trace.tensors) if info.kind == "parameter"} - held
