"""Draft plans as requested: chosen modules, expert parallelism, quantised weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoplan.analyse.infer import Shards
from autoplan.analyse.solve import Solution
from autoplan.analyse.splits.experts import Experts, solve_experts
from autoplan.analyse.splits.packed import NO_DEMANDS, Demands, as_over_both, packed_layouts, stay_whole
from autoplan.common.errors import IndivisibleError
from autoplan.common.layout import Layout
from autoplan.common.options import Wish
from autoplan.common.patterns import fold_names, grouped, matches, starred
from autoplan.decide.plan.folding import Names
from autoplan.decide.plan.planner import make_plan
from autoplan.decide.rulebook.read import rule_named
from autoplan.decide.written_plans.choices import (
    CUTS,
    ChosenCut,
    ChosenCuts,
    WrittenPlanError,
    check_choices,
    demands_of,
)
from autoplan.values import (
    Capabilities,
    ClassFact,
    Entry,
    Finding,
    HookKind,
    LocalExperts,
    ParameterFact,
    Plan,
    Replicated,
    Stack,
    Trace,
)
from autoplan.values.quantised import PackedWeight
from autoplan.values.reasons import DifferedOnRanks, InsideQuantisedBlock, MadeAnewInTraining, SumsInside

# Quantised weights: a stored tensor is sharded like the weight that it stands for, in blocks. If a size would split a
# block, the weight is replicated with all that shares its axis, and a finding lists the ways out with their bytes.

_PACKED_CHECK = "quantised"


@dataclass(frozen=True)
class WayOut:
    """An option where a block would be split. `size`: of tp or ep; `bytes`: of the weights in question, per rank."""

    kind: str  # "experts apart", "smaller tp", "uneven", "whole"
    size: int
    bytes: int

    def __str__(self) -> str:
        texts = {
            "experts apart": f"ep_size={self.size} (experts on different ranks)",
            "smaller tp": f"tp_size={self.size}",
            "uneven": 'uneven="blocks" (sharded between blocks; some ranks hold one more)',
            "whole": "replicate or gather them (strict=False)",
        }
        return f"{texts[self.kind]}: {self.bytes / 2**20:,.1f} MiB of them per rank"


def packed_in_trace(packed: tuple[PackedWeight, ...], trace: Trace) -> dict[str, tuple[PackedWeight, ...]]:
    """Return the weights by their names in a trace: those of all blocks, if one block stands for many."""
    by_name = {weight.name: weight for weight in packed}
    by_fold_name: dict[str, tuple[PackedWeight, ...]] = {}
    names = Names(trace)
    for fold_name in (name for info in trace.tensors if info.kind == "parameter" for name in info.names):
        weights = dict.fromkeys(by_name[name] for name in names.expand(fold_name) if name in by_name)
        alike = dict.fromkeys(replace(weight, name=starred(weight.name)) for weight in weights)
        if alike:
            by_fold_name[fold_name] = tuple(alike)
    return by_fold_name


# Quantised weights in the plan


def with_packed(plan: Plan, solution: Solution, packed: tuple[PackedWeight, ...]) -> Plan:
    """Return the plan with the storage of its weights: shardings, bytes, entries, findings on unsplit blocks."""
    if not packed:
        return plan
    names = Names(solution.trace)
    facts = {name: fact for fact in solution.parameters for own in fact.names for name in names.expand(own)}
    laid = tuple(_laid(weight, facts.get(weight.name), solution.tp_size) for weight in packed)
    return replace(
        plan,
        entries=tuple(_entry(entry, laid, facts) for entry in plan.entries),
        replicated=tuple(_whole(item, laid, facts) for item in plan.replicated),
        findings=plan.findings + tuple(_packed_findings(solution, packed, names)),
        packed=tuple(_folded(laid, names)),
    )


def _laid(weight: PackedWeight, fact: ParameterFact | None, tp: int) -> PackedWeight:
    """Return the weight with its tensors sharded like the plain weight."""
    if fact is None or fact.dim is None or fact.layout is None:
        return weight
    layouts = tuple(Layout.parse(fact.layout) if dim == fact.dim else None for dim in range(len(weight.shape)))
    cuts = packed_layouts(weight, layouts, tp)
    return replace(
        weight,
        dim=fact.dim,
        tensors=tuple(
            tensor if cut is None else replace(tensor, dim=cut[0], layout=str(cut[1]))
            for tensor, cut in zip(weight.tensors, cuts, strict=True)
        ),
    )


def _folded(weights: tuple[PackedWeight, ...], names: Names) -> Iterator[PackedWeight]:
    """Yield one weight for all that are stored and sharded alike, by pattern."""
    groups = grouped((replace(weight, name=""), weight.name) for weight in weights)
    for weight, members in groups.items():
        for pattern in fold_names(members, names.parameters):
            yield replace(weight, name=pattern)


def _entry(entry: Entry, weights: tuple[PackedWeight, ...], facts: dict[str, ParameterFact]) -> Entry:
    """Return the entry with the stored tensors in place of plain ones, and their bytes."""
    own = {name.rpartition(".")[2] for name in entry.parameters}
    at_place = [weight for weight in weights if any(matches(entry.pattern, n) for n in (weight.owner, weight.name))]
    mine = [weight for weight in at_place if weight.parameter in own]
    if not mine:
        return entry
    first = {weight.parameter: weight for weight in reversed(mine)}
    shown = []
    for name, segment in zip(entry.parameters, entry.segments, strict=True):
        parameter = name.rpartition(".")[2]
        if parameter in first:
            shown += [(name.removesuffix(parameter) + t.name, t.segment) for t in first[parameter].tensors]
        else:
            shown.append((name, segment))
    return replace(
        entry,
        parameters=tuple(name for name, _ in shown),
        segments=tuple(segment for _, segment in shown),
        bytes=entry.bytes + sum(_saved(weight, facts) for weight in mine),
    )


def _whole(item: Replicated, weights: tuple[PackedWeight, ...], facts: dict[str, ParameterFact]) -> Replicated:
    mine = [weight for weight in weights if matches(item.fqn, weight.name)]
    return replace(item, bytes=item.bytes + sum(_saved(weight, facts) for weight in mine)) if mine else item


def _saved(weight: PackedWeight, facts: dict[str, ParameterFact]) -> int:
    """Return the stored bytes minus those of the plain weight (negative if smaller)."""
    return weight.bytes - facts[weight.name].bytes if weight.name in facts else 0


# Options where blocks would be split


def ways_out(facts: Sequence[ClassFact], solution: Solution, packed: tuple[PackedWeight, ...]) -> tuple[WayOut, ...]:
    """Return the options for axes that would be split inside a block, in the order in which to try them."""
    names, tp = Names(solution.trace), solution.tp_size
    parameters = {name for fact in facts for parameter, _ in fact.parameters for name in names.expand(parameter)}
    mine = [weight for weight in packed if weight.name in parameters]
    size = sum(weight.bytes for weight in mine)
    ways = []
    if mine and all(len(weight.shape) == 3 and weight.shape[0] % tp == 0 for weight in mine):
        ways.append(WayOut("experts apart", tp, size // tp))
    smaller = max((legal for legal in solution.legal_tp if legal < tp), default=1)
    ways.append(WayOut("smaller tp", smaller, size // smaller))
    uneven = [fact.reason for fact in facts if isinstance(fact.reason, InsideQuantisedBlock) and fact.reason.uneven]
    if uneven:
        ways.append(WayOut("uneven", tp, size * uneven[0].uneven // uneven[0].size))
    return (*ways, WayOut("whole", tp, size))


def refuse_parted_blocks(name: str, solution: Solution, packed: tuple[PackedWeight, ...]) -> None:
    """Raise if a size would split a block of a quantised weight, with the ways out."""
    parted = list(_parted(solution))
    for _, why in parted[:1]:
        alike = [fact for fact, other in parted if other.weight == why.weight]
        legal = ", ".join(map(str, solution.legal_tp))
        ways = "; ".join(map(str, ways_out(alike, solution, packed)))
        raise IndivisibleError(f"{name}: {why}", hint=f"sizes that split no block: {legal}. Options, in order: {ways}")


def _packed_findings(solution: Solution, packed: tuple[PackedWeight, ...], names: Names) -> Iterator[Finding]:
    schemes = Counter(weight.scheme.title for weight in packed)
    stored = "; ".join(f"{count} weights as {title}" for title, count in schemes.items())
    yield Finding(_PACKED_CHECK, "note", "", f"stored quantised: {stored}")
    cut = {name for fact in solution.parameters if fact.dim is not None for name in fact.names}
    alike = grouped((why, fact) for fact, why in _parted(solution))
    for why, facts in alike.items():
        members = (name for fact in facts for name, _ in fact.parameters if starred(name) == why.weight)
        weights = [name for member in members for name in names.expand(member)]
        options = ways_out(facts, solution, packed)
        own = {name for fact in facts for name, _ in fact.parameters if name not in cut}
        replicated = {name for member in own for name in names.expand(member)}
        whole = sum(weight.bytes for weight in packed if weight.name in replicated)
        outcome = "it is replicated, with all that shares its axis" if whole else "its product is sharded and gathered"
        ways = "; ".join(str(way) for way in options if way.kind != "whole")
        for pattern in fold_names(weights, names.parameters):
            yield Finding(_PACKED_CHECK, "warn", pattern, f"{why}; {outcome}", f"options, in order: {ways}", whole)


def _parted(solution: Solution) -> Iterator[tuple[ClassFact, InsideQuantisedBlock]]:
    for fact in solution.parted:
        if isinstance(fact.reason, InsideQuantisedBlock):
            yield fact, fact.reason


# Written plans: solved under their choices, checked line by line, and made into a plan like any other.


def solve_chosen(
    trace: Trace,
    tp: int,
    choices: ChosenCuts | None,
    sequence_stacks: tuple[tuple[str, ...], ...] | None = None,
    *,
    scoped: bool = True,
    whole: tuple[str, ...] = (),
    remade: tuple[str, ...] = (),
    summed: tuple[str, ...] = (),
    experts: Experts = "inside",
    packed: tuple[PackedWeight, ...] = (),
    uneven: bool = False,
    context: bool = False,
    gathered: Collection[HookKind] | None = None,
    both: Shards | None = None,
) -> Solution:
    """Return the solution under a written plan, with notes on it. Raises if the plan asks for the impossible.

    `packed`: the quantised weights of the model, whose blocks stay together; `uneven`: some ranks may have one more of
    them than others. `remade`: modules whose weights are computed differently in training. `summed`: modules in which
    a sum over ranks of cp stands, that cannot be one of own positions. `context`: split only what calls that mix
    positions keep independent. `both`: the split over ranks of context parallelism combined with these.
    """
    how: dict[str, Any] = {"scoped": scoped, "sequence_stacks": sequence_stacks, "experts": experts, "context": context}
    how["gathered"] = gathered
    tried = stay_whole(trace, whole, DifferedOnRanks()) if whole else NO_DEMANDS
    blocks = Demands(packed=packed_in_trace(packed, trace), uneven=uneven) if packed else NO_DEMANDS
    if both is not None:
        blocks = as_over_both(both).and_also(blocks)
    for modules, why in ((remade, MadeAnewInTraining()), (summed, SumsInside())):
        blocks = stay_whole(trace, modules, why).and_also(blocks) if modules else blocks
    if choices is None:
        return solve_experts(trace, tp, demands=tried.and_also(blocks), **how)
    # Raise if a user's own line shards what gave other numbers on ranks: replicating it is their decision
    for name in () if choices.tolerant else dict.fromkeys(name for name, _ in tried.whole):
        choice = choices.of(name)
        if choice is not None and choice.cut not in ("whole", "nothing"):
            raise WrittenPlanError(
                f"{choices.name}: {choice} shards {name}, and the tiny clone's results differed on simulated ranks",
                hint=f"write {choice.pattern!r}: 'replicate'; prove='none' plans it unverified",
            )
    names = Names(trace)
    notes = choices.notes + choices.check_keys(names.modules, names.parameters)
    solution = solve_experts(trace, tp, demands=demands_of(choices, trace).and_also(tried).and_also(blocks), **how)
    return replace(solution, notes=notes + (check_choices(choices, solution) if tp > 1 else ()))


def fitting(
    solved: Callable[..., Solution], choices: ChosenCuts | None
) -> tuple[Solution, ChosenCuts | None, tuple[Finding, ...]]:
    """Return the solution under a written plan, or without its optional part if that fails; a finding says why."""
    try:
        return solved(choices=choices), choices, ()
    except (WrittenPlanError, IndivisibleError) as error:
        requested = choices.without_optional() if choices is not None else None
        if requested == choices:
            raise
        why = error.message
    text = f"the hand-written plan of this class does not fit; using analysis instead: {why}"
    return solved(choices=requested), requested, (Finding("written plan", "warn", "", text),)


def plan_chosen(
    solution: Solution,
    choices: ChosenCuts | None,
    *,
    model: str,
    layers: Sequence[Stack],
    sequence_parallel: bool = False,
) -> Plan:
    """Return the plan of a solution; every entry says whose choice it is."""
    if choices is None:
        return make_plan(solution, model=model, layers=layers, sequence_parallel=sequence_parallel)
    plan = make_plan(
        solution, model=model, layers=layers, sequence_parallel=sequence_parallel, source_of=choices.source_of
    )
    origin = () if choices.optional else (f"chosen by {choices.name}",)
    notes = tuple(Finding("written plan", "note", "", note) for note in (*origin, *solution.notes))
    return replace(plan, source=_origin(choices), findings=plan.findings + notes)


def _origin(choices: ChosenCuts) -> str:
    """Return the source of a plan as a whole: overrides do not change the source of what they override."""
    if choices.complete or choices.source == "handwritten":
        return choices.source
    return choices.under.source if choices.under is not None else "inferred"


def wish_of_plan(plan: Plan) -> Wish:
    """Return the wish that a plan fulfils, to make it again."""
    along = plan.sequence_parallel and plan.cp_size == 1  # implied by context parallelism
    return Wish(plan.tp_size, plan.ep_size, along, uneven=plan.uneven, cp_size=plan.cp_size)


def choices_of_plan(plan: Plan, name: str = "") -> ChosenCuts | None:
    """Return a plan's own decisions as choices, to plan another size of the same model alike; None if nothing was
    chosen. With a `name` (of the file it came from) they are a user's choices, whoever made them."""
    sources = {entry.source for entry in plan.entries} - {"inferred"}
    if not sources and not name:
        return None
    source = "user" if name or "user" in sources else "handwritten" if "handwritten" in sources else "hf"
    lines = [ChosenCut(e.pattern, e.style if e.style in CUTS else "local", "the plan") for e in plan.entries]
    return ChosenCuts(name or f"the plan of {plan.model}", source, tuple(lines), tolerant=True)  # type: ignore[arg-type]


