"""What training frameworks do with a sharded model between building and stepping, each held against one device.

Every flow runs on four ranks and says how far its weights or gradients are from the unsharded model's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mesh_toys import mesh_of
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

import autoplan
from autoplan.execute.data_parallel.fsdp import default_precision
from autoplan.hf.source import resolve
from autoplan.values import Plan

IDS = torch.randint(1, 100, (4, 6), generator=torch.Generator().manual_seed(2))
Flow = Callable[[Path], dict[str, float]]
FLOWS: dict[str, Flow] = {}


def flow(name: str, there: bool = True) -> Callable[[Flow], Flow]:
    """`there`: does the installed torch know it?"""

    def register(function: Flow) -> Flow:
        if there:
            FLOWS[name] = function
        return function

    return register


def every_flow(rank: int, folder: Path, wanted: tuple[str, ...] | None = None) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    return {name: run(folder) for name, run in FLOWS.items() if wanted is None or name in wanted}


def built(model_type: str = "gpt2", dtype: torch.dtype = torch.float64) -> Any:
    """gpt2: packed weights, and a head tied to the table."""
    torch.manual_seed(0)
    return resolve(model_type).tiny(dtype=dtype).eval()  # without dropout


@cache
def built_once(model_type: str) -> Any:
    return built(model_type)


@cache
def plan_of(model_type: str = "gpt2") -> Plan:
    return autoplan.plan(built(model_type), 2, prove="none")


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def gradients_alone(model_type: str = "gpt2", dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    model = built(model_type, dtype)
    loss_of(model, IDS).backward()
    return {name: value.grad for name, value in model.named_parameters() if value.grad is not None}


def away(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest distance, by the largest value."""
    largest = max(float(value.abs().max()) for value in wanted.values())
    return max(float((found[name] - value).abs().max()) for name, value in wanted.items()) / largest


def mine(mesh: Any, *dims: str) -> torch.Tensor:
    """This rank's part of the batch."""
    place = 0
    for dim in dims:
        place = place * mesh[dim].size() + mesh.get_local_rank(dim)
    size = len(IDS) // torch.Size([mesh[dim].size() for dim in dims]).numel()
    return IDS[place * size : (place + 1) * size]


@flow("meta, to_empty, distributed checkpoint")
def from_meta(folder: Path) -> dict[str, float]:
    found = {}
    for kind in ("gpt2", "llama"):
        if dist.get_rank() == 0:
            dcp.save(built(kind).state_dict(), checkpoint_id=folder / kind, no_dist=True)
        dist.barrier()
        real = built_once(kind)
        with torch.device("meta"):
            model = type(real)(real.config).double().eval()
        mesh = mesh_of(dp_shard=2, tp=2)
        model = autoplan.parallelize(model, mesh, plan_of(kind)).to_empty(device="cpu")
        autoplan.rebuild_buffers(model)
        state = get_model_state_dict(model)
        dcp.load(state, checkpoint_id=folder / kind)
        set_model_state_dict(model, state)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        loss_of(model, mine(mesh, "dp_shard")).backward()
        found[f"gradients of {kind}"] = away(autoplan.full_tensors(model, grads=True), gradients_alone(kind))
        optimizer.step()
        momenta = {name: one["momentum_buffer"] for name, one in _named(model, optimizer)}
        found[f"momenta of {kind}"] = away(momenta, gradients_alone(kind))
    return found


def _named(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[str, dict[str, torch.Tensor]]]:
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()["state"]
    return [(names[at], {key: value.full_tensor() for key, value in one.items()}) for at, one in state.items()]


@flow("gradient accumulation")
def accumulation(folder: Path) -> dict[str, float]:
    mesh = mesh_of(dp_shard=2, tp=2)
    model = autoplan.parallelize(built(), mesh, plan_of())
    parts = mine(mesh, "dp_shard").split(1)
    for number, part in enumerate(parts):
        model.set_requires_gradient_sync(number == len(parts) - 1)
        (loss_of(model, part) / len(parts)).backward()
    return {"gradients": away(autoplan.full_tensors(model, grads=True), gradients_alone())}


@flow("autocast")
def autocast(folder: Path) -> dict[str, float]:
    mesh = mesh_of(dp_shard=2, tp=2)
    model = autoplan.parallelize(built(dtype=torch.float32), mesh, plan_of())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = loss_of(model, mine(mesh, "dp_shard"))
    loss.backward()
    return {
        "gradients in bfloat16": away(autoplan.full_tensors(model, grads=True), gradients_alone(dtype=torch.float32))
    }


