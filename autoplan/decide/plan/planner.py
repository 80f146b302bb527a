"""Write the plan from what analysis proved and rules named: every parameter ends in an entry, or in the list of
replicated ones, with its reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from autoplan.analyse.picture.dataflow import dataflow
from autoplan.analyse.picture.flow import Flow, obstacles
from autoplan.analyse.solve import Solution
from autoplan.common.patterns import grouped, matches, starred
from autoplan.decide.match import MOST_STEPS, Matching, match_rules
from autoplan.decide.naming import Naming, gathered_parameters, name_parameters, readings, with_facts, with_units
from autoplan.decide.plan.entries import Costs, communication, reason_text, style_of, units_text
from autoplan.decide.plan.folding import Names, flow_of, fold_runtime
from autoplan.decide.rulebook.read import GENERIC, Rule, load_rules
from autoplan.values import (
    Cost,
    Entry,
    Finding,
    IntegerEdit,
    LocalExperts,
    Obstacle,
    ParameterFact,
    Plan,
    Replicated,
    Stack,
)
from autoplan.values.reasons import CutOfRecurrent, GradientSummed, NothingToSplit, Reason, sentence

_RECURRENT = "recurrent weights"  # for those without a box in the picture
_Whole = tuple[str, tuple[Reason, ...]]  # (the role of a replicated parameter, "" for none; the reasons)


def make_plan(
    solution: Solution,
    *,
    model: str,
    layers: Sequence[Stack] = (),
    sequence_parallel: bool = False,
    rules: Sequence[Rule] | None = None,
    source_of: Callable[[str], str | None] = lambda parameter: None,
) -> Plan:
    """Write the plan of a solution. `rules` are the shipped ones by default. `source_of` returns whose choice a
    parameter's sharding is, if it is not inferred."""
    picture = with_facts(dataflow(solution.trace), solution)
    matching = match_rules(picture, load_rules() if rules is None else rules, refused=False)
    desk = _Desk(
        solution, picture, matching, sequence_parallel and not any(done.over for done in solution.runtime.instructions)
    )
    names = Names(solution.trace)
    drafts = [_sourced(draft, source_of) for draft in desk.drafts()]
    traffic, excess = communication(solution, layers, names)
    return Plan(
        model=model,
        tp_size=solution.tp_size,
        sequence_parallel=sequence_parallel,
        entries=tuple(_fold_entries(drafts, names)),
        replicated=tuple(_replicated(solution, desk.named, names)),
        layers=tuple(layers),
        legal_tp=solution.legal_tp,
        findings=(*_findings(solution, desk, drafts, names), *excess),
        runtime=fold_runtime(solution.runtime, names),
        communication=traffic,
        obstacles=_obstacles(solution, drafts, names),
        flow=flow_of(solution.trace, layers, names),
    )


@dataclass(frozen=True)
class _Draft:
    """An entry for one module of the trace, before blocks are folded, with its rule and the styles that it allows."""

    entry: Entry
    allowed: tuple[str, ...]
    rule: Rule | None


def _sourced(draft: _Draft, source_of: Callable[[str], str | None]) -> _Draft:
    entry = draft.entry
    names = [f"{entry.pattern}.{parameter}" for parameter in entry.parameters] + [entry.pattern]
    source = next(filter(None, map(source_of, names)), entry.source)
    return replace(draft, entry=replace(entry, source=source))  # type: ignore[arg-type]


