"""Compare any module with itself sharded in any way: the machinery under `verify`.

The unsharded model runs first and says what is right. Then every rank shards a copy and goes through the same checks
(`on_ranks.py`, `checks.py`), and its observations are judged. It does not matter here where the sharding comes from: a
plan, a planted fault, a few hand-written lines in a test.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError

from autoplan.capture.called import reads
from autoplan.capture.copies import copied
from autoplan.check.ranks.common import Budget, one_compute_thread
from autoplan.check.ranks.run import Engine
from autoplan.check.verify.checks import CHECKS, DRAWS, NOISE, NORM, Check, labels_for
from autoplan.check.verify.compare import Tolerance, compare, tolerance_for
from autoplan.check.verify.drawn import laws_of_draws
from autoplan.check.verify.on_ranks import CheckFailed, Job, Sharding, attentively, copy_of, observe_all, said
from autoplan.check.verify.subject import CANNOT_RUN, Group, Observation, Subject
from autoplan.common.code.ways import added
from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError, OutsideError
from autoplan.common.random_values import working_dtype
from autoplan.common.stages import stage
from autoplan.execute import random_streams
from autoplan.patches.kernels import on_reference_path
from autoplan.values import Finding, Report

CHECK_NAMES = tuple(check.name for check in CHECKS)
LOSS_LIMIT = 1e-4  # models compute losses in float32, whatever their dtype
ADVICE = {NORM: "clip_grad_norm_ clips by another norm than unsharded: parameters must be DTensors, rows counted once"}
_ASIDE = ("blocks", "noted", "ways", "ways_apart")  # observations of ranks besides collectives


def check_sharding(
    model: Any,
    feeds: Mapping[str, Mapping[str, Any]],
    sharding: Sharding,
    tp_size: int,
    *,
    others: Mapping[str, Mapping[str, Any]] | None = None,
    other_dims: Mapping[str, Mapping[str, Any]] | None = None,
    checks: Iterable[str] | None = None,
    engine: Engine = "threads",
    mesh: Any = None,
    dims: Mapping[str, int] | None = None,
    budget: Budget | None = None,
) -> Report:
    """Compare `model` sharded over `tp_size` ranks with itself unsharded, on a copy; weights and dtype stay.

    `feeds` are the calls to make, by name; `others` the same calls with another batch and length, `other_dims` with
    another number of dims, which may fail. `dims`: names and sizes of the mesh to simulate, if it has more than the one
    dim "tp".
    """
    start, wanted = time.perf_counter(), CHECK_NAMES if checks is None else tuple(checks)
    if unknown := [name for name in wanted if name not in CHECK_NAMES]:
        raise AutoplanError(f"no such check: {', '.join(map(repr, unknown))}", hint=f"choose from {CHECK_NAMES}")
    with one_compute_thread(), on_reference_path():  # around backward, too: checkpointed blocks run again there
        subject = _prepared(model, feeds, others or {}, labelled="loss" in wanted)
        subject = replace(subject, summed=sharding.summed, other_dims=other_dims or {})
        stage("running the tiny clone unsharded")
        subject, reference, absent = _observed_unsharded(subject, wanted)
        subject = replace(subject, draws=any(DRAWS in seen for seen in reference.values()))
        job = Job(subject, sharding, tp_size, tuple(reference), tuple((dims or {"tp": tp_size}).items()))
        tolerance = tolerance_for(working_dtype(model))
        ranks, findings = _on_ranks(job, reference, tolerance, engine, mesh, budget or Budget())
        gradients: dict[str, float] = {}
        forward: float | None = None
        failed: set[str] = set()
        for check in CHECKS:
            if ranks and check.name in ranks[0][0]:
                seen = [observed[check.name] for observed, _ in ranks]
                more, errors = judge(check, reference[check.name], seen, tolerance)
                if check.name in ("forward", "second_shape") and more:
                    tolerance, note = tolerance_of(check, subject, reference[check.name], errors, tolerance)
                    more, errors = judge(check, reference[check.name], seen, tolerance)
                    findings += note
                if any(finding.level == "error" for finding in more):
                    failed.add(check.name)
                    if check.may_fail:
                        continue
                findings += more
                if check.name == "forward":
                    outputs = _worst(of_group for group, of_group in errors.items() if group.output)
                    gradients = _worst(of_group for group, of_group in errors.items() if group.gradient)
                    forward = max(outputs.values(), default=None)
    moved = ranks[0][1] if ranks else {}
    seen_by = [check for check in CHECKS if ranks and check.name in ranks[0][0]]
    done = tuple(check.name for check in seen_by if not (check.may_fail and check.name in failed))
    ways = moved.get("ways", {})
    for name, more_ways in moved.get("ways_apart", {}).items():
        ways = ways if name in failed else added(ways, more_ways)
    whole = [tensors for seen in reference.values() for group, tensors in seen.items() if group.gradient]
    return Report(
        ok=not any(finding.level == "error" for finding in findings),
        findings=tuple(dict.fromkeys(findings)),  # two checks may show the same
        gradients=gradients,
        forward=forward,
        tp_size=tp_size,
        details={
            "checked": done,
            "not_checked": absent,
            "engine": "mesh" if mesh is not None else engine,
            "precision": tolerance.precision,
            "tolerance": tolerance.limit,
            "collectives": {kind: n for kind, n in moved.items() if sharding.counted and kind not in _ASIDE},
            "blocks": moved.get("blocks", {}),
            "noted": moved.get("noted"),
            "unread": sharding.unread(whole) if sharding.unread is not None else {},
            "ways": ways,
            "seconds": round(time.perf_counter() - start, 3),
        },
    )


def _on_ranks(
    job: Job, reference: Mapping[str, Any], tolerance: Tolerance, engine: Engine, mesh: Any, budget: Budget
) -> tuple[list[Any], list[Finding]]:
    """Return every rank's observations, and what failed. Where gradients of inputs change nothing else unsharded, ranks
    compute them in the forward that is checked anyway; alone, if that forward is wrong."""
    if not job.sharding.counted and _changes_nothing(job.subject.model, reference):
        fewer = tuple(name for name in job.checks if name != "inputs")
        asking = replace(job, subject=replace(job.subject, asks=True), checks=fewer)
        ranks, findings = observe_all(asking, engine, mesh, budget)
        for seen, _ in ranks:
            seen["inputs"] = {group: seen["forward"].pop(group) for group in reference["inputs"] if group.asked}
        forward = next(check for check in CHECKS if check.name == "forward")
        if ranks and not judge(forward, reference["forward"], [seen["forward"] for seen, _ in ranks], tolerance)[0]:
            return ranks, findings
    return observe_all(job, engine, mesh, budget)


def _changes_nothing(model: Any, reference: Mapping[str, Any]) -> bool:
    """Return whether outputs and weights' gradients are the same bits if inputs require gradients, and the model's code
    does not ask whether they do."""
    if not {"forward", "inputs"} <= reference.keys() or reads(model, "requires_grad", "grad_fn", "is_leaf"):
        return False
    usual = reference["forward"]
    return all(
        seen.keys() == usual[group].keys() and all(torch.equal(x, usual[group][name]) for name, x in seen.items())
        for group, seen in reference["inputs"].items()
        if not group.asked
    )


def _prepared(model: Any, feeds: Mapping[str, Any], others: Mapping[str, Any], labelled: bool) -> Any:
    """Return the unsharded subject, in eval mode; `labelled`: with labels for the feeds that take them."""
    subject = Subject(copied(model).eval(), feeds, others)
    subject = replace(subject, lifted=can_be_lifted(subject))
    if not (labelled and conventions().targets in subject.signature):
        return subject
    return replace(subject, labels=labels_for(copy_of(subject)))  # a run may leave hooks behind


def can_be_lifted(subject: Any) -> bool:
    """Return whether it is a model in double precision that runs with everything inside in double precision too."""
    if working_dtype(subject.model) != torch.float64:
        return False
    lifted = replace(subject, model=copied(subject.model), lifted=True)
    try:
        with torch.no_grad():
            for inputs in subject.feeds.values():
                lifted.forward(inputs)
    except CANNOT_RUN:
        return False
    return True


def _observed_unsharded(subject: Any, wanted: tuple[str, ...]) -> tuple[Any, dict[str, Any], dict[str, str]]:
    """Return the unsharded model's observations; without lifting to double precision if it recomputes blocks in
    backward, which torch does outside of every function mode."""
    try:
        return subject, *_reference(subject, wanted)
    except CheckFailed as error:
        if not (subject.lifted and isinstance(error.__cause__, CheckpointError)):
            raise
    subject = replace(subject, lifted=False)
    return subject, *_reference(subject, wanted)


def _reference(subject: Any, wanted: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the unsharded model's observations by check, and why some checks do not apply to it."""
    seen: dict[str, Any] = {}
    absent: dict[str, str] = {}
    with random_streams.fork():
        for check in CHECKS:
            if check.name not in wanted:
                continue
            absent[check.name] = check.absent(subject)
            if absent[check.name]:
                continue
            fresh = copy_of(subject)
            try:
                with attentively(check, fresh.model):
                    seen[check.name] = check.run(fresh)
            except OutsideError:
                raise
            except CANNOT_RUN as error:
                absent[check.name] = f"the unsharded model fails check {check.name!r}: {said(error)}"
                if not check.if_it_runs:
                    hint = "pass inputs= that it can run, or omit the check"
                    raise CheckFailed(check.name, absent[check.name], hint) from error
    return seen, {name: reason for name, reason in absent.items() if reason}


