"""Score one architecture: from its name to its line on the scoreboard.

A tiny clone is built, planned and verified, and any failure on the way is an answer: the model itself may not run here,
nothing in it may be splittable, its numbers may be NaN, the sharded one may differ from it, or fail.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from autoplan.analyse.picture.dataflow import dataflow
from autoplan.analyse.picture.flow import node_of
from autoplan.analyse.solve import Solution
from autoplan.check.ranks.run import Engine
from autoplan.check.verify.clone import Clone, clone_of, feeds_at, parse_mesh
from autoplan.check.verify.sharded import CHECK_NAMES
from autoplan.common.errors import AutoplanError, IndivisibleError
from autoplan.common.patterns import matches
from autoplan.decide.naming import readings
from autoplan.decide.plan.chosen import expert_findings
from autoplan.decide.plan.folding import Names
from autoplan.values import (
    CallRewrite,
    Capabilities,
    Collective,
    Move,
    Plan,
    Report,
    Score,
    SequenceBoundary,
    Stack,
    Verdict,
)

CHECK_SETS = {"fast": ("parameters", "forward"), "all": CHECK_NAMES}


@dataclass(frozen=True)
class How:
    """Options of scoring: ranks, engine, checks; sequence parallelism, lengths to run, expert parallelism.

    `checkpointing`: the mode in which the sharded model checkpoints its blocks. `mesh`: one to train on as well.
    """

    tp_size: int
    engine: Engine = "threads"
    checks: tuple[str, ...] = CHECK_SETS["fast"]
    sequence_parallel: bool = False
    lengths: tuple[int, ...] = ()
    ep_size: int = 1
    checkpointing: str = ""
    mesh: str = ""
    cp_size: int = 1


def score(model_type: str, class_name: str, how: How) -> Score:
    """Build, plan, verify one architecture. An architecture's own errors are never raised."""
    start = time.perf_counter()
    blank = Score(model_type, class_name, "cannot run")
    try:
        done = _scored(blank, how)
    except Exception as error:  # one architecture must not stop the others
        done = replace(blank, verdict="failed", reason=_error_text(error))
    return replace(done, seconds=round(time.perf_counter() - start, 2))


def _scored(blank: Score, how: How) -> Score:
    from autoplan.hf.source import resolve

    try:
        source = resolve(f"{blank.model_type}:{blank.class_name}")
        clone = clone_of(source)
        runs = {
            f"{feed}, length {length}": inputs
            for length in how.lengths
            for feed, inputs in feeds_at(source, clone.model, batch=2, length=length).items()
        }
    except (AutoplanError, ImportError) as error:
        return replace(blank, reason=_error_text(error))
    return score_clone(clone, blank, how, runs)


