"""The pipeline of `autoplan.plan`, by named steps: a trial, a draft, a proof.

    source ── settle_capabilities ── draft_plan ── prove_graph ── prove_ranks ── Plan
              │                      │             │              └ prove="ranks": all that verify does
              │                      │             └ permutation law and replay of the recorded graph
              │                      └ planning.py: capture, solve, write down
              └ the trial: a tiny clone, sharded, on simulated ranks (Proof.trial names it)

The trial comes first because it says what the draft may use. The steps of the proof follow it. The pipeline
is here and not in `planning.py`, since simulated ranks and `verify` draft plans themselves: no import runs up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.capture.capture import Captured, capture_real
from autoplan.capture.copies import copied
from autoplan.capture.feeding.resize import with_other_paths
from autoplan.check.permute import check_permutations
from autoplan.check.ranks.common import Budget
from autoplan.check.replay import replay
from autoplan.check.verify.clone import Clone, Sizes, is_small_and_real, tried_sizes
from autoplan.check.verify.derived import gathered_in
from autoplan.check.verify.subject import SAME
from autoplan.check.verify.verify import verify_tried
from autoplan.common.code.ways import Ways, added, seen_code, ways_of
from autoplan.common.errors import AutoplanError, CaptureError, IndivisibleError
from autoplan.common.options import Wish
from autoplan.common.patterns import is_under, matches
from autoplan.common.random_values import inputs_in, tried_dtypes, working_dtype
from autoplan.common.stages import stage
from autoplan.decide.plan.chosen import choices_of_plan, experts_of, solve_chosen
from autoplan.decide.plan.folding import BLOCKS
from autoplan.decide.written_plans.choices import ChosenCuts
from autoplan.hf.inputs.make import make_inputs
from autoplan.hf.names import version_findings
from autoplan.hf.source import Source
from autoplan.hf.stacks import layers
from autoplan.patches.seeding import Lifted
from autoplan.patches.simulated_ranks import alone
from autoplan.planning import draft_plan, wanted_capabilities, with_paths
from autoplan.values import Capabilities, Entry, Finding, LocalExperts, Plan, Proof, Trace, Trial


def proven_plan(source: Source, wish: Wish, choices: ChosenCuts | None = None, module: nn.Module | None = None) -> Plan:
    """Return a plan with its proof. `wish.prove` "ranks" adds everything that verify does; "none" leaves a draft."""
    with alone() as used:
        plan = _steps(source, wish, choices, source.module() if module is None else module)
    if versions := version_findings():
        plan = replace(plan, findings=(*plan.findings, *versions))
    if not used or not dist.is_initialized():
        return plan
    text = f"the model calls torch.distributed itself ({', '.join(sorted(used))}): planned as on a single rank"
    hint = "let all ranks read what they log: a branch on the rank that sums a sharded value waits for the others"
    return replace(plan, findings=(*plan.findings, Finding("distributed", "note", "", text, hint)))


def _steps(source: Source, wish: Wish, choices: ChosenCuts | None, module: nn.Module) -> Plan:
    if wish.prove == "none" or wish.ranks == 1:
        return draft_plan(source, wish, choices=choices, module=module).plan

    wanted, budget = wanted_capabilities(wish), Budget(wish.trial_seconds)
    idle = choices is None and not wish.strict and wish.ep_size == 1
    draft = None
    if wish.cp_size > 1:  # what is gathered depends on the model's sizes, and the clone gathers the same
        with suppress(IndivisibleError):
            draft = draft_plan(source, wish, choices=choices, module=module)
            wanted = replace(wanted, gathered=gathered_in(draft.plan, module))

    stage("trying a tiny clone on simulated ranks")
    settled = settle_capabilities(source, wanted, wish.tp_size, wish.ep_size, wish.cp_size, choices, budget, idle)
    if draft is None or settled.capabilities != wanted:
        draft = draft_plan(source, wish, choices=choices, capabilities=settled.capabilities, module=module)
    plan = replace(draft.plan, findings=draft.plan.findings + settled.findings)
    if settled.unsummed:
        plan = replace(plan, runtime=replace(plan.runtime, unsummed=plan.runtime.given))
    plan = with_paths(plan, seen_code(added(ways_of(plan.paths), settled.ways)))

    stage("verifying the plan on the graph of a tiny clone")
    proof = prove_graph(source, plan, draft.trace, draft.choices, settled.trial, settled.clone)
    plan = replace(plan, proof=proof.proof, findings=plan.findings + proof.findings, entries=proof.stamp(plan.entries))

    return prove_ranks(source, plan, settled.clone) if wish.prove == "ranks" else plan


# Proofs in a plan: the trial on simulated ranks, permutation law and graph replay on a tiny clone, `verify`.
#
# The tiny clone is planned by the same rules at its own small size; what holds for its axes holds for the large
# model's, since both are the same code. If a clone cannot be made or run, the proof says why and what to pass, and
# entries stay unproven: a plan is proven only if its clone ran on simulated ranks too.


TRIED = "proof"  # the check of findings about the outcome on simulated ranks
_TINY_TP = 2
_UNPROVEN = "unproven"
_NOT_TRIED = {"training": "training mode"}  # checks that a trial omits if the unsharded model cannot do them
_TRIED_BY = ("forward", "inputs", "second_shape", "other_dims", "training")
_TO_PASS = "pass inputs= that run forward and backward in float64, float32 or the model's own dtype"


@dataclass(frozen=True)
class Settled:
    """The capabilities that a plan may use, as established by the trial on simulated ranks."""

    capabilities: Capabilities
    trial: Trial = Trial()
    findings: tuple[Finding, ...] = ()
    ways: Ways = field(default_factory=dict)  # ways through the model's code that were tried but not recorded
    clone: Clone | None = None  # the clone that was tried
    unsummed: bool = False  # gradients of inputs that required none were wrong: calls that ask for them are refused


@dataclass(frozen=True)
class GraphProof:
    """The outcome of the graph proof, ready to be written into a plan. `unseen`: modules of which it shows nothing."""

    proof: Proof
    findings: tuple[Finding, ...] = ()
    unseen: tuple[str, ...] = ()

    def stamp(self, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        """Return the entries, each with what was proven of it."""
        if not self.proof.ok:
            return entries
        unseen = [entry for entry in entries if any(matches(entry.pattern, name) for name in self.unseen)]
        return tuple(entry if entry in unseen else replace(entry, proof="graph") for entry in entries)


def prove_graph(
    source: Source,
    plan: Plan,
    trace: Trace,
    choices: ChosenCuts | None = None,
    trial: Trial = Trial(),  # noqa: B008 - frozen
    tried: Clone | None = None,
) -> GraphProof:
    """Apply permutation law and replay to a tiny clone, at its own size, under the same choices.

    `tried`: the clone of the trial, which is recorded if possible. `trace` is that of the real model: a clone that does
    less proves less, and a finding says so. `trial` is the outcome on simulated ranks: without it nothing is proven,
    since the graph contains none of the model's Python.
    """
    try:
        clone, feeds, captured, precision = _recorded_clone(source, tried)
    except AutoplanError as error:
        text = f"no tiny clone to verify the plan on: {error.message}"
        proof = Proof("none", 1, False, (), text, trial, _found_wrong(trial))
        return GraphProof(proof, (Finding("proof", "warn", "", text, error.hint or _TO_PASS),))
    context = plan.tp_size == 1 < plan.cp_size  # the graph shows what tp splits, which is more than cp's heads
    solution = solve_chosen(
        captured.trace,
        _TINY_TP,
        choices.for_clone() if choices is not None else None,
        tuple(stack.fqns for stack in layers(clone)) if context else None,
        experts=experts_of(plan.tp_size, plan.ep_size if plan.runtime.of(LocalExperts) else 1, Capabilities()),
        context=context,
    )
    assert solution.shards is not None
    with precision():
        law = check_permutations(clone, feeds, solution.trace, solution.axes, solution.shards.marks)
    played = replay(solution.shards.trace, captured.recording, solution.shards)
    missing, unseen = _never_ran(trace, captured.trace)
    findings = list(played.findings)
    if missing:
        text = f"the tiny clone never runs {', '.join(missing)}: the plan for it is inferred, not verified"
        findings.insert(0, Finding("proof", "warn", "", text))
    for axis, change in law.failed.items():
        where = [fact.parameters[0][0] for fact in solution.classes if fact.split and fact.size == axis.size]
        text = f"permuting its {axis.size} units changes the output by {change:.1e}"
        findings.append(Finding("permutation", "error", where[0] if where else "", text))
    replayed = f"{played.split_ops} ops replayed on {_TINY_TP} simulated ranks"
    text = f"{len(law.passed)} axes permuted without changing the output, {replayed}"
    text += f"; except {', '.join(missing)}, which the tiny clone never runs" if missing else ""
    wrong = _found_wrong(trial, findings)
    ok = not wrong and trial.outcome != "skipped"
    checked = ("permutation", "replay") if law.passed or law.failed or played.split_ops else ()
    proof = Proof("graph", _TINY_TP, ok, checked, text, trial, wrong)
    return GraphProof(proof, tuple(findings), unseen)


def _found_wrong(trial: Trial, findings: Iterable[Finding] = ()) -> tuple[str, ...]:
    """Return the checks that found the plan wrong."""
    checks = [finding.check for finding in findings if finding.level == "error"]
    return tuple(dict.fromkeys(checks + ["trial"] * (trial.outcome == "wrong")))


def _never_ran(model: Trace, clone: Trace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the classes that run in the model but not in its tiny clone, and all modules of and inside these."""
    of_model, of_clone = (
        {trace.module_classes[visit.module] for visit in trace.visits if visit.module in trace.module_classes}
        for trace in (model, clone)
    )
    tops = [name for name, kind in model.module_classes.items() if kind in of_model - of_clone]
    inside = tuple(name for name in model.module_classes if any(is_under(top, name) for top in tops))
    return tuple(sorted(of_model - of_clone)), inside


