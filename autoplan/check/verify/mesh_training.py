"""Compare training on a mesh, data parallel and tensor parallel, with training on one device.

Every data-parallel rank gets another batch, of another shape if there is one: a missing average over ranks, an average
in place of a sum, or a gradient on one rank only would hide behind equal batches. The unsharded model sees all batches
and averages. Compared are the loss of each step, the gradients of the first, the global norm before each clipping, the
parameters after three steps, and those of a run that was saved after two steps, rebuilt from other weights, and
resumed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from autoplan.capture.called import calls_the_model
from autoplan.capture.copies import copied
from autoplan.check.ranks.common import RankError, RankTimeout
from autoplan.check.ranks.run import Engine, run_processes, run_ranks
from autoplan.check.verify.checks import Check
from autoplan.check.verify.clone import MeshSizes
from autoplan.check.verify.compare import tolerance_for
from autoplan.check.verify.sharded import can_be_lifted, judge
from autoplan.check.verify.subject import Group, Inputs, Observation, Subject, tensors_in, weighted_sum
from autoplan.common.errors import AutoplanError
from autoplan.common.options import Checkpointing, Options, TensorParallel
from autoplan.execute import random_streams
from autoplan.execute.collectives import all_reduce_over
from autoplan.execute.data_parallel.gradients import clip_gradients
from autoplan.execute.parallelize import shard_model
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.patches.kernels import on_reference_path
from autoplan.values import Finding, Plan

STEPS, SAVED_AFTER = 3, 2
_SAVED = ("model", "optimizer")  # parts of a checkpoint
_LOSS, _NORM, _FIRST = Group("loss"), Group("norm"), Group("first gradient", gradient=True)
_AFTER, _RESUMED = Group("parameter after three steps"), Group("resumed parameter")
KINDS = {"": False, " with checkpointing": True}  # suffix of a check's name -> activation checkpointing


@dataclass(frozen=True)
class _Job:
    """Everything that a rank needs: the model, the batch of each data-parallel rank, how to step, where to save."""

    model: nn.Module
    batches: tuple[Inputs, ...]
    plan: Plan
    mesh: MeshSizes
    checkpointing: bool
    max_norm: float
    rate: float
    folder: str
    lifted: bool = False  # computations in single precision are done in double
    other: nn.Module | None = None  # the model with other weights, for the resumed run


@on_reference_path()
def check_training(
    model: nn.Module,
    feeds: Mapping[str, Inputs],
    others: Mapping[str, Inputs],
    plan: Plan,
    mesh: MeshSizes,
    *,
    engine: Engine = "threads",
    timeout: float = 180.0,
) -> tuple[list[Finding], tuple[str, ...]]:
    """Return findings, and the names of the checks that were made."""
    feeds = calls_the_model(feeds)
    name = max(feeds, key=lambda feed: len(feeds[feed]))  # the one with images, if any
    shapes = [feeds[name], others.get(name, feeds[name])]
    batches = tuple(shapes[place % 2] for place in range(mesh.ranks // mesh.split_size))
    lifted = can_be_lifted(Subject(copied(model).eval(), feeds))
    reference, max_norm, rate = _reference(model, batches, lifted)
    tolerance = tolerance_for(next(p.dtype for p in model.parameters() if p.is_floating_point()))
    findings: list[Finding] = []
    done: list[str] = []
    for suffix, checkpointing in KINDS.items():
        if checkpointing and not plan.layers:
            findings.append(Finding("training" + suffix, "note", "", "the model has no repeated blocks"))
            continue
        with tempfile.TemporaryDirectory() as folder:
            job = _Job(model, batches, plan, mesh, checkpointing, max_norm, rate, folder, lifted)
            check = Check("training" + suffix, "", lambda subject: {})
            try:
                seen = _run(job, engine, timeout)
            except (RankError, RankTimeout) as error:
                findings.append(Finding(check.name, "error", "", str(error).splitlines()[0]))
                continue
        done.append(check.name)
        findings += judge(check, reference, seen, tolerance)[0]
    return findings, tuple(done)


# One device


def _reference(model: nn.Module, batches: Sequence[Inputs], lifted: bool) -> tuple[Observation, float, float]:
    """Return the right results, and a clipping norm and learning rate that make each step count."""
    with random_streams.fork():
        subject = Subject(copied(model).eval(), {}, lifted=lifted)
        subject.backward(_mean_loss(subject, batches))
        first = float(torch.nn.utils.get_total_norm([g for g in subject.gradients().values()]))
        max_norm = 0.5 * first if first else 1.0
        rate = 0.05 / max_norm
        optimizer = _optimizer(subject.model, rate)
        seen: Observation = {_LOSS: {}, _NORM: {}}
        for step in range(STEPS):
            subject.model.zero_grad(set_to_none=True)
            loss = _mean_loss(subject, batches)
            subject.backward(loss)
            if step == 0:
                seen[_FIRST] = subject.gradients()
            parameters = list(subject.model.parameters())
            seen[_NORM][f"step {step}"] = torch.nn.utils.clip_grad_norm_(parameters, max_norm).detach()
            seen[_LOSS][f"step {step}"] = loss.detach()
            optimizer.step()
    seen[_AFTER] = subject.parameters()
    seen[_RESUMED] = seen[_AFTER]
    return seen, max_norm, rate


def _mean_loss(subject: Subject, batches: Sequence[Inputs]) -> torch.Tensor:
    """Return the average loss over batches; equal batches are run once."""
    shares = {id(b): (b, sum(other is b for other in batches) / len(batches)) for b in batches}
    return torch.stack([share * _loss(subject, batch) for batch, share in shares.values()]).sum()


def _loss(subject: Subject, batch: Inputs) -> torch.Tensor:
    loss = weighted_sum(tensors_in(subject.forward(batch)))
    if loss is None:
        raise AutoplanError("no output of the model requires grad", hint="pass inputs= of a training call")
    return loss


def _optimizer(model: nn.Module, rate: float) -> torch.optim.Optimizer:
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.SGD(wanted, lr=rate, momentum=0.9)


# On the ranks


def _run(job: _Job, engine: Engine, timeout: float) -> list[Observation]:
    def own() -> _Job:
        other = copied(job.model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(0.5)
        return replace(job, model=copied(job.model).eval(), other=other.eval())

    if engine == "gloo":
        return run_processes(_on_rank, (own(),), job.mesh.ranks, timeout=timeout)
    jobs = [own() for _ in range(job.mesh.ranks)]  # copied here: threads must not deepcopy a model concurrently
    return run_ranks(lambda rank: _on_rank(rank, jobs[rank]), job.mesh.ranks, engine=engine, timeout=timeout)


def _on_rank(rank: int, job: _Job) -> Observation:
    mesh = init_device_mesh("cpu", job.mesh.sizes, mesh_dim_names=job.mesh.names)
    batch = job.batches[rank // job.mesh.split_size]
    subject, optimizer = _sharded(job.model, job, mesh)
    seen: Observation = {_LOSS: {}, _NORM: {}}
    for step in range(STEPS):
        if step == SAVED_AFTER:
            dcp.save(dict(zip(_SAVED, get_state_dict(subject.model, optimizer), strict=True)), checkpoint_id=job.folder)
        _step(subject, optimizer, batch, job, mesh, step, seen)
    seen[_AFTER] = subject.parameters()
    assert job.other is not None
    subject, optimizer = _sharded(job.other, job, mesh)
    both = dict(zip(_SAVED, get_state_dict(subject.model, optimizer), strict=True))
    # parameters that no batch uses have no state in the checkpoint
    dcp.load(both, checkpoint_id=job.folder, planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(subject.model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    _step(subject, optimizer, batch, job, mesh, STEPS, {_LOSS: {}, _NORM: {}})
    seen[_RESUMED] = subject.parameters()
    return seen


def _sharded(model: nn.Module, job: _Job, mesh: Any) -> tuple[Subject, torch.optim.Optimizer]:
    options = Options(TensorParallel(sequence_padding="pad", path_guard="off"), Checkpointing(job.checkpointing))
    shard_model(model, mesh, job.plan, options)
    return Subject(model, {}, gather=full_tensors, lifted=job.lifted), _optimizer(model, job.rate)


def _step(subject: Subject, optimizer: Any, batch: Inputs, job: _Job, mesh: Any, step: int, seen: Observation) -> None:
    subject.model.zero_grad(set_to_none=True)
    loss = _loss(subject, batch)
    subject.backward(loss)
    if step == 0:
        seen[_FIRST] = subject.gradients()
    seen[_NORM][f"step {step}"] = clip_gradients(subject.model, job.max_norm)
    seen[_LOSS][f"step {step}"] = all_reduce_over(loss.detach(), mesh) / mesh.size()  # equal within a tp group
    optimizer.step()