# Expert parallelism as an option of a plan: the sizes that make sense, and findings where it cannot be applied.

_CHECK = "experts"
_HINT = "ep_size must divide the number of experts, and a written plan must not shard them differently"


def experts_of(tp_size: int, ep_size: int, capabilities: Capabilities) -> Experts:
    """Return how the solver should treat experts."""
    if ep_size == 1 or not capabilities.experts:
        return "inside"
    return "apart" if tp_size > 1 else "alone"


def expert_findings(plan: Plan, solution: Solution) -> tuple[Finding, ...]:
    """Return findings on experts that are not distributed over ranks although that was requested, with the reasons."""
    names = Names(solution.trace)
    findings = []
    reasons = grouped((why.with_paths(starred), module) for module, why in solution.experts_inside)
    for reason, modules in reasons.items():
        for pattern in names.fold(modules):
            findings.append(Finding(_CHECK, "warn", pattern, f"not placed on different ranks: {reason}", _HINT))
    inside_experts = [module for module, _ in solution.experts_inside]
    for entry in plan.entries:
        owner = entry.pattern if entry.pattern in names.modules else entry.pattern.rpartition(".")[0]
        inside = (rule := rule_named(entry.rule)) is not None and rule.holds_experts
        if inside and not any(matches(owner, module) for module in inside_experts):
            text = "these experts are not stacked weights indexed by expert number: each expert is sharded"
            findings.append(Finding(_CHECK, "warn", entry.pattern, text))
    if not plan.runtime.of(LocalExperts) and not inside_experts:
        text = "expert parallelism was requested but is not applied: no module stores its experts in stacked weights"
        findings.append(Finding(_CHECK, "warn", "", text))
    return tuple(findings)
