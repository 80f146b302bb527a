"""From a source to a draft of a plan, by named steps: capture, solve, write down.

    source ── capture_source ── solve_source ── write_down ── Draft

This is the step `draft_plan` of the whole pipeline, `check/pipeline.py`: a trial of a tiny clone on simulated ranks
precedes it (its result, `Capabilities`, is an argument here), and a proof of the draft follows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

from torch import nn

from autoplan.analyse.infer import Shards
from autoplan.analyse.sequence.combined import combined
from autoplan.analyse.solve import Solution
from autoplan.analyse.splits.packed import divides_one_only, split_otherwise
from autoplan.capture.capture import Captured, capture_any, capture_fake, capture_hollow
from autoplan.capture.feeding.resize import with_other_paths
from autoplan.capture.forward_hooks import made_anew_in_training
from autoplan.common.code.ways import Recorder, Ways, recording, seen_code
from autoplan.common.errors import CaptureError, IndivisibleError
from autoplan.common.options import Wish
from autoplan.common.patterns import starred
from autoplan.common.stages import stage
from autoplan.decide.plan.chosen import (
    expert_findings,
    experts_of,
    fitting,
    plan_chosen,
    refuse_parted_blocks,
    solve_chosen,
    with_packed,
)
from autoplan.decide.plan.folding import Names, same_in_like_blocks, whole_blocks
from autoplan.decide.written_plans.choices import ChosenCuts, same_in_folded_blocks
from autoplan.execute.fits import with_made_for
from autoplan.hf.inputs.make import make_inputs
from autoplan.hf.source import Source, without_namesakes
from autoplan.hf.stacks import calls_causal, layers, text_last, without_idle
from autoplan.ops.elementwise import literals_say
from autoplan.patches.kernels import kernel_note
from autoplan.values import Capabilities, ClassFact, Finding, LocalExperts, Plan, SeenCode, Stack, Trace
from autoplan.values.not_placed import WholeSequence
from autoplan.values.plan import digest
from autoplan.values.quantised import PackedWeight
from autoplan.values.reasons import DoesNotDivide, MixedWhole, SumsInside

HowMany = Literal["all", "most", "one"]  # stacks that are cut along their sequences


@dataclass(frozen=True)
class Draft:
    """An untested plan, with what its proof needs: the trace, and the choices that it follows."""

    plan: Plan
    trace: Trace
    choices: ChosenCuts | None = None


def draft_plan(
    source: Source,
    wish: Wish,
    *,
    choices: ChosenCuts | None = None,
    capabilities: Capabilities | None = None,
    module: nn.Module | None = None,
    captured: Captured | None = None,
) -> Draft:
    """Capture, solve and write down, under the choices of a written plan if there is one.

    `capabilities`: what may be used; by default all that the wish asks for. `captured`: a capture made before.
    """
    module = source.module() if module is None else module
    capabilities = wanted_capabilities(wish) if capabilities is None else capabilities
    ways = Recorder(literals_say)
    if captured is None:
        stage("recording a run of the model")
        with recording(module, literals_say) as ways:
            captured = capture_source(source, module, choices)
    stage("deciding what to shard")
    packed = source.packed(module)
    stacks = without_idle(layers(module, causal=calls_causal(captured.trace)), captured.trace)
    solved = partial(
        solve_source,
        source,
        captured,
        wish,
        capabilities=capabilities,
        sequence_stacks=stacks_to_cut(stacks, capabilities) if capabilities.sequence else None,
        packed=packed,
        remade=made_anew_in_training(module),
    )
    solution, choices, misfit = fitting(solved, choices)
    plan = write_down(source, wish, module, solution, choices, stacks, packed)
    findings = (*misfit, *plan.findings, *_findings(source, wish, capabilities, solution, plan))
    plan = with_paths(replace(plan, findings=findings), seen_code(_in_all_blocks(ways.ways, captured.trace)))
    return Draft(plan, captured.trace, choices)


def _in_all_blocks(ways: Ways, trace: Trace) -> Ways:
    """Copy the ways of a recorded block to the blocks that it stands for."""
    if not trace.folds:
        return ways
    names, all_ways = Names(trace), dict(ways)
    for (place, code, owner), steps in ways.items():
        module, *calls = owner.split(":")
        all_ways.update(((place, code, ":".join((other, *calls))), steps) for other in names.expand(module))
    return all_ways


def with_paths(made: Plan, paths: tuple[SeenCode, ...]) -> Plan:
    """Return the plan with these ways through the model's code."""
    made = replace(made, paths=paths)
    return replace(made, made_for=replace(made.made_for, content=digest(made)))