def score_clone(
    clone: Clone, blank: Score, how: How, runs: Mapping[str, Any] | None = None, one_stack: bool = False
) -> Score:
    """Plan and verify a tiny model that runs; return the filled-in score. `runs` replace the clone's feeds.

    `one_stack`: of several stacks of blocks one is sharded along its sequence, as `plan` does where all of them fail.
    """
    from autoplan.check.verify.mesh_training import check_training
    from autoplan.check.verify.verify import verify_clone
    from autoplan.common.options import Wish
    from autoplan.decide.plan.planner import make_plan
    from autoplan.hf.source import resolve
    from autoplan.hf.stacks import layers
    from autoplan.planning import capture_source, folded_reasons, solve_source, stacks_to_cut

    source = resolve(clone.model, inputs=clone.feeds)
    captured = capture_source(source, clone.model)
    stacks = layers(clone.model)
    context = how.cp_size > 1
    wish = Wish(how.tp_size, how.ep_size, cp_size=how.cp_size)
    may_use = Capabilities(one_stack=one_stack)
    blocks = stacks_to_cut(stacks, may_use) if how.sequence_parallel or context else None
    try:
        solution = solve_source(source, captured, wish, sequence_stacks=blocks, capabilities=may_use)
    except IndivisibleError as error:
        return replace(blank, verdict="refused", reason=_error_text(error))
    cut = solution.sequence_parallel
    drafted = make_plan(solution, model=source.name, layers=stacks, sequence_parallel=cut)
    plan = replace(drafted, tp_size=how.tp_size, ep_size=how.ep_size, cp_size=how.cp_size)
    forward, backward = reductions_per_block(plan)
    inside = expert_findings(plan, solution) if plan.ep_size > 1 else ()  # sharded, not on different ranks
    on_experts = [f"{finding.where}: {finding.message}" if finding.where else finding.message for finding in inside]
    scored = replace(
        blank,
        **vars(share_of(solution, plan)),
        forward=forward,
        backward=backward,
        scoped=len(solution.runtime.of(CallRewrite)),
        notes=(*captured.trace.notes, *map(str, solution.refusals), *on_experts, clone.note),
        regions=regions_per_block(plan) if cut else None,
        uncut="; ".join(map(str, folded_reasons(solution))) if blocks is not None and (context or not cut) else "",
    )
    try:
        tested = replace(clone, feeds=runs) if runs else clone
        report = verify_clone(tested, plan, engine=how.engine, checks=how.checks, checkpointing=how.checkpointing)
        if how.mesh and report.ok:  # train on the mesh, with and without checkpointing
            mesh = parse_mesh(how.mesh)
            trained, _ = check_training(tested.model, tested.feeds, tested.others, plan, mesh, engine=how.engine)
            ok = not any(finding.level == "error" for finding in trained)
            report = replace(report, ok=ok, findings=(*report.findings, *trained))
    except AutoplanError as error:  # even the unsharded model fails the checks
        return replace(scored, reason=_error_text(error))
    verdict, reason = verdict_of(report)
    if cut and not context and verdict in ("wrong", "failed"):  # `autoplan plan` then drops it, too
        uncut = f"with it the tiny clone's results differed on simulated ranks: {reason}"
        return replace(score_clone(clone, blank, replace(how, sequence_parallel=False), runs), uncut=uncut)
    if context and verdict in ("wrong", "failed") and not one_stack and len(stacks) > 1:
        return score_clone(clone, blank, how, runs, one_stack=True)
    errors = [*report.gradients.values(), *([] if report.forward is None else [report.forward])]
    return replace(
        scored,
        verdict=verdict,
        reason=reason,
        collectives=report.details["collectives"],
        error=max(errors, default=None),
        communication=report.details["communication"],
        recomputed=report.details["noted"],
        not_checked=tuple(report.details["not_checked"]),
    )


def verdict_of(report: Report) -> tuple[Verdict, str]:
    """Return one word for a report, and what to know about it."""
    errors = [finding for finding in report.findings if finding.level == "error"]
    for raised in (finding for finding in errors if not finding.where):  # numbers that differ have a tensor's name
        return "failed", f"{raised.check}: {raised.message}"
    if errors:
        worst = max(errors, key=lambda finding: report.gradients.get(finding.where, math.inf))
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return "wrong", f"{worst.check}: {worst.where} {worst.message}{more}"
    unclear = [finding for finding in report.findings if finding.kind == "not-comparable"]
    if unclear:
        return "not comparable", f"{len(unclear)} tensors of the unsharded model are NaN, first {unclear[0].where}"
    if report.forward is None or not report.gradients:
        return "not comparable", "the model returned nothing that has a gradient"
    return "exact", ""


def _error_text(error: Any) -> str:
    if isinstance(error, AutoplanError):
        return str(error.message)
    import traceback

    place = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text} (at {place.filename.rsplit('/', 1)[-1]}:{place.lineno} in {place.name})"


# The figures on a scoreboard: the share of a model that is sharded, and the communication of a block.
#
# Only parameters with two dims or more count (norms and biases are small). Replicated position and type tables do not
# count (all tables but the largest one that inputs index: in a tiny clone a position table may be larger than the
# vocabulary), nor do the small latents of latent attention. A parameter that no run of the model used is replicated for
# lack of evidence: it counts, and is listed apart.


