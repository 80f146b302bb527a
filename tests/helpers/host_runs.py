"""Run what we export in the systems it is for, on two gloo processes, and compare with the unsharded model.

A job names a model type, the host ("transformers", "torch", "automodel"), and what was exported. The host's own code
shards the tiny clone; outputs and every gradient must equal the unsharded clone's. One start of two processes serves
many jobs, since importing the libraries takes most of the time.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.check.ranks.common import process_context
from autoplan.patches.seeding import Lifted

__all__ = ["Job", "Outcome", "run_jobs"]

_FLOOR = 1e-4


@dataclass(frozen=True)
class Job:
    """One model to shard in one host. `exported` is a dict for transformers, the text of a module for the others."""

    model: str
    host: str
    exported: Any


@dataclass(frozen=True)
class Outcome:
    """How far outputs and gradients are from the unsharded model's, and how many parameters were really split."""

    model: str
    error: float
    split: int
    problem: str = ""
    tolerance: float = 1e-5  # in double precision

    @property
    def exact(self) -> bool:
        return not self.problem and self.error < self.tolerance


def run_jobs(jobs: list[Job], timeout: float = 300) -> list[Outcome]:
    """Start two processes, run every job in both, return rank 0's outcomes."""
    context = process_context()
    with tempfile.TemporaryDirectory() as folder:
        queue = context.SimpleQueue()
        processes = [context.Process(target=_worker, args=(rank, jobs, f"{folder}/store", queue)) for rank in range(2)]
        for process in processes:
            process.start()
        outcomes = []
        try:
            while len(outcomes) < len(jobs) and (not queue.empty() or _wait(processes, queue, timeout)):
                outcomes.append(queue.get())
        finally:
            for process in processes:
                process.join(5)
                process.kill()
    return outcomes


def _wait(processes: list[Any], queue: Any, timeout: float) -> bool:
    import time

    end = time.monotonic() + timeout
    while queue.empty() and time.monotonic() < end and all(p.is_alive() for p in processes):
        time.sleep(0.05)
    return not queue.empty()


def _worker(rank: int, jobs: list[Job], store: str, queue: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, init_method=f"file://{store}")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for job in jobs:
        try:
            outcome = _run(job, mesh)
        except Exception as error:  # whatever a host raises is the outcome: it is reported, by name
            outcome = Outcome(job.model, float("nan"), 0, f"{type(error).__name__}: {str(error).splitlines()[0][:200]}")
        found: list[Any] = [None, None]
        dist.all_gather_object(found, outcome)
        if rank == 0:
            queue.put(max(found, key=lambda o: (bool(o.problem), o.error)))
    dist.destroy_process_group()


def _run(job: Job, mesh: DeviceMesh) -> Outcome:
    from autoplan.check.verify.clone import clone_of
    from autoplan.hf.source import resolve

    source = resolve(job.model)
    made = clone_of(source)
    plain, sharded = made.model, clone_of(source).model
    inputs = {"use_cache": False} | next(iter(made.feeds.values()))
    mode = _mode_that_runs(plain, inputs)
    sharded = _HOSTS[job.host](sharded, mesh, job.exported)
    split = sum(isinstance(p, DTensor) and not p.placements[0].is_replicate() for p in sharded.parameters())
    single = next(plain.parameters()).dtype == torch.float32
    errors = _difference(_observe(plain, inputs, mode), _observe(sharded, inputs, mode))
    return Outcome(job.model, max(errors), split, tolerance=1e-3 if single else 1e-5)


@dataclass(frozen=True)
class _Mode:
    """How a model is run: in double precision inside too, and backward too, where that works."""

    lifted: bool = True
    backward: bool = True


def _mode_that_runs(plain: nn.Module, inputs: dict[str, Any]) -> _Mode:
    """The first way in which the unsharded model runs."""
    problem = ""
    for mode in (_Mode(), _Mode(lifted=False), _Mode(backward=False), _Mode(lifted=False, backward=False)):
        try:
            _observe(copy.deepcopy(plain), inputs, mode)
            return mode
        except (RuntimeError, AssertionError, TypeError, ValueError) as error:
            problem = problem or f"{type(error).__name__}: {error}"
    raise RuntimeError(f"the unsharded model does not run: {problem}")


def _observe(model: nn.Module, inputs: dict[str, Any], mode: _Mode) -> dict[str, torch.Tensor]:
    """The first output and every gradient, whole."""
    torch.manual_seed(0)
    with Lifted() if mode.lifted and next(model.parameters()).dtype == torch.float64 else nullcontext():
        result = model(**inputs)
        first = _whole(result[0] if isinstance(result, tuple) else next(iter(result.values())))
        if mode.backward:
            weights = torch.linspace(-1, 1, first.numel(), dtype=first.dtype).reshape(first.shape)
            (first * weights).sum().backward()
    found = {"output": first.detach()}
    if autoplan.applied(model) is not None:  # packed parameters lie in rank order: bring them back by the plan
        return found | {k: g.detach() for k, g in autoplan.full_tensors(model, grads=True).items() if g is not None}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = _whole(parameter.grad).detach()
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _difference(plain: dict[str, torch.Tensor], sharded: dict[str, torch.Tensor]) -> list[float]:
    missing = plain.keys() - sharded.keys()
    assert not missing, f"no gradient for {sorted(missing)[:3]}"
    largest = max((tensor.abs().max().item() for name, tensor in plain.items() if name != "output"), default=0.0)
    return [
        ((sharded[name] - tensor).abs().max() / (tensor.abs().max() + _FLOOR * largest)).item()
        for name, tensor in plain.items()
    ]


# ------------------------------------------------------------------------------------------------ the hosts


def _transformers(model: Any, mesh: DeviceMesh, exported: dict[str, str]) -> nn.Module:
    """As `from_pretrained(distributed_config=...)` does after building the model."""
    from transformers.distributed import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    _untie(model)
    tp_plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=2, tp_plan=exported))
    model = apply_tensor_parallelism(model, mesh, tp_plan)
    model.tie_weights()
    return model


def _untie(model: Any) -> None:
    """When transformers shards a model that it loads, tied parameters are not tied yet."""
    seen = set()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) in seen:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, nn.Parameter(parameter.detach().clone()))
        seen.add(id(parameter))


def _torch(model: nn.Module, mesh: DeviceMesh, text: str) -> nn.Module:
    """Import the generated module and call its `parallelize`."""
    module: dict[str, Any] = {"__name__": "generated_plan"}
    exec(compile(text, "generated_plan.py", "exec"), module)
    sharded: nn.Module = module["parallelize"](model, mesh)
    return sharded


def _automodel(model: nn.Module, mesh: DeviceMesh, text: str) -> nn.Module:
    """Through Automodel's own plan selection, then torch's `parallelize_module`."""
    from nemo_automodel.components.distributed.parallelizer import _get_parallel_plan
    from torch.distributed.tensor.parallel import parallelize_module

    module: dict[str, Any] = {"__name__": "generated_plan"}
    exec(compile(text, "generated_plan.py", "exec"), module)
    module["register"]()
    plan = _get_parallel_plan(model, sequence_parallel=False, tp_size=2)
    parallelize_module(model, mesh, plan)
    return model


_HOSTS: dict[str, Callable[[Any, DeviceMesh, Any], nn.Module]] = {
    "transformers": _transformers,
    "torch": _torch,
    "automodel": _automodel,
}
