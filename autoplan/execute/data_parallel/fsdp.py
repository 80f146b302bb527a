"""Fully sharded data parallelism (FSDP2) over the discovered blocks, after tensor parallelism and checkpointing.

Each unit (`units.py`) is gathered before its forward and freed after it. The last block of a stack is kept, because
backward begins with it; so is whatever the model's own unit holds. Prefetching looks further ahead than FSDP2's own
one unit when asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from autoplan.common.errors import AutoplanError
from autoplan.execute.collectives import RankGroup, all_reduce
from autoplan.execute.data_parallel.units import Units, choose_units
from autoplan.execute.tensor_parallel import applied, record
from autoplan.patches.classes import whole_or_as_it_was
from autoplan.values import Stack

__all__ = ["DataParallel", "default_precision", "shard_data_parallel"]


@dataclass(frozen=True)
class DataParallel:
    """How to shard over data-parallel ranks. None everywhere is the default of each option."""

    mp_policy: MixedPrecisionPolicy | str | bool | None = None
    offload_policy: OffloadPolicy | None = None
    cpu_offload: bool = False
    reshard_after_forward: bool | int | None = None
    prefetch: int | tuple[int, int] | None = None
    frozen: str = "units"

    def asked(self) -> list[str]:
        """The options that were given."""
        return [name for name, value in vars(self).items() if value != getattr(DataParallel, name)]

    def check(self, has_mesh: bool) -> None:
        """Refuse contradictions, and options that nothing would heed, before the model is touched."""
        if not has_mesh and self.asked():
            raise AutoplanError(
                f"{', '.join(self.asked())} was asked for, but the mesh has no dim to shard data-parallel over",
                hint='name one "dp_shard", or pass mesh_dims={"dp_shard": name}',
            )
        if self.cpu_offload and self.offload_policy is not None:
            raise AutoplanError(
                "cpu_offload=True and offload_policy were both given",
                hint="cpu_offload is short for CPUOffloadPolicy()",
            )
        if isinstance(self.mp_policy, str) and self.mp_policy != "bf16":
            raise AutoplanError(f"mp_policy={self.mp_policy!r}", hint='choose None, "bf16" or a MixedPrecisionPolicy')
        for depth in self.depths:
            if depth < 0:
                raise AutoplanError(
                    f"prefetch={self.prefetch!r}", hint="give a number of units, or (forward, backward)"
                )

    @property
    def depths(self) -> tuple[int, int]:
        """How many units to prefetch in forward and in backward; 0: FSDP2's own choice."""
        if self.prefetch is None:
            return (0, 0)
        return (self.prefetch, self.prefetch) if isinstance(self.prefetch, int) else self.prefetch

    def precision(self, model: nn.Module) -> MixedPrecisionPolicy:
        """The policy to use: the given one, or none but that half-precision gradients are summed in float32."""
        if isinstance(self.mp_policy, MixedPrecisionPolicy):
            return self.mp_policy
        return default_precision() if self.mp_policy else _as_they_are(model)

    def offload(self) -> OffloadPolicy:
        if self.cpu_offload:
            return CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        return self.offload_policy if self.offload_policy is not None else OffloadPolicy()


def default_precision() -> MixedPrecisionPolicy:
    """Compute in bfloat16, sum gradients and put out in float32."""
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)


def _as_they_are(model: nn.Module) -> MixedPrecisionPolicy:
    half = any(p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters() if p.requires_grad)
    return MixedPrecisionPolicy(reduce_dtype=torch.float32 if half else None)


def shard_data_parallel(model: nn.Module, mesh: DeviceMesh, stacks: tuple[Stack, ...], options: DataParallel) -> None:
    """Wrap every unit, then the model itself; all of them or none."""
    known = applied(model)
    assert known is not None, "what was done is recorded first"
    units = choose_units(model, stacks, frozen=options.frozen)
    with whole_or_as_it_was(model):
        _wrap(model, mesh, units, options)
    sizes = (mesh.size(0), mesh.size(1)) if mesh.ndim == 2 else (1, mesh.size())
    names = (*(unit.names for unit in units.units), ("",))
    notes = (*known.notes, *units.notes)
    record(model, known.plan, units=names, data_parallel=sizes, notes=notes)


def _wrap(model: nn.Module, mesh: DeviceMesh, units: Units, options: DataParallel) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    policy = options.precision(model)
    inner = replace(policy, output_dtype=None)  # the model's outputs are cast, not what one unit hands to the next
    shared: dict[str, Any] = {"mesh": mesh, "offload_policy": options.offload()}
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
    fully_shard(model, reshard_after_forward=False, mp_policy=policy, **shared)
    _prefetch([modules[unit.names[0]] for unit in units.units if unit.block], options.depths)
    for _, parameter in units.scalars:
        if parameter.requires_grad:
            parameter.register_hook(_averaged_over(mesh))


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
