"""One architecture, from its name to its line on the scoreboard.

A tiny clone is built, planned and verified, and whatever goes wrong on the way is an answer: the model itself may not
run here, nothing in it may be splittable, its numbers may be NaN, the sharded one may differ from it, or fail.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autoplan.check.ranks.run import Engine
from autoplan.check.scoreboard.share import reductions_per_block, regions_per_block, share_of
from autoplan.check.verify.sharded import CHECK_NAMES
from autoplan.check.verify.sizes import parse_mesh
from autoplan.common.errors import AutoplanError, IndivisibleError, SourceError
from autoplan.decide.plan.chosen import expert_findings
from autoplan.values import CallRewrite, Finding, Plan, Report, Score, Verdict

if TYPE_CHECKING:
    from autoplan.analyse.solve import Solution
    from autoplan.check.verify.clone import Clone

CHECK_SETS = {"fast": ("parameters", "forward"), "all": CHECK_NAMES}


@dataclass(frozen=True)
class How:
    """How architectures are scored: ranks, engine, checks; sequence parallelism, lengths to run, whole experts.

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
    """Build, plan, verify one architecture. Raises nothing that an architecture can cause."""
    start = time.perf_counter()
    blank = Score(model_type, class_name, "cannot run")
    try:
        done = _scored(blank, how)
    except Exception as error:  # one architecture must not stop the others, and its line says what happened
        done = replace(blank, verdict="failed", reason=_said(error))
    return replace(done, seconds=round(time.perf_counter() - start, 2))


def _scored(blank: Score, how: How) -> Score:
    from autoplan.check.verify.clone import clone_of, feeds_at
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
        return replace(blank, reason=_said(error))
    return score_clone(clone, blank, how, runs)


def score_clone(clone: Clone, blank: Score, how: How, runs: Mapping[str, Any] | None = None) -> Score:
    """Fill in the blank: plan and verify a tiny model that runs. `runs` are verified instead of the clone's feeds."""
    from autoplan.check.verify.verify import verify_clone
    from autoplan.common.options import Wish
    from autoplan.decide.plan.planner import make_plan
    from autoplan.hf.source import resolve
    from autoplan.hf.stacks import layers
    from autoplan.planning import capture_source, solve_source

    source = resolve(clone.model, inputs=clone.feeds)
    captured = capture_source(source, clone.model)
    stacks = layers(clone.model)
    context = how.cp_size > 1
    wish = Wish(how.tp_size, how.ep_size, cp_size=how.cp_size)
    blocks = tuple(stack.fqns for stack in stacks) if how.sequence_parallel or context else None
    try:
        solution = solve_source(source, captured, wish, sequence_stacks=blocks)
    except IndivisibleError as error:
        return replace(blank, verdict="refused", reason=_said(error))
    cut = solution.sequence_parallel
    made = make_plan(solution, model=source.name, layers=stacks, sequence_parallel=cut)
    plan = replace(made, tp_size=how.tp_size, ep_size=how.ep_size, cp_size=how.cp_size)
    share = share_of(solution, plan)
    forward, backward = reductions_per_block(plan)
    found = replace(
        blank,
        split=share.split,
        counted=share.counted,
        whole=share.whole,
        unused=share.unused,
        forward=forward,
        backward=backward,
        scoped=len(solution.runtime.of(CallRewrite)),
        notes=(*captured.trace.notes, *map(str, solution.refusals), *_on_experts(plan, solution), clone.note),
        regions=regions_per_block(plan) if cut else None,
        uncut="; ".join(map(str, solution.whole_sequence)) if blocks is not None and (context or not cut) else "",
    )
    try:
        tested = replace(clone, feeds=runs) if runs else clone
        report = verify_clone(tested, plan, engine=how.engine, checks=how.checks, checkpointing=how.checkpointing)
        if how.mesh and report.ok:
            report = _trained(report, tested, plan, how)
    except AutoplanError as error:  # not even the unsharded model goes through the checks
        return replace(found, reason=_said(error))
    verdict, reason = verdict_of(report)
    if cut and not context and verdict in ("wrong", "failed"):  # then `autoplan plan` does without, too
        uncut = f"with it the tiny clone did not give the same on simulated ranks: {reason}"
        return replace(score_clone(clone, blank, replace(how, sequence_parallel=False), runs), uncut=uncut)
    return replace(
        found,
        verdict=verdict,
        reason=reason,
        collectives=report.details["collectives"],
        error=_largest_error(report),
        communication=report.details["communication"],
        recomputed=report.details["noted"],
        not_checked=tuple(report.details["not_checked"]),
    )


def _trained(report: Report, clone: Clone, plan: Plan, how: How) -> Report:
    """With what training on a mesh, with and without checkpointing, has to say."""
    from autoplan.check.verify.mesh_training import check_training

    findings, _ = check_training(clone.model, clone.feeds, clone.others, plan, parse_mesh(how.mesh), engine=how.engine)
    ok = not any(finding.level == "error" for finding in findings)
    return replace(report, ok=ok, findings=(*report.findings, *findings))


def _on_experts(plan: Plan, solution: Solution) -> list[str]:
    """Where experts are cut inside although they were to be placed on different ranks."""
    found = expert_findings(plan, solution) if plan.ep_size > 1 else ()
    return [f"{finding.where}: {finding.message}" if finding.where else finding.message for finding in found]


def verdict_of(report: Report) -> tuple[Verdict, str]:
    """One word for a report, and what to know about it."""
    errors = [finding for finding in report.findings if finding.level == "error"]
    raised = [finding for finding in errors if not finding.where]  # numbers that differ have a tensor's name
    if raised:
        return "failed", _text(raised[0])
    if errors:
        worst = max(errors, key=lambda finding: report.gradients.get(finding.where, math.inf))
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        return "wrong", _text(worst) + more
    unclear = [finding for finding in report.findings if finding.kind == "not-comparable"]
    if unclear:
        return "not comparable", f"{len(unclear)} tensors of the unsharded model are NaN, {unclear[0].where} first"
    if report.forward is None or not report.gradients:
        return "not comparable", "the model returned nothing that has a gradient"
    return "exact", ""


def _largest_error(report: Report) -> float | None:
    found = [*report.gradients.values(), *([] if report.forward is None else [report.forward])]
    return max(found, default=None)


def _text(finding: Finding) -> str:
    return f"{finding.check}: {finding.where + ' ' if finding.where else ''}{finding.message}"


def _said(error: Any) -> str:
    if isinstance(error, SourceError | AutoplanError):
        return str(error.message)
    import traceback

    place = traceback.extract_tb(error.__traceback__)[-1]
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text} (at {place.filename.rsplit('/', 1)[-1]}:{place.lineno} in {place.name})"
