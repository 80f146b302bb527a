"""Proofs that a plan carries: permutation law and graph replay on a tiny clone, or a run on simulated ranks.

The tiny clone is planned by the same rules at its own small size; what holds for its axes holds for the large model's,
since both are the same code. Where a clone cannot be made or run, the proof says so and entries stay unproven.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from autoplan.analyse.solve import Solution
from autoplan.capture.capture import Captured, capture_real
from autoplan.common.dtypes import inputs_in, working_dtype
from autoplan.common.errors import AutoplanError
from autoplan.decide.plan.chosen import choices_of_plan, solve_chosen
from autoplan.decide.plan.experts import experts_of
from autoplan.decide.written_plans.choices import Choices
from autoplan.hf.inputs.make import make_inputs
from autoplan.hf.source import Source
from autoplan.values import Entry, Finding, Means, Plan, Proof, Trace

__all__ = ["TRIED", "GraphProof", "prove_graph", "prove_ranks", "sequence_findings", "settle_means"]

TRIED = "proof"  # the check under which findings tell how a plan did on simulated ranks
_TINY_TP = 2


@dataclass(frozen=True)
class GraphProof:
    """The outcome of the graph proof, ready to be written into a plan."""

    proof: Proof
    findings: tuple[Finding, ...] = ()
    failed: bool = False

    def stamp(self, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        """Say in each entry what was proven."""
        if not self.proof.ok:
            return entries
        return tuple(replace(entry, proof=f"graph at tp={self.proof.tp_size}") for entry in entries)


def prove_graph(source: Source, plan: Plan, trace: Trace, choices: Choices | None = None) -> GraphProof:
    """Permutation law and replay on a tiny clone, at a size of its own, under the same choices.

    `trace` is what the model itself does: a clone that does less proves less, and a finding says so.
    """
    from autoplan.check.replay.permute import check_permutations
    from autoplan.check.replay.replay import replay

    try:
        clone, entries, captured = _recorded_clone(source)
    except AutoplanError as error:
        note = Finding("proof", "note", "", f"no tiny clone to prove the plan on: {error.message}")
        return GraphProof(Proof("none", 1, False, (), "unproven"), (note,))
    solution = solve_chosen(
        captured.trace,
        _TINY_TP,
        choices.for_clone() if choices is not None else None,
        experts=experts_of(plan.tp_size, plan.ep_size if plan.runtime.experts else 1, Means()),
    )
    assert solution.shards is not None
    law = check_permutations(clone, entries, captured.trace, solution.axes, solution.shards.marks)
    played = replay(solution.shards.trace, captured.recording, solution.shards)
    findings = [*_never_ran(trace, captured.trace), *played.findings] + [
        Finding(
            "permutation",
            "error",
            _where(solution, axis),
            f"permuting its {axis.size} units changes the output by {e:.1e}",
        )
        for axis, e in law.failed.items()
    ]
    text = (
        f"{len(law.passed)} axes permuted without change, {played.split_ops} ops replayed on {_TINY_TP} simulated ranks"
    )
    failed = any(finding.level == "error" for finding in findings)
    proof = Proof("graph", _TINY_TP, not failed, ("permutation", "replay"), text)
    return GraphProof(proof, tuple(findings), failed)


def _never_ran(model: Trace, clone: Trace) -> Iterator[Finding]:
    """Classes that run in the model and not in its tiny clone: the proof shows nothing of them."""
    of_model, of_clone = (
        {trace.module_classes[visit.module] for visit in trace.visits if visit.module in trace.module_classes}
        for trace in (model, clone)
    )
    missing = sorted(of_model - of_clone)
    if missing:
        text = f"the tiny clone never runs {', '.join(missing)}: what the plan does there is derived, not proven"
        yield Finding("proof", "warn", "", text)


def _recorded_clone(source: Source) -> tuple[nn.Module, dict[str, Any], Captured]:
    """A tiny clone that runs, its calls, and what it does in them.

    In float64, in float32 where its own code mixes the two; shrunk less where the smallest cannot run.
    """
    refusal: AutoplanError | None = None
    for one, dtype in _attempts(source):
        try:
            clone = one.tiny(dtype=dtype, experts="batched_mm")
            config = getattr(clone, "config", None)
            made = make_inputs(clone, config=config, model_type=one.model_type, inputs=one.inputs)
            entries = inputs_in(working_dtype(clone), made.entries)
            return clone, entries, capture_real(copy.deepcopy(clone), entries, keep_values=True)
        except AutoplanError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _attempts(source: Source) -> Iterator[tuple[Source, torch.dtype]]:
    return ((one, dtype) for one in source.ever_larger() for dtype in (torch.float64, torch.float32))


def _where(solution: Solution, axis: object) -> str:
    for fact in solution.classes:
        if fact.split and fact.size == getattr(axis, "size", 0):
            return fact.parameters[0][0]
    return ""


def sequence_findings(solution: Solution) -> tuple[Finding, ...]:
    """What sequence parallelism leaves whole, or why there is none."""
    if not solution.sequence_parallel:
        why = "; ".join(solution.sequence_notes)
        return (Finding("sequence", "warn", "", f"sequence parallelism was asked for and is not applied: {why}"),)
    return tuple(Finding("sequence", "note", "", f"the whole sequence at {note}") for note in solution.sequence_notes)


def settle_means(
    source: Source, wanted: Means, tp_size: int = _TINY_TP, ep_size: int = 1
) -> tuple[Means, tuple[Finding, ...]]:
    """Shard the tiny clone on simulated ranks and keep the first means that give the same numbers.

    Findings say what had to be left out, or that nothing would do. Without a clone what is wanted stays.
    """
    from autoplan.check.verify.verify import verify_source

    try:
        report = verify_source(
            source,
            tp_size=min(tp_size, _TINY_TP),
            ep_size=min(ep_size, _TINY_TP),
            sequence_parallel=wanted.sequence,
            checks=("forward",),
        )
    except AutoplanError as error:
        return wanted, (Finding("proof", "note", "", f"not tried on simulated ranks: {error.message}"),)
    means: Means = report.details["means"]
    first = next((finding for finding in report.findings if finding.level == "error"), None)
    if first is not None:
        text = f"on simulated ranks the sharded tiny clone differs: {first.where} {first.message}"
        return means, (Finding(TRIED, "error", first.where, text, "keep the modules named here whole"),)
    left_out = []
    if wanted.sequence and not means.sequence:
        left_out.append(_left_out("sequence", "sequence parallelism was asked for and is not applied"))
    if means.whole:
        what = f"{', '.join(means.whole)} and what shares its cut stays whole"
        left_out.append(Finding("proof", "warn", means.whole[0], f"{what}: cut, the tiny clone did not give the same"))
    if ep_size > 1 and not means.experts:
        left_out.append(_left_out("experts", "expert parallelism was asked for and is not applied"))
    if wanted.scoped and not means.scoped:
        left_out.append(_left_out("scoped", "calls in the middle of a module's Python are not rewritten"))
    return means, tuple(left_out)


def _left_out(check: str, what: str) -> Finding:
    level: Literal["warn", "note"] = "note" if check == "scoped" else "warn"
    return Finding(check, level, "", f"{what}: with it the tiny clone did not give the same on simulated ranks")


def prove_ranks(source: Source, plan: Plan) -> Plan:
    """Run the sharded tiny clone on simulated ranks and write the outcome into the plan."""
    from autoplan.check.verify.verify import verify_source

    written = plan if choices_of_plan(plan) is not None else None
    tp_size, ep_size = (min(size, _TINY_TP) for size in (plan.tp_size, plan.ep_size))
    how: Any = {"sequence_parallel": plan.sequence_parallel}
    report = verify_source(source, written, tp_size=tp_size, ep_size=ep_size, **how)
    checked = tuple(report.details.get("checked", ()))
    text = f"largest gradient error {max(report.gradients.values(), default=0.0):.1e}"
    proof = Proof("ranks", _TINY_TP, report.ok, checked, text)
    stamp = f"ranks at tp={_TINY_TP}" if report.ok else "unproven"
    entries = tuple(replace(entry, proof=stamp) for entry in plan.entries)
    return replace(plan, proof=proof, findings=plan.findings + report.findings, entries=entries)