def wanted_capabilities(wish: Wish) -> Capabilities:
    """Return what a wish asks for, before any trial."""
    return Capabilities(True, wish.sequence_parallel and wish.tp_size > 1 or wish.cp_size > 1)


def stacks_to_cut(stacks: tuple[Stack, ...], capabilities: Capabilities) -> tuple[tuple[str, ...], ...]:
    """Return the blocks of all stacks; if one stack alone may be cut along its sequence, that of the text is last."""
    return tuple(stack.fqns for stack in (text_last(stacks) if capabilities.one_stack else stacks))


def capture_source(source: Source, module: nn.Module, choices: ChosenCuts | None = None) -> Captured:
    """Make example inputs and record what the module does with them, at other sizes too if it then takes other paths.

    Repeated blocks are traced once, unless a written plan treats them differently.
    """
    inputs = make_inputs(
        module, config=source.config, model_type=source.model_type, inputs=source.inputs, recipe=source.recipe
    )
    note = kernel_note(module)
    feeds, left_out, draws = with_other_paths(module, inputs.feeds, inputs.others)

    def told(captured: Captured, notes: tuple[str, ...]) -> Captured:
        return replace(captured, trace=replace(captured.trace, draws_unseen=draws, notes=notes))

    @cache
    def unfold() -> Captured:
        again = (capture_hollow if captured.trace.real else capture_fake)(module, feeds, folded=False)
        return told(again, captured.trace.notes)

    captured = capture_any(module, feeds, (*inputs.notes, *left_out, *([note] if note else [])))
    captured = told(captured, captured.trace.notes)
    if choices is None or same_in_folded_blocks(choices, captured.trace):
        return replace(captured, unfold=unfold) if captured.trace.folds else captured
    return unfold()


def solve_source(
    source: Source,
    captured: Captured,
    wish: Wish,
    *,
    choices: ChosenCuts | None = None,
    capabilities: Capabilities = Capabilities(),  # noqa: B008 - frozen
    sequence_stacks: tuple[tuple[str, ...], ...] | None = None,
    packed: tuple[PackedWeight, ...] = (),
    remade: tuple[str, ...] = (),
    both: Shards | None = None,
) -> Solution:
    """Decide the splits, under a written plan if there is one; raise if nothing can be split at this size.

    Context parallelism and another split are solved in turn, the latter on the axes that both split (`both`).
    """
    if wish.cp_size > 1 and wish.splits > 1:
        how: dict[str, Any] = {"choices": choices, "packed": packed, "remade": remade}
        how |= {"capabilities": capabilities}
        joint = replace(wish, tp_size=1, ep_size=1, cp_size=wish.ranks)
        cut = solve_source(source, captured, joint, sequence_stacks=sequence_stacks, **how)
        unfolded = captured.unfold() if captured.unfold and not cut.trace.folds else captured
        if cut.shards is not None and divides_one_only(cut.shards, wish.splits):
            alone = solve_source(source, unfolded, replace(wish, cp_size=1), **how)
            if alone.shards is not None and (other := split_otherwise(cut.shards, alone.shards)):
                narrowed = {**how, "capabilities": replace(capabilities, whole=(*capabilities.whole, *other))}
                cut = solve_source(source, unfolded, joint, sequence_stacks=sequence_stacks, **narrowed)
                fixed = [c for c in alone.classes if any(n.rpartition(".")[0] in other for n, _ in c.parameters)]
                alike = (replace(c, split=False, reason=MixedWhole(c.size, wish.ranks)) for c in fixed if c.split)
                cut = replace(cut, classes=(*alike, *cut.classes))
        split = solve_source(source, unfolded, replace(wish, cp_size=1), both=cut.shards, **how)
        if captured.unfold and split.trace.folds != cut.trace.folds:
            how["sequence_stacks"] = sequence_stacks
            return solve_source(source, captured.unfold(), wish, **how)
        runtime = combined(split.runtime, cut.runtime, wish.splits, wish.cp_size)
        split = replace(split, runtime=runtime, over_all=cut)
        return replace(split, sequence_parallel=True, whole_sequence=cut.whole_sequence, pairs=cut.pairs)
    solved = partial(
        solve_chosen,
        tp=wish.ranks,
        choices=choices,
        scoped=capabilities.scoped,
        whole=capabilities.whole,
        experts=experts_of(wish.tp_size, wish.ep_size, capabilities),
        packed=packed,
        uneven=wish.uneven == "blocks",
        remade=remade,
        context=wish.cp_size > 1,
        gathered=capabilities.gathered,
        both=both,
    )
    how_many: HowMany = "all" if wish.cp_size == 1 else "one" if capabilities.one_stack else "most"
    solution = _cut(solved, captured.trace, sequence_stacks, how_many)
    summed: set[str] = set()
    while not solution.sequence_parallel and (more := _summed_inside(solution) - summed):
        summed |= more
        solved = partial(solved, summed=tuple(sorted(summed)))
        solution = _cut(solved, captured.trace, sequence_stacks, how_many)
    if captured.unfold and not same_in_like_blocks(solution.parameters, solution.runtime, captured.trace.folds):
        try:
            solution = _cut(solved, captured.unfold().trace, sequence_stacks, how_many)
        except CaptureError as error:  # blocks that differ along the sequence are alike without it
            if sequence_stacks is None:
                raise
            uneven = WholeSequence("blocks-apart", error=error.message)
            solution = replace(solved(captured.trace, sequence_stacks=None), whole_sequence=(uneven,))
    if wish.ranks > 1:
        _refuse_useless(source, solution, wish, packed, capabilities)
    return solution