class _Desk:
    """The facts about modules while entries are written."""

    def __init__(self, solution: Solution, picture: Flow, matching: Matching, sequence_parallel: bool) -> None:
        self.solution = solution
        self.matching = matching
        self.sequence_parallel = sequence_parallel
        self.tp = solution.tp_size
        self.read = readings(picture, solution.parameters)
        named = name_parameters(matching, self.read, picture, solution.parameters)
        self.named = with_units(named, solution.parameters)
        self.costs = Costs(solution, picture)
        self.gathered = gathered_parameters(solution)
        self.experts = {site.pattern for site in solution.runtime.of(LocalExperts)}
        self.reducing = {solution.trace.calls[call].module for call in solution.reductions}

    def drafts(self) -> Iterator[_Draft]:
        # Parameters by the module that owns them; a tied one under each module that reads it
        modules: dict[str, list[tuple[str, ParameterFact]]] = {}
        for fact in self.solution.parameters:
            own = dict.fromkeys(reading.name for reading in self.read.get(fact.names[0], ()))
            for name in own or (fact.names[0],):
                modules.setdefault(_owner(name), []).append((name, fact))
        for module, facts in modules.items():
            styles = {name: self._style(module, fact) for name, fact in facts}
            decided = [(name, fact) for name, fact in facts if self._is_decided(fact)]
            if not decided:
                continue
            cut = {styles[name] for name, fact in decided if fact.dim is not None and len(fact.shape) > 1}
            if len(cut) > 1:
                for name, fact in decided:
                    yield self._draft(module, name, [(name, fact)], styles[name])
            else:
                # The style of the largest sharded parameter of the module, else of its largest
                _, _, leading = max((fact.dim is not None, fact.bytes, name) for name, fact in decided)
                yield self._draft(module, module, facts, styles[leading])

    def _is_decided(self, fact: ParameterFact) -> bool:
        """Return whether it is sharded, or replicated with a gradient to sum. (A divided bias follows its weight.)"""
        return fact.dim is not None or (fact.gradient != "local" and not fact.buffer)

    def _style(self, module: str, fact: ParameterFact) -> str:
        if module in self.experts and fact.dim == 0:
            return "expert_parallel"
        if isinstance(fact.how, CutOfRecurrent):
            return "local"
        nodes = [reading.node for reading in self.read.get(fact.names[0], ()) if _owner(reading.name) == module]
        return style_of(
            fact, nodes, self.tp, gathered=not self.gathered.isdisjoint(fact.names), reduced=module in self.reducing
        )

    def _draft(self, module: str, pattern: str, facts: list[tuple[str, ParameterFact]], style: str) -> _Draft:
        leading = max(facts, key=lambda item: (self._is_decided(item[1]), item[1].dim is not None, item[1].bytes))
        naming = self.named.get(leading[0])
        units, counted = units_text(leading[1], naming)
        own = [r for name, fact in facts for r in self.read.get(fact.names[0], ()) if r.name == name]
        chosen = style  # or the form of it that the rule chooses under sequence parallelism
        if naming is not None and self.sequence_parallel:
            chosen = dict(naming.rule.sequence_parallel).get(naming.binding, style)
        entry = Entry(
            pattern=pattern,
            parameters=tuple(name.rpartition(".")[2] for name, _ in facts),
            style=chosen,
            role=naming.role if naming else _RECURRENT if isinstance(leading[1].how, CutOfRecurrent) else GENERIC,
            rule=naming.rule.id if naming else GENERIC,
            source="inferred",
            reason=reason_text(leading[1], naming, self.tp),
            units=units,
            segments=tuple(f"{fact.dim}:{fact.layout}" if fact.dim is not None else "whole" for _, fact in facts),
            reduces=self.costs.of(module, facts, own, ends_here=pattern == module or not style.endswith("colwise")),
            bytes=sum(fact.bytes for _, fact in facts),
            axes=tuple(sorted({axis for _, fact in facts for axis in fact.axes})),
            counted=counted,
        )
        return _Draft(entry, naming.styles if naming else (), naming.rule if naming else None)


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _fold_entries(drafts: list[_Draft], names: Names) -> Iterator[Entry]:
    """Merge equal entries of several modules, in the order in which the model holds them. The modules that share a sum
    may differ between blocks of one kind (a layer with a compressor, one without): their costs are merged."""
    groups: dict[Entry, list[str]] = {}
    costs: dict[Entry, dict[Cost, None]] = {}
    axes: dict[Entry, set[int]] = {}
    for draft in drafts:
        same = replace(draft.entry, pattern="", reduces=())
        groups.setdefault(same, []).append(draft.entry.pattern)
        costs.setdefault(same, {}).update(dict.fromkeys(draft.entry.reduces))
        axes.setdefault(same, set()).update(draft.entry.axes)
    for same, patterns in groups.items():
        entry = replace(same, reduces=tuple(costs[same]), axes=tuple(sorted(axes[same])))
        owned = any(pattern in names.parameters for pattern in patterns)
        for pattern, count in names.fold_counted(patterns, parameters=owned):
            yield replace(entry, pattern=pattern, bytes=entry.bytes * count)


