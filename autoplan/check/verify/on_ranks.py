"""Run a sharded model on every rank: a copy is sharded there, and goes through the checks one after the other.

Ranks are threads, processes, or real ones that are all here. A check that raises on one of them is a finding, and the
others are run without it.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from autoplan.capture.copies import copied
from autoplan.capture.outside import refusing_outsiders, replacing
from autoplan.check.ranks.common import Budget, RankError, RankTimeout
from autoplan.check.ranks.run import Engine, run_processes, run_ranks
from autoplan.check.verify.checks import CHECKS
from autoplan.check.verify.compare import measured_traffic
from autoplan.check.verify.subject import state_kept
from autoplan.common.code.ways import Recorder, has_own_code, tracing
from autoplan.common.errors import AutoplanError, OutsideError
from autoplan.common.layout import Layout
from autoplan.common.nested import changed_inside
from autoplan.common.options import Checkpointing, Options, TensorParallel
from autoplan.common.patterns import best_match
from autoplan.common.stages import stage
from autoplan.execute import random_streams
from autoplan.execute.agreement import fail_together, meet, voters_here
from autoplan.execute.checkpointing.blocks import runs_of
from autoplan.execute.parallelize import shard_model
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.hf.driving import note_what_is_collected
from autoplan.ops.elementwise import literals_say
from autoplan.patches.seeding import is_simulated
from autoplan.values import Finding, Plan, Stack

_TIMEOUT = 120.0  # seconds for one run of all ranks
_VARIANTS = ("attention", "cache")  # variants of the planned run, which a sharded model may refuse by name


@dataclass(frozen=True)
class Sharding:
    """Functions that shard a model on a mesh, and gather its parameters or gradients. Picklable for gloo."""

    shard: Callable[[Any, Any], Any]  # (model, mesh) -> the model, sharded
    gather: Callable[[Any, bool], Mapping[str, Any]]  # (model, gradients?) -> {name: full tensor}
    blocks: tuple[str, ...] = ()  # blocks whose communication is measured, on ranks that are threads
    noted: Callable[[Any], Any] | None = None  # facts about the sharded model after a step; may raise AutoplanError
    unread: Callable[[Any], dict[str, tuple[int, ...]]] | None = None  # weight -> ranks whose shard has no gradient
    summed: tuple[str, ...] = ()  # arguments whose gradients it sums over ranks
    counted: bool = True  # whether a report has what a step communicates


class CheckFailed(AutoplanError):
    """A check could not be carried out, on a rank or unsharded."""

    def __init__(self, check: str, reason: str, hint: str = "", refused: bool = False) -> None:
        super().__init__(reason, hint=hint)
        self.check, self.refused = check, refused

    def __reduce__(self) -> Any:
        return CheckFailed, (self.check, self.message, self.hint, self.refused)


@dataclass(frozen=True)
class Job:
    """Everything that a rank needs."""

    subject: Any  # of the unsharded model
    sharding: Sharding
    tp_size: int
    checks: tuple[str, ...]
    dims: tuple[tuple[str, int], ...]  # of the simulated mesh: name and size

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.dims)


def observe_all(job: Job, engine: Engine, mesh: Any, budget: Budget) -> tuple[list[Any], list[Finding]]:
    """Return every rank's observations. A check that raises becomes a finding and the others are run without it."""
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
            if not any(check.may_fail for check in CHECKS if check.name == failed):
                text = str(cause) if isinstance(cause, CheckFailed) else str(error)
                variant = failed in _VARIANTS and isinstance(cause, CheckFailed) and cause.refused
                findings.append(Finding(failed or "sharding", "warn" if variant else "error", "", text))
                if failed not in job.checks or failed in ("parameters", "forward"):
                    return [], findings  # if these fail, the others would only repeat it
            job = replace(job, checks=tuple(name for name in job.checks if name != failed))
    return [], findings


def _run(job: Job, engine: Engine, mesh: Any, timeout: float) -> list[Any]:
    if mesh is not None:
        # Every process is one of the real ranks: observe, then exchange the observations.
        ((name, _),) = job.dims
        group = mesh[name].get_group()
        subject = copy_of(job.subject)
        subject.model.to(mesh.device_type)
        meet()
        with random_streams.fork():
            seen = _observe(dist.get_rank(group), replace(job, subject=subject), mesh)
        meet()
        everyone: list[Any] = [None] * job.tp_size
        dist.all_gather_object(everyone, _on_host(seen), group=group)
        return everyone
    if engine == "gloo":
        return run_processes(_on_rank, (job,), job.ranks, timeout=timeout)
    # Copies are made here: deepcopy may run the model's own Python code, which threads would run concurrently.
    jobs = [replace(job, subject=copy_of(job.subject)) for _ in range(job.ranks)]
    return run_ranks(lambda rank: _on_rank(rank, jobs[rank]), job.ranks, engine=engine, timeout=timeout)


