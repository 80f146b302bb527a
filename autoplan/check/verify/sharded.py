"""Compare any module with itself sharded in any way: the machinery under `verify`.

The unsharded model runs first and says what is right. Then every rank shards a copy and goes through the same checks
(`checks.py`), and what it saw is judged. It does not matter here where the sharding comes from: a plan, a planted
fault, a few hand-written lines in a test. A check that cannot run on the ranks is a finding, and the others go on
without it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoplan.capture.copies import copied
from autoplan.check.ranks.common import Budget
from autoplan.check.ranks.run import Engine, RankError, RankTimeout, one_compute_thread, run_processes, run_ranks
from autoplan.common.errors import AutoplanError, OutsideError
from autoplan.common.stages import stage
from autoplan.hf.processes import note_what_is_collected
from autoplan.patches.kernels import where_it_runs
from autoplan.values import Finding, Report

__all__ = ["CANNOT_RUN", "CHECK_NAMES", "Sharding", "can_be_lifted", "check_sharding"]

CHECK_NAMES = (
    "parameters",
    "state_dict",
    "forward",
    "second_shape",
    "loss",
    "attention",
    "cache",
    "dropout",
    "optimizer",
)

_TIMEOUT = 120.0  # seconds for all that ranks do at one go

# What a model's own code raises when it does not run on these inputs.
CANNOT_RUN = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, NotImplementedError)


@dataclass(frozen=True)
class Sharding:
    """How a model is sharded on a mesh, and how its parameters or gradients come back whole. Picklable for gloo."""

    shard: Callable[[Any, Any], Any]  # (model, mesh) -> the model, sharded
    gather: Callable[[Any, bool], Mapping[str, Any]]  # (model, gradients?) -> {name: whole tensor}
    blocks: tuple[str, ...] = ()  # whose communication is measured, on ranks that are threads
    noted: Callable[[Any], Any] | None = None  # what to know of the sharded model after a step; may raise AutoplanError


class CheckFailed(AutoplanError):
    """A check could not be carried out, on a rank or unsharded."""

    def __init__(self, check: str, reason: str, hint: str = "") -> None:
        super().__init__(reason, hint=hint)
        self.check = check

    def __reduce__(self) -> Any:
        return CheckFailed, (self.check, self.message, self.hint)


@dataclass(frozen=True)
class _Job:
    """Everything that a rank needs."""

    subject: Any  # of the unsharded model
    sharding: Sharding
    tp_size: int
    checks: tuple[str, ...]
    dims: tuple[tuple[str, int], ...]  # of the simulated mesh: name and size

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.dims)


def check_sharding(
    model: Any,
    feeds: Mapping[str, Mapping[str, Any]],
    sharding: Sharding,
    tp_size: int,
    *,
    others: Mapping[str, Mapping[str, Any]] | None = None,
    checks: Iterable[str] | None = None,
    engine: Engine = "threads",
    mesh: Any = None,
    dims: Mapping[str, int] | None = None,
    budget: Budget | None = None,
) -> Report:
    """Compare `model` sharded over `tp_size` ranks with itself unsharded, on a copy; weights and dtype as they are.

    `feeds` are the calls to make, by name; `others` the same calls with another batch and length. `dims`: the mesh to
    simulate, names and sizes, where it has more than the one dim "tp".
    """
    with one_compute_thread(), where_it_runs(model):  # checkpointed blocks run again in backward
        return _check(
            model, feeds, sharding, tp_size, others or {}, _chosen(checks), engine, mesh, budget or Budget(), dims
        )


def _check(
    model: Any,
    feeds: Mapping[str, Any],
    sharding: Sharding,
    tp_size: int,
    others: Mapping[str, Any],
    wanted: tuple[str, ...],
    engine: Engine,
    mesh: Any,
    budget: Budget,
    dims: Mapping[str, int] | None,
) -> Report:
    start = time.perf_counter()
    from autoplan.check.verify.checks import CHECKS, judge
    from autoplan.check.verify.compare import tolerance_for
    from autoplan.check.verify.sensitivity import tolerance_of

    subject = _prepared(model, feeds, others)
    stage("running the tiny clone unsharded")
    subject, reference, absent = _observed_unsharded(subject, wanted)
    job = _Job(subject, sharding, tp_size, tuple(reference), tuple((dims or {"tp": tp_size}).items()))
    ranks, findings = _observe_all(job, engine, mesh, budget)
    tolerance = tolerance_for(_dtype(model))
    gradients: dict[str, float] = {}
    forward: float | None = None
    for check in CHECKS:
        if ranks and check.name in ranks[0][0]:
            seen = [observed[check.name] for observed, _ in ranks]
            more, errors = judge(check, reference[check.name], seen, tolerance)
            if check.name in ("forward", "second_shape") and more:
                tolerance, note = tolerance_of(check, subject, reference[check.name], errors, tolerance)
                more, errors = judge(check, reference[check.name], seen, tolerance)
                findings += note
            findings += more
            if check.name == "forward":
                gradients = _worst(errors, "gradient")
                forward = max(_worst(errors, "output").values(), default=None)
    done = tuple(name for name in CHECK_NAMES if ranks and name in ranks[0][0])
    return Report(
        ok=not any(finding.level == "error" for finding in findings),
        findings=tuple(findings),
        gradients=gradients,
        forward=forward,
        tp_size=tp_size,
        details={
            "checked": done,
            "not_checked": absent,
            "engine": "mesh" if mesh is not None else engine,
            "precision": tolerance.precision,
            "tolerance": tolerance.limit,
            "collectives": {k: v for k, v in ranks[0][1].items() if k not in ("blocks", "noted")} if ranks else {},
            "blocks": ranks[0][1].get("blocks", {}) if ranks else {},
            "noted": ranks[0][1].get("noted") if ranks else None,
            "seconds": round(time.perf_counter() - start, 3),
        },
    )


def _chosen(checks: Iterable[str] | None) -> tuple[str, ...]:
    if checks is None:
        return CHECK_NAMES
    wanted = tuple(checks)
    if unknown := [name for name in wanted if name not in CHECK_NAMES]:
        raise AutoplanError(f"no such check: {', '.join(map(repr, unknown))}", hint=f"choose from {CHECK_NAMES}")
    return wanted


def _prepared(model: Any, feeds: Mapping[str, Any], others: Mapping[str, Any]) -> Any:
    """The unsharded subject, in eval mode, with labels for the feeds that take them."""
    from autoplan.check.verify.checks import labels_for, takes_labels
    from autoplan.check.verify.subject import Subject

    subject = Subject(copied(model).eval(), feeds, others)
    subject = replace(subject, lifted=can_be_lifted(subject))
    if not takes_labels(subject):
        return subject
    return replace(subject, labels=labels_for(_copy(subject)))  # a run may leave hooks behind


def can_be_lifted(subject: Any) -> bool:
    """Is it a model in double precision that runs when all inside is in double precision too?"""
    import torch

    if _dtype(subject.model) != torch.float64:
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
    """What the unsharded model says; in single precision inside, where it runs parts again in backward, which torch
    does outside of every function mode."""
    from torch.utils.checkpoint import CheckpointError

    try:
        return subject, *_reference(subject, wanted)
    except CheckFailed as error:
        if not (subject.lifted and isinstance(error.__cause__, CheckpointError)):
            raise
    subject = replace(subject, lifted=False)
    return subject, *_reference(subject, wanted)


def _reference(subject: Any, wanted: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """What the unsharded model says, by check; and why some checks do not apply to it."""
    from autoplan.check.verify.checks import CHECKS
    from autoplan.execute.randomness import streams as random_streams

    seen: dict[str, Any] = {}
    absent: dict[str, str] = {}
    with random_streams.fork():
        for check in CHECKS:
            if check.name not in wanted:
                continue
            absent[check.name] = check.absent(subject)
            if absent[check.name]:
                continue
            try:
                seen[check.name] = _run_unsharded(check, subject)
            except CheckFailed as error:
                if not check.if_it_runs:
                    raise
                absent[check.name] = error.message
    return seen, {name: reason for name, reason in absent.items() if reason}


def _run_unsharded(check: Any, subject: Any) -> Any:
    fresh = _copy(subject)
    try:
        with _attentively(check, fresh.model):
            return check.run(fresh)
    except OutsideError:
        raise
    except CANNOT_RUN as error:
        text = f"the unsharded model cannot go through check {check.name!r}: {_said(error)}"
        raise CheckFailed(check.name, text, "pass inputs= that it runs with, or leave the check out") from error


def _attentively(check: Any, model: Any) -> AbstractContextManager[None]:
    """Looks out for weights that are not the model's, once: other checks run the same code."""
    from autoplan.capture.outside import refusing_outsiders

    return refusing_outsiders(model) if check.name == "forward" else nullcontext()