def _summed_inside(solution: Solution) -> set[str]:
    """Return the modules in which a sum over ranks cannot be exchanged for positions."""
    return {starred(why.place) for why in solution.whole_sequence if why.summed}


def _cut(
    solved: Callable[..., Solution], trace: Trace, stacks: tuple[tuple[str, ...], ...] | None, how_many: HowMany
) -> Solution:
    """The solution with stacks cut along their sequences. "all": all of them, or none. "most": those that it fails for
    (a tower in front of the text) stay whole on every rank; the last ones are tried first. "one": the last one."""
    if stacks is not None and how_many == "one":
        solution = solved(trace, sequence_stacks=stacks[-1:])
        others = [WholeSequence("differed", stack=names[0].rpartition(".")[0]) for names in stacks[:-1] if names]
        return replace(solution, whole_sequence=(*solution.whole_sequence, *others))
    solution = solved(trace, sequence_stacks=stacks)
    if stacks is None or solution.sequence_parallel or how_many == "all":
        return solution
    cut_stacks: tuple[tuple[str, ...], ...] = ()
    whole: list[WholeSequence] = []
    for names in reversed(stacks) if len(stacks) > 1 else ():
        tried = solved(trace, sequence_stacks=(names, *cut_stacks)) if names else None
        if tried is not None and tried.sequence_parallel:
            solution, cut_stacks = tried, (names, *cut_stacks)
        elif tried is not None:
            whole += [replace(why, stack=names[0].rpartition(".")[0]) for why in tried.whole_sequence]
    return replace(solution, whole_sequence=(*solution.whole_sequence, *whole)) if cut_stacks else solution


def write_down(
    source: Source,
    wish: Wish,
    module: nn.Module,
    solution: Solution,
    choices: ChosenCuts | None,
    stacks: tuple[Stack, ...],
    packed: tuple[PackedWeight, ...],
) -> Plan:
    """Return the plan of a solution: entries with roles and reasons, how weights are stored, what it was made for."""
    solution = replace(solution, runtime=without_namesakes(source, solution.runtime, solution.trace.module_classes))
    plan = plan_chosen(
        solution, choices, model=source.name, layers=stacks, sequence_parallel=solution.sequence_parallel
    )
    plan = replace(plan, tp_size=wish.tp_size, ep_size=wish.ep_size, cp_size=wish.cp_size)
    plan = with_packed(with_made_for(plan, module), solution, packed)
    plan = replace(plan, fed=source.recipe.fed() if source.recipe is not None else ())
    return replace(plan, made_for=replace(plan.made_for, content=digest(plan)))