def copy_of(subject: Any) -> Any:
    return replace(subject, model=copied(subject.model), collectives={})


def _on_rank(rank: int, job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    names, sizes = zip(*job.dims, strict=True)
    note_what_is_collected(job.subject.model)
    return _observe(rank, job, init_device_mesh("cpu", sizes, mesh_dim_names=names))


def _on_host(seen: Any) -> Any:
    """Return observations on the CPU, to be compared with the unsharded model's."""
    return seen.cpu() if isinstance(seen, torch.Tensor) else changed_inside(seen, _on_host)


def _observe(rank: int, job: Job, mesh: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shard the model and run the checks in order; return their observations, and the collectives of one step."""
    try:
        model = replacing(job.subject.model, lambda model: job.sharding.shard(model, mesh))
    except Exception as error:  # any failure to shard is a finding about the plan
        raise CheckFailed("sharding", said(error)) from error
    subject = replace(job.subject, model=model, gather=job.sharding.gather, rank=rank)
    follows = rank == 0 and has_own_code(model)
    seen: dict[str, Any] = {}
    collectives: dict[str, Any] = {}
    ways, apart = Recorder(literals_say), {check.name: Recorder(literals_say) for check in CHECKS if check.apart}
    for recorder in (ways, *apart.values()):
        recorder.know(model)
    for check in CHECKS:
        if check.name in job.checks:
            try:
                recorder = apart.get(check.name, ways)
                together, follow = fail_together(voters_here(), check.name), tracing(recorder if follows else None)
                # unsharded, each check has a fresh copy
                with together, attentively(check, model), state_kept(model), follow:
                    seen[check.name] = check.run(subject)
            except OutsideError as error:
                raise CheckFailed(check.name, error.message) from error
            except Exception as error:  # as above: any failure of the sharded forward is a finding
                text = f"the sharded model fails: {said(error)}"
                raise CheckFailed(check.name, text, refused=isinstance(error, AutoplanError)) from error
            if check.name == "forward":
                # What each block moves can be seen only on threads with a single tp group
                seeable = job.sharding.blocks and is_simulated() and len(job.dims) == 1
                blocks = measured_traffic(subject, job.sharding.blocks) if seeable else {}
                try:
                    noted = job.sharding.noted(subject.model) if job.sharding.noted else None
                except AutoplanError as error:
                    raise CheckFailed("forward", error.message) from error
                collectives = {**subject.collectives, "blocks": blocks, "noted": noted}
    return seen, {**collectives, "ways": ways.ways, "ways_apart": {name: one.ways for name, one in apart.items()}}


def said(error: Exception) -> str:
    """Return an error in one line with its place: the last line of the model's code, else of ours."""
    ours = str(Path(__file__).parents[2])
    steps = [step for step in traceback.extract_tb(error.__traceback__) if "/torch/" not in step.filename]
    own = [step for step in steps if not step.filename.startswith(ours)] or steps
    place = f" (at {own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno} in {own[-1].name})" if own else ""
    text = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {text}{place}"


def attentively(check: Any, model: Any) -> AbstractContextManager[None]:
    """Refuse weights that are not the model's, in one check only: the others run the same code."""
    return refusing_outsiders(model) if check.name == "forward" else nullcontext()


# A plan's sharding, for the code that compares any sharding (`sharded.py`).


def mesh_of(plan: Plan) -> dict[str, int]:
    """Return the mesh to simulate for a plan."""
    split = {"ep" if plan.tp_size < plan.ep_size else "tp": max(plan.tp_size, plan.ep_size)}
    if plan.cp_size == 1:
        return split
    return {"cp": plan.cp_size, **(split if plan.ranks > plan.cp_size else {})}


def sharding_of(plan: Plan, *, gather_logits: bool = False, checkpointing: str = "", traffic: bool = True) -> Sharding:
    """Return a plan's sharding for `check_sharding`. `traffic`: measure what each block moves."""
    shard = partial(_apply, plan=plan, gather_logits=gather_logits, checkpointing=checkpointing)
    if checkpointing:
        return Sharding(shard, full_tensors, noted=partial(recomputed, stacks=plan.layers))
    shown = {fqn: None for stack in plan.layers for fqn in stack.fqns} if traffic and plan.communication else {}
    summed = tuple(name for name in plan.runtime.given if name not in plan.runtime.unsummed and plan.cp_size == 1)
    unread = partial(unread_parts, plan=plan)
    return Sharding(shard, full_tensors, tuple(shown), unread=unread, summed=summed, counted=traffic)


def _apply(model: Any, mesh: Any, *, plan: Plan, gather_logits: bool, checkpointing: str) -> Any:
    mode = True if checkpointing == "block" else checkpointing or False
    options = Options(TensorParallel(gather_logits, sequence_padding="pad", path_guard="off"), Checkpointing(mode))
    return shard_model(model, mesh, plan, options)


# What exact numbers do not show of a run on ranks: whether blocks were checkpointed, and whether every shard was read.
#
# Gradients are exact without checkpointing too. And a table whose second half no id indexes, or an expert that gets no
# token, gives the same results however wrongly it is sharded. A shard that is read has a gradient, so one counts as
# unread if the unsharded model's gradient is zero everywhere in it.


def recomputed(model: Any, stacks: tuple[Stack, ...]) -> tuple[int, int]:
    """Return the number of checkpointed blocks, and how many of them ran again in a backward since.

    All blocks of `stacks` that are trained must be checkpointed. Fewer may run again: the gradient of a block whose
    output is not used is never computed.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    runs = {id(modules[name]): (name, run) for name, run in runs_of(model).items()}
    listed = {id(modules[name]): name for stack in stacks for name in stack.fqns}
    blocks = [name for name in listed.values() if any(p.requires_grad for p in modules[name].parameters())]
    again = 0
    for name in blocks:
        inside = [runs[id(part)] for part in modules[name].modules() if id(part) in runs]
        if not inside:
            hint = "autoplan.applied(model).notes says what was left out"
            raise AutoplanError(f"{name} was not checkpointed", hint=hint)
        for part, run in inside:
            if run.again > run.kept:
                raise AutoplanError(f"{part} was called {run.kept} times but recomputed {run.again} times")
        again += any(run.again for _, run in inside)
    return len(blocks), again


def unread_parts(gradients: Iterable[Mapping[str, torch.Tensor]], *, plan: Plan) -> dict[str, tuple[int, ...]]:
    """Return weights that a plan splits, with the ranks whose shard has no gradient in any of these runs."""
    unread: dict[str, set[int]] = {}
    for gradients_of_run in gradients:
        for name, gradient in gradients_of_run.items():
            rule = best_match(plan.runtime.parameters, name)
            if rule is None or rule.dim is None or rule.layout is None or gradient.numel() == 0:
                continue
            layout, zero = Layout.parse(rule.layout), set[int]()
            if layout.size in gradient.shape[rule.dim :][:1]:  # a rule that was edited may name a dim that is not there
                others = [dim for dim in range(gradient.dim()) if dim != rule.dim % gradient.dim()]
                read = (gradient != 0).sum(others) if others else gradient != 0
                rows = {rank: list(layout.rows(rank, plan.cut_over)) for rank in range(plan.cut_over)}
                zero = {rank for rank, own in rows.items() if own and not bool(read[own].any())}
            unread[name] = unread.get(name, zero) & zero
    return {name: tuple(sorted(ranks)) for name, ranks in unread.items() if ranks}


# Find the modules that must be replicated for the rest of a plan to be right, by bisection on ranks.
#
# One wrong cut among sixteen takes about eight trials, two about twice as many; trying each module alone would never
# find two. Modules sharded along one axis are one suspect. Of cuts that are wrong only in combination one is
# replicated.

Group = tuple[str, ...]


def cut_together(modules: Sequence[str], still_cut: Callable[[str], set[str]]) -> list[Group]:
    """Group modules that share a cut. `still_cut(module)`: the modules still sharded if that one is replicated."""
    groups: list[Group] = []
    for module in modules:
        if not any(module in group for group in groups):
            rest = still_cut(module)
            groups.append(tuple(other for other in modules if other not in rest))
    return groups


def wrong_cuts(groups: Sequence[Group], is_wrong: Callable[[Group], bool], trials: int) -> Group:
    """Return the modules to replicate. `is_wrong(cut)`: whether the plan that shards these and no others is wrong.

    All of them together are known to be wrong. When trials run out, every module that is not cleared is replicated.
    """
    left = trials

    def among(suspects: Sequence[Group]) -> Sequence[Group]:
        """Return those to blame among suspects that are wrong together."""
        nonlocal left
        if len(suspects) < 2 or left < 2:
            return suspects
        halves = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        left -= 2
        wrong = [half for half in halves if is_wrong(tuple(chain(*half)))]
        # where each half is right by itself, the second is to blame
        return [group for half in wrong for group in among(half)] if wrong else halves[1]

    return tuple(dict.fromkeys(chain(*among(groups))))