def _dtype(model: Any) -> Any:
    from autoplan.common.dtypes import working_dtype

    return working_dtype(model)


def _worst(errors: Mapping[str, Mapping[str, float]], kind: str) -> dict[str, float]:
    """The worst error of each name over all groups of one kind (one group per feed)."""
    worst: dict[str, float] = {}
    for group, found in errors.items():
        if group.endswith(kind):
            for name, error in found.items():
                worst[name] = max(error, worst.get(name, 0.0))
    return worst


# ------------------------------------------------------------------------------------------------ on the ranks


def _observe_all(job: _Job, engine: Engine, mesh: Any, budget: Budget) -> tuple[list[Any], list[Finding]]:
    """What every rank saw. A check that raises becomes a finding and the others are run without it."""
    findings: list[Finding] = []
    while job.checks:
        stage(f"running it on {job.ranks} simulated ranks: {', '.join(job.checks)}")
        try:
            return _run(job, engine, mesh, min(_TIMEOUT, budget.left)), findings
        except (CheckFailed, RankError, RankTimeout) as error:
            if isinstance(error, RankTimeout):
                budget.check("on simulated ranks")
            cause = getattr(error, "cause", error)
            failed = cause.check if isinstance(cause, CheckFailed) else ""
            text = str(cause) if isinstance(cause, CheckFailed) else str(error)
            findings.append(Finding(failed or "sharding", "error", "", text))
            if failed not in job.checks or failed in ("parameters", "forward"):
                return [], findings  # where these fail, the others would only repeat it
            job = replace(job, checks=tuple(name for name in job.checks if name != failed))
    return [], findings


