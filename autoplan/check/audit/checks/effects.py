"""Does the code around the cuts go on to work? Statistics, gradients, ties, experts, sequences, wrapped layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoplan.analyse.picture.flow import obstacles
from autoplan.check.audit.subject import Audited, Weight
from autoplan.common.patterns import holders, starred
from autoplan.decide.written_plans.choices import CUTS
from autoplan.values import Finding, Obstacle, SequenceBoundary

_MATCHED = "sum"  # partial sums of products: pairing speaks of those
_PAYS = "replicated_with_grad_allreduce"
_SUMMED = {
    "torch": "give it SequenceParallel(sequence_dim=2, use_local_output=True)",
    "deepspeed": "give it {'partition_type': 'skip', 'grad_allreduce': True}",
}
_AS_ROWS = {"rows": "out", "width": "in"}  # a table's rows are its head's columns
_SUMS = ("moe_tp_experts", "all_reduce")
_WRAPPING = ("edited", "read", "shape")


def norms(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """norms: a statistic (norm, softmax, top-k, mean) over an axis that is split, so that each rank normalises by its
    shard.

    OLMo2's query and key norms run over all heads at once. The statistic must be summed over ranks, or the axis
    gathered.
    """
    if subject.plan.plan is not None:
        return
    groups: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}  # by weights that are cut: these, and the modules
    for call, kind in subject.solution.reductions.items():
        if kind != _MATCHED:
            along = [weight.name for weight in _cut_along(subject, call)]
            if along:
                cut_here, modules = groups.setdefault(tuple(map(starred, along)), ([], []))
                cut_here += along
                modules.append(subject.solution.trace.calls[call].module)
    for cut, modules in groups.values():
        text = f"{modules[0]} normalises over an axis along which {cut[0]} is sharded: each rank sees only its shard"
        hint = "sum the statistic over ranks (autoplan does), or gather the output first"
        names = [*cut, *(name for name in subject.parameters if name.rpartition(".")[0] in modules)]
        yield subject.suspect(check, subject.patterns(subject.folds.expand_all(modules)), text, hint, names=names)


def _cut_along(subject: Audited, call: int) -> Iterator[Weight]:
    """Weights that the plan cuts along the axes which a call sums over, and whose output it keeps cut."""
    shards, trace = subject.solution.shards, subject.solution.trace
    assert shards is not None
    run = trace.calls[call]
    axes = {leaf for tensor in run.reads for leaf in shards.split_leaves(tensor)}
    for name, tensor in trace.by_name.items():
        weight = subject.by_name.get(name)
        if weight is None or not weight.is_matrix or not axes & shards.split_leaves(tensor):
            continue
        style = "gather" if weight.said.line is None else weight.said.line.style
        keeps = "gather" not in style and not style.startswith(("rowwise", "embedding"))
        if keeps and weight.said.dim is not None and weight.said.dim == weight.fact.dim:
            yield weight


def gradients(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """gradients: a gradient that ranks must sum and do not, or sum twice.

    A whole weight that meets only this rank's heads (query and key norms, per-head scalars) gets a part of its gradient
    on each rank: forward is exact, and training drifts. A sum of whole gradients makes them tp times too large.
    """
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
        yield subject.suspect(check, subject.patterns(names), text, hint, names=[*names, *alike])


def tied(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """tied: one parameter under two names, and the two are treated differently.

    A plan that names both with different cuts shards it twice, and torch's `parallelize_module` unties the two without
    a word: forward stays right, the gradient does not.
    """
    for weight in subject.weights:
        if len(weight.names) < 2 or subject.plan.plan is not None:
            continue
        lines = {name: line for name in weight.names if (line := subject.plan.line_for(name)) is not None}
        written = [CUTS.get(line.style, "whole") for line in lines.values()]
        cuts = {_AS_ROWS.get(cut, cut) for cut in written}
        whole = len(lines) < len(weight.names)
        both = " and ".join(weight.names[:2])
        where = tuple(dict.fromkeys(line.pattern for line in lines.values()))
        if lines and subject.plan.dialect == "torch":
            text = f"{both} are one tied parameter, and parallelize_module makes two of it"
            hint = "tie them again after it, before the optimizer"
            yield subject.suspect(check, where, text, hint, names=weight.names)
        elif len(cuts) > 1 or (cuts - {"whole", "nothing"} and whole):
            text = f"{both} are one tied parameter, but the plan gives {', '.join(map(str, lines.values()))}"
            hint = "give both the same sharding: embedding_rowwise for the table is colwise for the head"
            if subject.plan.dialect == "deepspeed":
                hint = "leave both whole"
            yield subject.suspect(check, where, text, hint, names=weight.names)


def experts(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """experts: partial sums of experts, router and shared expert must each be summed once.

    A plan that cuts expert weights must say what sums their output (`moe_tp_experts` on the module that holds them),
    and leave the router whole: which expert is taken must be decided from all scores.
    """
    if subject.plan.plan is not None:
        return
    for axis in subject.solution.classes:
        if not any("topk" in event for event in axis.events):
            continue
        for name, dim in axis.parameters:
            weight = subject.by_name.get(name)
            if weight is not None and weight.is_matrix and weight.said.dim == dim and weight.said.line is not None:
                text = f"{name} scores {axis.size} choices; sharded, each rank would see only some of the scores"
                yield subject.suspect(check, weight.said.line.pattern, text, "replicate the router", names=[name])
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
        yield subject.suspect(check, where, text, hint, names=names)


def sequence(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """sequence: sequence-parallel styles, and who reads the sequence that they cut.

    Between split regions the stream holds this rank's positions only: rotary tables and masks derive their length from
    it. A plan that marks some norms and forgets a consumer runs on sequences of two lengths.
    """
    plan = subject.plan.plan
    if plan is not None:
        cuts = bool(plan.runtime.of(SequenceBoundary))
        if plan.sequence_parallel and not cuts:
            text = "the plan sets sequence_parallel but shards no sequence"
            yield Finding(check, "warn", "", text, "plan again with sequence_parallel=True")
        return
    raw = subject.plan.raw  # a norm of heads is "sharded" along these
    lines = [
        line
        for line in subject.plan.lines
        if line.style == "sequence_parallel"
        and not any(layout.dim != 1 for layout in getattr(raw.get(line.pattern), "sequence_sharding", ()))
    ]
    if not lines:
        return
    reached = [name for line in lines for name in subject.modules if subject.plan.reaches(line, name)]
    # What analysis says of cutting this model's stream
    from autoplan.analyse.solve import solve

    stacks = tuple(stack.fqns for stack in subject.stacks)
    solution = solve(subject.solution.trace, subject.tp_size, sequence_stacks=stacks)
    reason = "; ".join(map(str, solution.whole_sequence[:2]))
    text = f"{len(reached)} modules expect an input sharded along the sequence"
    if reason:
        text += f", but the full sequence is needed: {reason}"
    where = tuple(line.pattern for line in lines)
    hint = "sequence_parallel=True shards the stream only where every consumer is known"
    names = [name for line in lines for weight in subject.of_line(line) for name in weight.names]
    yield subject.suspect(check, where, text, hint, names=names)


def wrapping(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """wrapping: the code around a layer forbids to wrap it.

    torch's and transformers' styles make the weight a DTensor and the output a view of one. Code that changes the
    output in place, or reads the weight by itself, then raises in training; a convolution has no `in_features` to cut
    by.
    """
    if subject.plan.dialect not in ("torch", "transformers") or subject.level == "note":
        return
    cut = [w for w in subject.weights if w.said.dim is not None and w.name.endswith(".weight")]
    lines = {w.module: w.said.line for w in cut if w.said.line is not None}
    uncut = (None, "any", "nothing", "whole")
    lines = {name: line for name, line in lines.items() if CUTS.get(line.style) not in uncut}
    groups: dict[Obstacle, list[str]] = {}
    for obstacle in obstacles(subject.solution.trace, lines):
        if obstacle.kind in _WRAPPING:
            same = replace(obstacle, pattern=lines[obstacle.pattern].pattern, by=starred(obstacle.by))
            groups.setdefault(same, []).append(obstacle.pattern)
    for same, modules in groups.items():
        hint = f"replicate {subject.folded(modules)}, or use autoplan.parallelize, whose hooks can do this"
        names = [f"{module}.weight" for module in modules]
        why = f"{modules[0]} cannot be wrapped: {same.why}"
        yield subject.suspect(check, same.pattern, why, hint, names=names)