def _worst(errors: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the worst error of each name over some groups (one for each feed)."""
    worst: dict[str, float] = {}
    for name, error in (pair for group_errors in errors for pair in group_errors.items()):
        worst[name] = max(error, worst.get(name, 0.0))
    return worst


# How far rounding alone moves a model: smaller differences say nothing.
#
# In double precision rounding is far below every mistake in most models. Not in all: in dozens of layers without norms,
# with kinks and sines between, a change in the last bit of the weights moves gradients by 1e-5 of their size. Sums over
# ranks are such a change. So if a sharded model is only slightly off, the unsharded one is run again on weights that
# differ in their last bit; a difference of that size is no mistake of the plan.


_SLIGHT = 1e3  # times the limit: a larger error is a mistake, however the model amplifies rounding
_MARGIN = 10.0  # a sharded model rounds in more places than its weights
_RUNS = 3

Errors = Mapping[Group, Mapping[str, float]]  # of each tensor


def tolerance_of(
    check: Check, subject: Subject, reference: Observation, errors: Errors, usual: Tolerance
) -> tuple[Tolerance, list[Finding]]:
    """Return the tolerance for a model with these errors; wider, with a note, if rounding alone moves it as far."""

    error = _largest(errors)
    if not usual.limit < error <= _SLIGHT * usual.limit:
        return usual, []
    others = (check.run(_last_bits_changed(subject, seed)) for seed in range(_RUNS))
    moved = max(_largest(judge(check, reference, [other], usual)[1]) for other in others)
    if error > _MARGIN * moved:
        return usual, []
    text = f"off by {error:.1e}, but the unsharded model changes by {moved:.1e} when its weights change in the last "
    text += f"bit: {_MARGIN:g} times that is allowed"
    return replace(usual, limit=max(usual.limit, _MARGIN * moved)), [Finding(check.name, "note", "", text)]


def _largest(errors: Errors) -> float:
    return max((error for group_errors in errors.values() for error in group_errors.values()), default=0.0)


def _last_bits_changed(subject: Subject, seed: int) -> Any:
    """Return the subject with weights of which a random half is increased to the next larger number."""
    model = copied(subject.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                up = torch.rand(parameter.shape, generator=generator) < 0.5
                larger = torch.nextafter(parameter, torch.full_like(parameter, torch.inf))
                parameter.copy_(torch.where(up, larger, parameter))
    return replace(subject, model=model, collectives={})


# The verdict


def judge(
    check: Check, reference: Observation, ranks: list[Observation], tolerance: Tolerance
) -> tuple[list[Finding], dict[Group, dict[str, float]]]:
    """Return findings, and the worst error of every tensor by group."""
    findings: list[Finding] = []
    errors: dict[Group, dict[str, float]] = {}
    random = bool(reference.get(NOISE))
    if check.name == "loss":
        tolerance = replace(tolerance, limit=max(tolerance.limit, LOSS_LIMIT))
    for group in ranks[0]:
        if group.drawn:
            findings += laws_of_draws(reference.get(group, {}), [rank[group] for rank in ranks])
            continue
        if group.fixed and group not in reference:  # it has draws that cannot be fixed
            continue
        between_ranks = not group.fixed and (random or group.between_ranks)
        want = ranks[0][group] if between_ranks else reference.get(group, {})
        what = group.name + (", compared with rank 0's," if between_ranks else "")
        name = "gradients" if group.gradient and check.name == "forward" else check.name
        got = [rank[group] for rank in ranks]
        more, errors[group] = compare(name, what, want, got, tolerance, missing_is_zero=group.gradient)
        if group in ADVICE:  # the model is exact, but torch's own tool is not
            more = [replace(finding, level="warn", hint=ADVICE[group]) for finding in more]
        findings += more
    return findings, errors
