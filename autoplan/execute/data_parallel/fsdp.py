"""Fully sharded data parallelism (FSDP2) over the discovered blocks, after tensor parallelism and checkpointing.

Each unit (`units.py`) is gathered before its forward and freed after it. The last block of a stack is kept, because
backward begins with it; so is whatever the model's own unit holds. Prefetching looks further ahead than FSDP2's own
one unit when asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.torch_version import TorchVersion

from autoplan.common.errors import AutoplanError
from autoplan.common.options import DataParallel
from autoplan.execute.collectives import RankGroup, all_reduce
from autoplan.execute.data_parallel.skipped import Places, places_of
from autoplan.execute.data_parallel.units import Units, choose_units, cut_dim, is_stack
from autoplan.execute.quantised.modules import compute_in, is_packed
from autoplan.execute.tensor_parallel import applied, record
from autoplan.values import Stack

__all__ = ["default_precision", "shard_data_parallel"]


def _precision(options: DataParallel, model: nn.Module) -> MixedPrecisionPolicy:
    """The policy to use: the given one, or none but that half-precision gradients are summed in float32."""
    if isinstance(options.mp_policy, MixedPrecisionPolicy):
        return options.mp_policy
    return default_precision() if options.mp_policy else _as_they_are(model)


def _offload(options: DataParallel) -> OffloadPolicy:
    if options.cpu_offload:
        return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    policy = options.offload_policy if options.offload_policy is not None else OffloadPolicy()
    if getattr(policy, "pin_memory", False) and not torch.accelerator.is_available():
        raise AutoplanError(
            f"offload_policy={policy!r} pins memory for an accelerator, and torch finds none here",
            hint="CPUOffloadPolicy(pin_memory=False), or cpu_offload=True, which pins where there is a GPU",
        )
    return policy


def default_precision() -> MixedPrecisionPolicy:
    """Compute in bfloat16, sum gradients and put out in float32."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


def _as_they_are(model: nn.Module) -> MixedPrecisionPolicy:
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters() if p.requires_grad)
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)


def _refuse_integers(model: nn.Module) -> None:
    """torch 2.11's FSDP2 makes every parameter of floats."""
    whole = next(
        (name for name, one in model.named_parameters() if not (one.is_floating_point() or one.is_complex())), ""
    )
    if whole and TorchVersion(torch.__version__) < (2, 12):
        raise AutoplanError(
            f"{whole} holds integers, and FSDP2 of torch {torch.__version__} shards parameters of floats only",
            hint="install torch 2.12 or later, or leave data parallelism out",
        )


def shard_data_parallel(
    model: nn.Module, mesh: DeviceMesh, stacks: tuple[Stack, ...], options: DataParallel, *, kept: bool = False
) -> None:
    """Wrap every unit, then the model itself. `kept`: blocks stay gathered unless asked."""
    if kept and options.reshard_after_forward is None:
        options = replace(options, reshard_after_forward=False)
    known = applied(model)
    assert known is not None, "what was done is recorded first"
    _refuse_integers(model)
    casts = _precision(options, model).param_dtype
    units = choose_units(model, stacks, frozen=options.frozen, casts=casts is not None)
    for module in model.modules() if casts is not None else ():
        if is_packed(module):
            compute_in(module, casts)
    with unset_fake_temporarily():  # meshes are asked for ranks, which must be numbers
        _wrap(model, mesh, units, options, places_of(model, mesh, stacks, units))
    sizes = (mesh.size(0), mesh.size(1)) if mesh.ndim == 2 else (1, mesh.size())
    names = (*(unit.names for unit in units.units), ("",))
    notes = (*known.notes, *units.notes)
    record(model, known.plan, units=names, data_parallel=sizes, notes=notes)


def _wrap(model: nn.Module, mesh: DeviceMesh, units: Units, options: DataParallel, places: Places | None) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    policy = _precision(options, model)
    inner = replace(policy, output_dtype=None)  # the model's outputs are cast, not what one unit hands to the next
    shared: dict[str, Any] = {"mesh": mesh, "offload_policy": _offload(options)}
    if any(_few_matrices(parameter, mesh) for parameter in model.parameters()):
        shared["shard_placement_fn"] = partial(_few_matrices, mesh=mesh)
    if units.ignored:
        shared["ignored_params"] = units.ignored
    for unit in units.units:
        reshard = not unit.last if options.reshard_after_forward is None else options.reshard_after_forward
        given = [modules[name] for name in unit.names]
        fully_shard(
            given if len(given) > 1 else given[0],
            reshard_after_forward=reshard,
            mp_policy=_kept(inner) if unit.kept_dtype else inner,
            **shared,
        )
    if places is not None:
        places.watch_end()
    fully_shard(model, reshard_after_forward=False, mp_policy=policy, **shared)
    if places is not None:
        places.watch_rest()
    if _writes_text(model) and any(_writes_text(module) for module in model.modules() if module is not model):
        register_fsdp_forward_method(model, "generate")  # a wrapper's calls what it wraps, and never the model itself
    _prefetch([modules[unit.names[0]] for unit in units.units if unit.block], options.depths)
    for _, parameter in units.scalars:
        if parameter.requires_grad:
            parameter.register_hook(_averaged_over(mesh))


def _few_matrices(parameter: nn.Parameter, mesh: DeviceMesh) -> Shard | None:
    """Another dim than the first, where a stack has fewer matrices than there are ranks."""
    if not is_stack(parameter):
        return None
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    dim = cut_dim(local.shape, mesh.size(mesh.ndim - 1))
    return Shard(dim) if dim else None


def _writes_text(module: nn.Module) -> bool:
    return callable(getattr(module, "generate", None))


def _kept(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    return replace(policy, param_dtype=None, cast_forward_inputs=False)


def _prefetch(blocks: list[nn.Module], depths: tuple[int, int]) -> None:
    forward, backward = depths
    units = [block for block in blocks if isinstance(block, FSDPModule)]
    for place, unit in enumerate(units):
        if forward and units[place + 1 : place + 1 + forward]:
            unit.set_modules_to_forward_prefetch(units[place + 1 : place + 1 + forward])
        if backward and place:
            unit.set_modules_to_backward_prefetch(units[max(0, place - backward) : place][::-1])


def _averaged_over(mesh: DeviceMesh) -> Callable[[torch.Tensor], torch.Tensor]:
    groups = [RankGroup.of(mesh.get_group(dim)) for dim in range(mesh.ndim)]

    def average(gradient: torch.Tensor) -> torch.Tensor:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        for group in groups:
            if group.size > 1:
                local = all_reduce(local, group) / group.size
        if not isinstance(gradient, DTensor):
            return local
        return DTensor.from_local(local, gradient.device_mesh, gradient.placements, run_check=False)

    return average
