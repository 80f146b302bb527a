"""A written plan put to the test: solved under its choices, checked line by line, written down like any other plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autoplan.analyse.solve import Solution
from autoplan.analyse.splits.experts import Experts, solve_experts
from autoplan.analyse.splits.packed import NO_DEMANDS, Demands, stay_whole
from autoplan.common.errors import IndivisibleError
from autoplan.decide.plan.folding import Names
from autoplan.decide.plan.packed import packed_in_trace
from autoplan.decide.plan.planner import make_plan
from autoplan.decide.written_plans.choices import CUTS, ChosenCut, ChosenCuts, WrittenPlanError
from autoplan.decide.written_plans.constraints import check_choices, demands_of
from autoplan.values import Finding, Plan, Stack, Trace
from autoplan.values.quantised import PackedWeight
from autoplan.values.reasons import DifferedOnRanks, MadeAnewInTraining

__all__ = ["choices_of_plan", "fitting", "plan_chosen", "solve_chosen"]


def solve_chosen(
    trace: Trace,
    tp: int,
    choices: ChosenCuts | None,
    sequence_stacks: tuple[tuple[str, ...], ...] | None = None,
    *,
    scoped: bool = True,
    whole: tuple[str, ...] = (),
    remade: tuple[str, ...] = (),
    experts: Experts = "inside",
    packed: tuple[PackedWeight, ...] = (),
    uneven: bool = False,
) -> Solution:
    """The solution under a written plan, with notes on it. Raises where the plan asks for what cannot be.

    `packed`: the quantised weights of the model, whose blocks stay together; `uneven`: some ranks may have one more of
    them than others. `remade`: where weights lie that are made
    otherwise in training.
    """
    how: dict[str, Any] = {"scoped": scoped, "sequence_stacks": sequence_stacks, "experts": experts}
    tried = stay_whole(trace, whole, DifferedOnRanks()) if whole else NO_DEMANDS
    blocks = Demands(packed=packed_in_trace(packed, trace), uneven=uneven) if packed else NO_DEMANDS
    if remade:
        blocks = stay_whole(trace, remade, MadeAnewInTraining()).and_also(blocks)
    if choices is None:
        return solve_experts(trace, tp, demands=tried.and_also(blocks), **how)
    _refuse_tried(choices, tried)
    names = Names(trace)
    notes = choices.notes + choices.check_keys(names.modules, names.parameters)
    solution = solve_experts(trace, tp, demands=demands_of(choices, trace).and_also(tried).and_also(blocks), **how)
    return replace(solution, notes=notes + (check_choices(choices, solution) if tp > 1 else ()))


def fitting(
    solved: Callable[..., Solution], choices: ChosenCuts | None
) -> tuple[Solution, ChosenCuts | None, tuple[Finding, ...]]:
    """The solution under a written plan, or without its optional part where that does not fit; a finding says why."""
    try:
        return solved(choices=choices), choices, ()
    except (WrittenPlanError, IndivisibleError) as error:
        asked = choices.without_optional() if choices is not None else None
        if asked == choices:
            raise
        why = error.message
    text = f"the hand-written plan of this class does not fit here, and analysis decides in its place: {why}"
    return solved(choices=asked), asked, (Finding("written plan", "warn", "", text),)


def _refuse_tried(choices: ChosenCuts, tried: Demands) -> None:
    """Raise where somebody's own line cuts what gave other numbers on ranks: leaving it whole is theirs to decide."""
    for name in () if choices.tolerant else dict.fromkeys(name for name, _ in tried.whole):
        choice = choices.of(name)
        if choice is not None and choice.cut not in ("whole", "nothing"):
            raise WrittenPlanError(
                f"{choices.name}: {choice} cuts {name}, and so the tiny clone did not give the same on simulated ranks",
                hint=f"write {choice.pattern!r}: 'replicate'; prove='none' plans it untried",
            )


def plan_chosen(
    solution: Solution,
    choices: ChosenCuts | None,
    *,
    model: str,
    layers: Sequence[Stack],
    sequence_parallel: bool = False,
) -> Plan:
    """The plan of a solution; every entry says whose choice it is."""
    if choices is None:
        return make_plan(solution, model=model, layers=layers, sequence_parallel=sequence_parallel)
    made = make_plan(
        solution,
        model=model,
        layers=layers,
        sequence_parallel=sequence_parallel,
        source_of=choices.source_of,
    )
    found = tuple(Finding("written plan", "note", "", note) for note in (f"chosen by {choices.name}", *solution.notes))
    return replace(made, source=_origin(choices), findings=made.findings + found)


def _origin(choices: ChosenCuts) -> str:
    """Where a plan comes from as a whole: overrides do not change what they were laid over."""
    if choices.complete or choices.source == "handwritten":
        return choices.source
    return choices.under.source if choices.under is not None else "inferred"


def choices_of_plan(plan: Plan, name: str = "") -> ChosenCuts | None:
    """A plan's own decisions as choices, to plan another size of the same model alike; None if nobody chose anything.

    With a `name` (of the file it came from) they are a user's choices, whoever made them.
    """
    sources = {entry.source for entry in plan.entries} - {"inferred"}
    if not sources and not name:
        return None
    source = "user" if name or "user" in sources else "handwritten" if "handwritten" in sources else "hf"
    lines = [ChosenCut(e.pattern, e.style if e.style in CUTS else "local", "the plan") for e in plan.entries]
    return ChosenCuts(name or f"the plan of {plan.model}", source, tuple(lines), tolerant=True)  # type: ignore[arg-type]