@flow("master weights in float32, bfloat16 inside")
def master_weights(folder: Path) -> dict[str, float]:
    mesh = mesh_of(dp_shard=2, tp=2)
    model = autoplan.parallelize(built(dtype=torch.float32), mesh, plan_of(), mp_policy="bf16")
    loss_of(model, mine(mesh, "dp_shard")).backward()
    kinds = {value.dtype for value in model.parameters()} | {
        p.grad.dtype for p in model.parameters() if p.grad is not None
    }
    assert kinds == {torch.float32}, kinds
    return {
        "gradients in bfloat16": away(autoplan.full_tensors(model, grads=True), gradients_alone(dtype=torch.float32))
    }


@flow("a model in bfloat16")
def in_bfloat16(folder: Path) -> dict[str, float]:
    mesh = mesh_of(dp_shard=2, tp=2)
    model = autoplan.parallelize(built(dtype=torch.bfloat16), mesh, plan_of())
    loss_of(model, mine(mesh, "dp_shard")).backward()
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    return {
        "gradients in bfloat16": away(autoplan.full_tensors(model, grads=True), gradients_alone(dtype=torch.float32))
    }


class Towers(nn.Module):
    """A batch runs through one of two stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.second = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))

    def forward(self, x: torch.Tensor, second: bool) -> torch.Tensor:
        for block in self.second if second else self.first:
            x = block(x)
        return self.heads[int(second)](x)  # one head of two: parameters that get no gradient


@flow("ranks that skip a tower", there=hasattr(FSDPModule, "set_reduce_scatter_unused_params"))
def skipped_tower(folder: Path) -> dict[str, float]:
    def towers() -> Towers:
        torch.manual_seed(0)
        return Towers().double()

    x = torch.randn(4, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    alone = towers()
    torch.stack([alone(part, rank == 0).sum() / 4 for rank, part in enumerate(x)]).sum().backward()
    mesh = mesh_of(dp_shard=4)
    model = autoplan.parallelize(towers(), mesh)
    assert isinstance(model, FSDPModule)
    model.set_reduce_scatter_unused_params(True)
    model(x[mesh.get_rank()], mesh.get_rank() == 0).sum().backward()
    wanted = {name: value.grad for name, value in alone.named_parameters() if value.grad is not None}
    return {"gradients": away(autoplan.full_tensors(model, grads=True), wanted)}


@flow("context parallel ranks")
def context(folder: Path) -> dict[str, float]:
    """Ranks of cp see other data: here other rows, which is the same to gradients."""
    found = {}
    for sizes in (
        {"dp_shard": 2, "cp": 2},
        {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 2, "tp": 2},
        {"cp": 2, "tp": 2},
    ):
        mesh = mesh_of(**sizes)
        plan = plan_of() if "tp" in sizes else Plan("gpt2", 1, layers=plan_of().layers)
        model = autoplan.parallelize(built(), mesh, plan)
        loss_of(model, mine(mesh, *(dim for dim in ("dp_shard", "cp") if dim in sizes))).backward()
        found[" × ".join(sizes)] = away(autoplan.full_tensors(model, grads=True), gradients_alone())
    return found


@flow("pipeline ranks")
def pipeline(folder: Path) -> dict[str, float]:
    """Each stage runs many micro-batches: its blocks stay gathered between forward and backward."""
    mesh = mesh_of(pp=2, dp_shard=2)
    model = autoplan.parallelize(built(), mesh, Plan("gpt2", 1, layers=plan_of().layers))
    blocks = [model.get_submodule(name) for stack in plan_of().layers for name in stack.fqns]
    loss = loss_of(model, mine(mesh, "dp_shard"))
    held = (next(p for part in block.modules() for p in part._parameters.values() if p is not None) for block in blocks)
    gathered = [not hasattr(parameter, "placements") for parameter in held]
    loss.backward()
    wrong = 0.0 if all(gathered) else 1.0
    return {"freed blocks": wrong, "gradients": away(autoplan.full_tensors(model, grads=True), gradients_alone())}


@flow("CPU offload")
def offload(folder: Path) -> dict[str, float]:
    found = {}
    for pin in (False, True) if torch.cuda.is_available() else (False,):
        mesh = mesh_of(dp_shard=2, tp=2)
        policy = CPUOffloadPolicy(pin_memory=pin)
        model = autoplan.parallelize(built(), mesh, plan_of(), offload_policy=policy)
        loss_of(model, mine(mesh, "dp_shard")).backward()
        found[f"pinned {pin}"] = away(autoplan.full_tensors(model, grads=True), gradients_alone())
    return found


@flow("precision given as FSDP2's own policy")
def own_policy(folder: Path) -> dict[str, float]:
    mesh = mesh_of(dp_replicate=2, dp_shard=2)
    plan = Plan("gpt2", 1, layers=plan_of().layers)
    model = autoplan.parallelize(built(dtype=torch.float32), mesh, plan, mp_policy=default_precision())
    loss_of(model, mine(mesh, "dp_replicate", "dp_shard")).backward()
    return {
        "gradients in bfloat16": away(autoplan.full_tensors(model, grads=True), gradients_alone(dtype=torch.float32))
    }