Precision = Callable[[], AbstractContextManager[Any]]


def _recorded_clone(source: Source, tried: Clone | None) -> tuple[nn.Module, dict[str, Any], Captured, Precision]:
    """Return a tiny clone that runs, its feeds, its recording, and the precision in which it ran.

    Shrunk less if the smallest cannot run; in single precision, or the model's own, if it does not run in double.
    """
    refusal: AutoplanError | None = None
    for make in _attempts(source, tried):
        try:
            clone, feeds = make()
            for precision in (Lifted, nullcontext) if working_dtype(clone) == torch.float64 else (nullcontext,):
                try:
                    with precision():
                        return clone, feeds, capture_real(copied(clone), feeds, keep_values=True), precision
                except CaptureError as error:
                    refusal = refusal or error
        except AutoplanError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _attempts(source: Source, tried: Clone | None) -> Iterator[Callable[[], tuple[nn.Module, dict[str, Any]]]]:
    # a small real model is tried itself, but recorded as its config's clone, at sizes that two ranks can share
    if tried is not None and (source.own_clone or not (source.given is not None and is_small_and_real(source.given))):
        yield lambda: (tried.model, dict(tried.planned))
    for candidate in source.ever_larger():
        for dtype in tried_dtypes(source.module):
            yield partial(_fed_clone, candidate, dtype)


