"""The plan that is applied to a clone, derived by the same rules as the one to be verified, and how the two differ."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import nn

from autoplan.check.verify.clone import Clone, Sizes
from autoplan.common.code.ways import recording
from autoplan.common.errors import IndivisibleError
from autoplan.common.patterns import best_match, is_under, like_modules, matched_by, matches, starred
from autoplan.common.random_values import working_dtype
from autoplan.decide.plan.chosen import choices_of_plan
from autoplan.decide.written_plans.choices import ChosenCuts
from autoplan.hf.source import resolve
from autoplan.ops.elementwise import literals_say
from autoplan.planning import capture_source, draft_plan
from autoplan.values import (
    PICKING,
    AllGatherSequence,
    AllGatherSequenceSumGradient,
    Boundary,
    CallRewrite,
    Capabilities,
    Finding,
    HookKind,
    Plan,
    ReduceScatterSequence,
    SequenceBoundary,
)


def capabilities_of(
    plan: Plan | None,
    source: Any,
    sequence_parallel: bool,
    sizes: Sizes,
    gathered: tuple[HookKind, ...] | None = None,
) -> tuple[Capabilities, ...]:
    """Return the capabilities to try, in order: the own of a plan of this model; without a plan the safest is last."""
    if plan is not None:
        scoped = bool(plan.runtime.of(CallRewrite)) or not plan.runtime.of(Boundary)
        # Of several stacks of blocks, is one sharded along its sequence?
        at = {instruction.pattern for instruction in plan.runtime.of(SequenceBoundary)}
        blocks = [{starred(name) for name in stack.fqns} for stack in plan.layers]
        cut = [any(is_under(block, pattern) for block in own for pattern in at) for own in blocks]
        one_stack = plan.cp_size > 1 and cut.count(True) == 1 < len(cut)
        gathered = gathered_in(plan, source.module())
        return (Capabilities(scoped, plan.sequence_parallel, one_stack=one_stack, gathered=gathered),)
    if sizes.cp > 1 and gathered is None:
        with suppress(IndivisibleError):
            gathered = gathered_in(draft_plan(source, sizes.wish()).plan, source.module())
    along = Capabilities(True, True, gathered=gathered)
    outer = (*([along] if sequence_parallel else []), Capabilities(True), Capabilities(False))
    if sizes.cp > 1:
        picking = replace(along, gathered=(*(gathered or ()), PICKING))
        outer = (along, picking, replace(along, one_stack=True), replace(along, scoped=False))
    inside = (replace(capabilities, experts=False) for capabilities in outer if sizes.ep > 1 and sizes.tp > 1)
    return (*outer, *inside)


def gathered_in(plan: Plan, model: nn.Module) -> tuple[HookKind, ...] | None:
    """Return where a plan over cp gathers the stream or reduce-scatters a sum, which depends on the model's sizes."""
    if plan.cp_size == 1:
        return None
    kinds = AllGatherSequence | AllGatherSequenceSumGradient | ReduceScatterSequence
    moved = [instruction for instruction in plan.runtime.of(SequenceBoundary) if isinstance(instruction, kinds)]
    alike = like_modules({name: type(m).__name__ for name, m in model.named_modules(remove_duplicate=False)})
    return tuple(sorted({(alike[name], at.side) for at in moved for name in matched_by(at.pattern, alike.keys())}))


def plan_for(
    clone: Clone,
    source: Any,
    plan: Plan | None,
    sizes: Sizes,
    capabilities: Capabilities,
    choices: ChosenCuts | None = None,
) -> tuple[Plan, list[Finding]]:
    """Return the plan to apply to the clone, and how it differs from the one to be verified."""
    if plan is not None and _fits(plan, clone.model, source, sizes):
        width, planned = (working_dtype(model).itemsize for model in (clone.model, source.module()))
        least = tuple(traffic.in_dtype(width / planned) for traffic in plan.communication)
        return replace(plan, communication=least), []
    # A person's choices are made again; any other plan is derived by the same rules.
    written = choices if plan is None else choices_of_plan(plan)
    choices = None if written is None else written.for_clone()

    # the clone's own calls, since a user's inputs have the dtype of the user's model
    resolved = resolve(clone.model, inputs=dict(clone.planned))
    captured = None
    if choices is None:
        if "run" not in clone.recorded:
            with recording(clone.model, literals_say) as ways:
                clone.recorded["run"] = capture_source(resolved, clone.model)
            clone.recorded["ways"] = ways.ways
        captured = clone.recorded["run"]
    derived = draft_plan(resolved, sizes.wish(), choices=choices, capabilities=capabilities, captured=captured).plan
    return derived, [] if plan is None else _correspondence(plan, derived, clone.model)


def _fits(plan: Plan, model: Any, source: Any, sizes: Sizes) -> bool:
    """Return whether the plan is for these very sizes, and can be applied itself."""
    if Sizes.of_plan(plan) != sizes:
        return False
    theirs = {name: tuple(parameter.shape) for name, parameter in source.module().named_parameters()}
    return theirs == {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _correspondence(plan: Plan, derived: Plan, model: Any) -> list[Finding]:
    """Return findings where the plans disagree about modules of the clone."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    findings = []
    for entry in plan.entries:
        module = next((name for name in names if matches(entry.pattern, name)), None)
        if module is None:
            continue  # a block that the clone is not deep enough for
        other = best_match(derived.entries, module)
        ours, theirs = ("whole" if e is None else f"{e.style} ({e.role})" for e in (entry, other))
        if ours != theirs:
            text = f"{ours} in the plan for tp={plan.tp_size}, but {theirs} in the clone's plan for "
            text += f"tp={derived.tp_size}: the proof does not cover it"
            findings.append(Finding("plan", "warn", entry.pattern, text))
    return findings