def _run(job: _Job, engine: Engine, mesh: Any, timeout: float) -> list[Any]:
    if mesh is not None:
        return _on_live_mesh(job, mesh)
    if engine == "gloo":
        return run_processes(_on_rank, (job,), job.ranks, timeout=timeout)
    # Copies are made here: deepcopy is Python code of the model's own, and threads would run it at the same time.
    jobs = [replace(job, subject=_copy(job.subject)) for _ in range(job.ranks)]
    return run_ranks(lambda rank: _on_rank(rank, jobs[rank]), job.ranks, engine=engine, timeout=timeout)


def _copy(subject: Any) -> Any:
    return replace(subject, model=copied(subject.model), collectives={})


def _on_rank(rank: int, job: _Job) -> tuple[dict[str, Any], dict[str, Any]]:
    from torch.distributed.device_mesh import init_device_mesh

    names, sizes = zip(*job.dims, strict=True)
    note_what_is_collected(job.subject.model)
    return _observe(rank, job, init_device_mesh("cpu", sizes, mesh_dim_names=names))


def _on_live_mesh(job: _Job, mesh: Any) -> list[Any]:
    """The ranks are real and every one of them is here: observe, then tell each other."""
    import torch.distributed as dist

    from autoplan.execute.randomness import streams as random_streams

    ((name, _),) = job.dims
    group = mesh[name].get_group()
    subject = _copy(job.subject)
    subject.model.to(mesh.device_type)
    with random_streams.fork():
        seen = _observe(dist.get_rank(group), replace(job, subject=subject), mesh)
    everyone: list[Any] = [None] * job.tp_size
    dist.all_gather_object(everyone, seen, group=group)
    return everyone


def _observe(rank: int, job: _Job, mesh: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shard the model, run the checks one after the other: their observations, and the collectives of one step."""
    from autoplan.capture.outside import replacing
    from autoplan.check.verify.checks import CHECKS

    try:
        model = replacing(job.subject.model, lambda model: job.sharding.shard(model, mesh))
    except Exception as error:  # whatever a plan does to a model is a finding about the plan
        raise CheckFailed("sharding", _said(error)) from error
    subject = replace(job.subject, model=model, gather=job.sharding.gather, rank=rank)
    seen: dict[str, Any] = {}
    collectives: dict[str, Any] = {}
    for check in CHECKS:
        if check.name in job.checks:
            try:
                with _attentively(check, model):
                    seen[check.name] = check.run(subject)
            except OutsideError as error:
                raise CheckFailed(check.name, error.message) from error
            except Exception as error:  # as above: what the sharded forward raises is the finding
                raise CheckFailed(check.name, f"the sharded model cannot run: {_said(error)}") from error
            if check.name == "forward":
                collectives = {**subject.collectives, "blocks": _measured(job, subject), "noted": _noted(job, subject)}
    return seen, collectives


def _noted(job: _Job, subject: Any) -> Any:
    try:
        return job.sharding.noted(subject.model) if job.sharding.noted else None
    except AutoplanError as error:
        raise CheckFailed("forward", error.message) from error


def _measured(job: _Job, subject: Any) -> dict[str, Any]:
    """What each block moves, where that can be seen: on threads with a tp group alone."""
    from autoplan.check.ranks.threads import is_simulated
    from autoplan.check.verify.traffic import measured_traffic

    if not job.sharding.blocks or not is_simulated() or len(job.dims) > 1:
        return {}
    return measured_traffic(subject, job.sharding.blocks)


def _said(error: Exception) -> str:
    """An error in one line, with the place where it arose: the last line of the model's code, else of ours."""
    import traceback

    ours = str(Path(__file__).parents[2])
    steps = [step for step in traceback.extract_tb(error.__traceback__) if "/torch/" not in step.filename]
    own = [step for step in steps if not step.filename.startswith(ours)] or steps
    place = f" (at {own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno} in {own[-1].name})" if own else ""
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text}{place}"