def _obstacles(solution: Solution, drafts: list[_Draft], names: Names) -> tuple[Obstacle, ...]:
    """Return obstacles for other systems at split modules and their counterparts in other blocks, one of each kind."""
    split = {starred(draft.entry.pattern) for draft in drafts}
    modules = [module for module in solution.trace.module_classes if starred(module) in split]
    edited = {(edit.pattern, edit.name) for edit in solution.runtime.of(IntegerEdit)}
    groups: dict[Obstacle, list[str]] = {}
    for obstacle in obstacles(solution.trace, modules):
        if (obstacle.pattern, obstacle.attribute) not in edited:
            same = replace(obstacle, pattern=starred(obstacle.pattern), by=starred(obstacle.by))
            groups.setdefault(same, []).append(obstacle.pattern)
    return tuple(replace(same, pattern=pattern) for same, modules in groups.items() for pattern in names.fold(modules))


def _replicated(solution: Solution, named: dict[str, Naming], names: Names) -> Iterator[Replicated]:
    """Yield every replicated parameter, by pattern, with the bytes of all blocks and the reason. Blocks that differ
    only in the reason share one line that gives each reason once."""
    groups: dict[tuple[str, int], dict[str, _Whole]] = {}
    for fact in solution.parameters:
        if fact.dim is None and not fact.buffer:
            name = fact.names[0]
            role = named[name].role if name in named else ""
            summed = (GradientSummed(),) if fact.gradient != "local" else ()
            groups.setdefault((starred(name), fact.bytes), {})[name] = (
                role,
                (*(fact.why or (NothingToSplit(),)), *summed),
            )
    for (_, size), reasons in groups.items():
        everywhere = {name: reason for member, reason in reasons.items() for name in names.expand(member)}
        for pattern in names.fold(list(reasons), parameters=True):
            whys_of_pattern = [reason for name, reason in everywhere.items() if matches(pattern, name)]
            if len(whys_of_pattern) > 1:
                # Reasons that differ only in the number of a block are merged
                whys_of_pattern = [
                    (role, tuple(dict.fromkeys(reason.with_paths(starred) for reason in why)))
                    for role, why in whys_of_pattern
                ]
            roles = tuple(dict.fromkeys(role for role, _ in whys_of_pattern if role))
            why = tuple(dict.fromkeys(why for _, whys in whys_of_pattern for why in whys))
            texts = dict.fromkeys((f"{role}: " if role else "") + sentence(whys) for role, whys in whys_of_pattern)
            yield Replicated(pattern, size * len(whys_of_pattern), " / ".join(texts), roles, why)


def _findings(solution: Solution, desk: _Desk, drafts: list[_Draft], names: Names) -> Iterator[Finding]:
    """Yield notes on what was refused, and warnings where rules and facts disagree (facts win)."""
    like = grouped((refusal.with_paths(starred), refusal) for refusal in solution.refusals)
    for once, refusals in like.items():
        yield Finding("refused", "note", "", str(refusals[0] if len(refusals) == 1 else once))
    for note in solution.trace.notes:
        yield Finding("capture", "note", "", note)
    seen: dict[tuple[str, str], list[str]] = {}
    for draft in drafts:
        if draft.rule is not None and draft.entry.style not in draft.allowed and not desk.sequence_parallel:
            text = f"rule {draft.rule.id!r} expects {' or '.join(draft.allowed)}, analysis derived {draft.entry.style}"
            seen.setdefault(("rule-style", text), []).append(draft.entry.pattern)
    for (check, text), patterns in seen.items():
        for pattern in names.fold(list(dict.fromkeys(patterns))):
            yield Finding(check, "warn", pattern, text)
    for rule_id in desk.matching.given_up:
        text = f"the search for rule {rule_id!r} stopped after {MOST_STEPS:,} steps: its roles may be missing"
        yield Finding("rule-search", "note", "", text)
    contested: dict[str, list[str]] = {}
    for contest in desk.matching.contests:
        text = f"rules {contest.winner!r} and {contest.loser!r} both match; {contest.winner!r} is more specific"
        for several in desk.read.values():
            for reading in several:
                if reading.box == contest.box:
                    contested.setdefault(text, []).append(_owner(reading.name))
    for text, patterns in contested.items():
        for pattern in names.fold(list(dict.fromkeys(patterns))):
            yield Finding("rule-conflict", "note", pattern, text)