def _refuse_useless(
    source: Source, solution: Solution, wish: Wish, packed: tuple[PackedWeight, ...], capabilities: Capabilities
) -> None:
    """Raise if nothing can be split at this size or, if the caller is strict, if something cannot."""
    legal = ", ".join(map(str, solution.legal_tp))
    if wish.cp_size > 1:
        if not solution.sequence_parallel:
            reasons = "; ".join(map(str, folded_reasons(solution)))
            raise IndivisibleError(
                f"{source.name}: the sequence cannot be sharded over {wish.cp_size} ranks: {reasons}",
                hint="shard its weights (tp) or its batch (dp) over these ranks instead",
            )
        return
    odd = [c for c in solution.classes if not c.split and isinstance(c.reason, DoesNotDivide)]
    if wish.strict and solution.experts_inside:
        where, why = solution.experts_inside[0]
        raise IndivisibleError(f"{source.name}: {where}: {why}", hint="choose an ep_size that divides them, or 1")
    if wish.strict and odd:
        first = odd[0]
        raise IndivisibleError(
            f"{source.name}: an axis of {first.size} units in {first.parameters[0][0]} is not divisible by "
            f"tp={wish.tp_size} ({len(odd)} such axes)",
            hint=f"choose a valid tp size: {legal}",
        )
    if wish.strict:
        refuse_parted_blocks(source.name, solution, packed)
    if wish.ep_size > 1 == wish.tp_size and not solution.runtime.of(LocalExperts):
        reasons = "; ".join(f"{where}: {why}" for where, why in solution.experts_inside)
        raise IndivisibleError(
            f"{source.name}: no experts can be placed on {wish.ep_size} different ranks"
            + (f" ({reasons})" if reasons else ""),
            hint="ep_size needs modules that store all their experts in stacked weights; otherwise use tp_size",
        )
    may_be_idle = capabilities.idle and (capabilities.whole or not odd)
    if not may_be_idle and not any(fact.dim is not None for fact in solution.parameters):
        unit = f": an axis of {odd[0].size} units in {odd[0].parameters[0][0]} prevents it" if odd else ""
        raise IndivisibleError(
            f"{source.name}: nothing can be sharded at tp={wish.tp_size}{unit}",
            hint=f"valid sizes: {legal}" if odd else "plan(tp_size=1) shows what is replicated and why",
        )


def _findings(
    source: Source, wish: Wish, capabilities: Capabilities, solution: Solution, made: Plan
) -> Iterator[Finding]:
    """Yield what was requested and not done, and what the plan leaves open."""
    if wish.uneven != "never" and not made.packed:
        text = f"uneven={wish.uneven!r} has no effect: no weight of {source.name} is stored in blocks"
        yield Finding("quantised", "note", "", text)
    if capabilities.sequence:
        yield from sequence_findings(solution)
    if wish.cp_size > 1:
        yield from _run_alike((solution.over_all or solution).classes)
        yield from solution.pairs
    if wish.ep_size > 1 and capabilities.experts:
        yield from expert_findings(made, solution)
    yield from whole_blocks(made)
    if capabilities.idle and not made.entries:
        text = f"nothing can be split at tp={wish.tp_size}: every rank computes the whole model"
        yield Finding("split", "warn", "", text, "data-parallel ranks in place of tensor-parallel ones gain more")
    if source.config is None and made.runtime.idle:
        names = ", ".join(made.runtime.idle[:3])
        text = f"{names} never ran while tracing, so it was neither planned nor verified"
        yield Finding("inputs", "warn", "", text, "pass inputs= that run it")


def _run_alike(classes: Iterable[ClassFact]) -> Iterator[Finding]:
    """Yield the modules where every rank of cp does the same work, on all positions."""
    hints: dict[tuple[str, str], str] = {}
    for each in classes:
        place, why = starred(each.parameters[0][0].rpartition(".")[0]), None if each.split else each.reason
        if isinstance(why, MixedWhole) and why.size == each.size and not why.own_queries:
            hints[place, str(why)] = "choose a cp_size that divides them"
        elif isinstance(why, SumsInside):
            hints[place, str(why)] = ""
    for (place, text), hint in hints.items():
        yield Finding("sequence", "warn", place, text, hint)


def sequence_findings(solution: Solution) -> Iterator[Finding]:
    """Return what sequence parallelism leaves replicated, or why there is none."""
    if not solution.sequence_parallel:
        why = "; ".join(map(str, folded_reasons(solution)))
        yield Finding("sequence", "warn", "", f"sequence parallelism was requested but is not applied: {why}")
        return
    for reason in folded_reasons(solution):
        yield Finding("sequence", "note", "", f"full sequence needed: {reason}")


def folded_reasons(solution: Solution) -> Iterator[WholeSequence]:
    """Yield why the whole sequence is needed, once for modules that are alike."""
    alike: dict[WholeSequence, list[WholeSequence]] = {}
    for each in solution.whole_sequence:
        kind = replace(each, place=starred(each.place), maker=starred(each.maker), at=each.at and starred(each.at))
        alike.setdefault(kind, []).append(each)
    names = Names(solution.trace)

    def patterns(modules: Iterable[str | None]) -> str:
        return ", ".join(names.fold([name for name in modules if name]))

    for kind, members in alike.items():
        place, maker, at = ([getattr(why, field) for why in members] for field in ("place", "maker", "at"))
        yield replace(kind, place=patterns(place), maker=patterns(maker), at=kind.at and patterns(at))