_TABLE = {"embedding", "shift", "parameter"}  # uses of a table: lookup, addition
_LATENT = "latent"  # last word of the roles of latent attention


@dataclass(frozen=True)
class Share:
    """`split` of `counted` weight elements are sharded; `whole` and `unused` are patterns of the others."""

    split: int
    counted: int
    whole: tuple[str, ...]
    unused: tuple[str, ...]


def share_of(solution: Solution, plan: Plan) -> Share:
    """Count the elements of the full model's weights, folded blocks included."""
    names = Names(solution.trace)
    facts = [fact for fact in solution.parameters if not fact.buffer and sum(size > 1 for size in fact.shape) > 1]
    flow = dataflow(solution.trace)
    read = readings(flow, solution.parameters)
    kinds = {fact.names[0]: {reading.node.kind for reading in read.get(fact.names[0], ())} for fact in facts}
    tables = {name for name, used in kinds.items() if used and used <= _TABLE}
    # Tables indexed by an input (token ids), not by computed numbers (positions, types).
    of_inputs = {box for box in flow if any(node_of(flow, source).kind == "input" for source in flow.predecessors(box))}
    indexed = {n for n, used in read.items() if any(r.node.kind == "embedding" and r.box in of_inputs for r in used)}
    largest = max((fact for fact in facts if fact.names[0] in indexed), key=lambda fact: fact.bytes, default=None)
    latents = [item.fqn for item in plan.replicated if any(role.split()[-1] == _LATENT for role in item.roles)]
    counted = cut = 0
    whole: dict[str, list[str]] = {}
    unused: list[str] = []
    for fact in facts:
        name = fact.names[0]
        small = (name in tables and fact is not largest) or any(matches(pattern, name) for pattern in latents)
        if fact.dim is None and small:
            continue
        number = len(names.expand(name)) * prod(fact.shape)
        counted += number
        if fact.dim is not None:
            cut += number
        elif not read.get(name):
            unused.append(name)
        else:
            whole.setdefault(fact.reason, []).append(name)
    listed = [f"{p}: {why}" for why, members in whole.items() for p in names.fold(members, parameters=True)]
    return Share(cut, counted, tuple(listed), names.fold(unused, parameters=True) if unused else ())


def main_stack(stacks: Iterable[Stack]) -> Stack | None:
    """Return the decoder if there is one, else the longest stack."""
    return min(stacks, key=lambda stack: (stack.kind != "decoder", -len(stack.fqns)), default=None)


def reductions_per_block(plan: Plan) -> tuple[float | None, float | None]:
    """Return the all-reduces in a block of the main stack, forward and backward, averaged over its blocks."""
    stack = main_stack(plan.layers)
    if stack is None:
        return None, None
    runtime = plan.runtime
    sums = [(done.pattern, m.times, m.backward) for done in runtime.instructions for m in done.moves if m.sums]
    sums += [(rule.pattern, 1, True) for rule in runtime.parameters if rule.gradient != "local"]
    inside = [(times, back) for fqn in stack.fqns for pattern, times, back in sums if _is_inside(pattern, fqn)]
    backward = sum(times for times, back in inside if back)
    return (sum(times for times, _ in inside) - backward) / len(stack.fqns), backward / len(stack.fqns)


def regions_per_block(plan: Plan) -> float | None:
    """Return how often a block of the main stack all-gathers the sequence to enter a region, on average."""
    stack = main_stack(plan.layers)
    if stack is None:
        return None
    gathers = [b.pattern for b in plan.runtime.of(SequenceBoundary) if Move(Collective.ALL_GATHER) in b.moves]
    return sum(_is_inside(pattern, fqn) for fqn in stack.fqns for pattern in gathers) / len(stack.fqns)


def _is_inside(pattern: str, block: str) -> bool:
    """Return whether the pattern names the block or a module in it."""
    return matches(".".join(pattern.split(".")[: block.count(".") + 1]), block)