def _fed_clone(source: Source, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    clone = source.tiny(dtype=dtype, experts="batched_mm")
    example = make_inputs(clone, model_type=source.model_type, inputs=source.inputs, recipe=source.recipe)
    return clone, inputs_in(working_dtype(clone), with_other_paths(clone, example.feeds, example.others).feeds)


def settle_capabilities(
    source: Source,
    wanted: Capabilities,
    tp_size: int = _TINY_TP,
    ep_size: int = 1,
    cp_size: int = 1,
    choices: ChosenCuts | None = None,
    budget: Budget | None = None,
    idle: bool = False,
) -> Settled:
    """Shard the tiny clone on simulated ranks, with a user's choices; keep the first capabilities with the same
    numbers.

    Findings say what had to be left out, or that nothing worked. If no clone can be tried, all wanted capabilities
    stay, and the outcome says why and what to pass. `idle`: where nothing can be split, try a plan that splits nothing.
    """
    how: Any = {"sequence_parallel": wanted.sequence, "checks": _TRIED_BY, "choices": choices, "budget": budget}
    how["gathered"] = wanted.gathered
    try:
        sizes = tried_sizes(source, Sizes(tp_size, ep_size, cp_size))
        report, tried, clone = verify_tried(sizes, None, traffic=False, idle=idle, **how)
    except AutoplanError as error:
        trial = Trial("skipped", error.message, error.hint or _TO_PASS)
        text = f"not verified on simulated ranks: {trial.why}"
        return Settled(wanted, trial, (Finding("proof", "warn", "", text, trial.hint),))
    capabilities: Capabilities = report.details["capabilities"]
    errors = [finding for finding in report.findings if finding.level == "error"]
    first = next((finding for finding in errors if finding.check != "inputs"), None)
    if first is not None:
        text = f"on simulated ranks the sharded tiny clone's results differ: {first.where} {first.message}"
        hint = "replicate the modules named here"
        trial = Trial("wrong", text, hint, tried.ranks)
        return Settled(capabilities, trial, (Finding(TRIED, "error", first.where, text, hint),), clone=clone)
    left_out = [
        Finding("proof", "note", "", f"not verified on simulated ranks, {_NOT_TRIED[check]}: {why}")
        for check, why in report.details["not_checked"].items()
        if check in _NOT_TRIED and why != SAME
    ]
    for name, ranks in report.details["unread"].items():
        part = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        text = f"no gradient reached the part of {part} in the trial: it was not used"
        left_out.append(Finding("proof", "note", name, text))
    differed = "with it the tiny clone's results differed on simulated ranks"
    if wanted.sequence and not capabilities.sequence:
        text = f"sequence parallelism was requested but is not applied: {differed}"
        left_out.append(Finding("sequence", "warn", "", text))
    if capabilities.whole:
        text = f"{', '.join(capabilities.whole)} is replicated, with every dim that shares its sharding: sharded, the "
        left_out.append(Finding("proof", "warn", capabilities.whole[0], f"{text}tiny clone's results differed"))
    if ep_size > 1 and not capabilities.experts:
        text = f"expert parallelism was requested but is not applied: {differed}"
        left_out.append(Finding("experts", "warn", "", text))
    if wanted.scoped and not capabilities.scoped and not capabilities.idle:
        text = f"calls inside a module's forward are not rewritten: {differed}"
        left_out.append(Finding("scoped", "note", "", text))
    passed = Trial("passed", ranks=tried.ranks)
    return Settled(capabilities, passed, tuple(left_out), report.details["ways"], clone, unsummed=bool(errors))


def prove_ranks(source: Source, plan: Plan, clone: Clone | None = None) -> Plan:
    """Run the sharded tiny clone (the trial's, if given) on simulated ranks and write the outcome into the plan."""
    written = plan if choices_of_plan(plan) is not None else None
    how: Any = {"sequence_parallel": plan.sequence_parallel, "traffic": False, "clone": clone}
    try:
        report, tried, _ = verify_tried(tried_sizes(source, Sizes.of_plan(plan)), written, **how)
    except AutoplanError as error:  # no clone runs, as the trial has reported; the plan is not proven
        text = f"verify could not run: {error.message}"
        proof = replace(plan.proof, ok=False, text=text)
        return replace(plan, proof=proof, findings=(*plan.findings, Finding("proof", "warn", "", text, error.hint)))
    # findings on the clone's replicated blocks are dropped: the draft has them for the model's own size
    findings = tuple(finding for finding in report.findings if finding.check != BLOCKS)
    checked = tuple(report.details.get("checked", ()))
    text = f"largest gradient error {max(report.gradients.values(), default=0.0):.1e}"
    wrong = tuple(dict.fromkeys(plan.proof.wrong + _found_wrong(Trial(), report.findings)))
    trial = plan.proof.trial if plan.proof.trial.outcome == "wrong" else Trial("passed" if report.ok else "wrong")
    trial = replace(trial, ranks=tried.ranks)
    proof = Proof("ranks", tried.ranks, not wrong, checked, text, trial, wrong)
    stamp = f"{tried.ranks} simulated ranks" if proof.ok else _UNPROVEN
    unseen = [entry for entry in plan.entries if plan.proof.ok and entry.proof == _UNPROVEN]
    entries = tuple(entry if entry in unseen else replace(entry, proof=stamp) for entry in plan.entries)
    return replace(plan, proof=proof, findings=plan.findings + findings, entries=entries)
