"""Norms and clipping of sharded gradients, each value counted once.

The problem: a replicated gradient summed over ranks counts tp times, a row that two ranks hold counts twice, gradients
on different meshes cannot be stacked, and a scaled copy of a low-precision gradient changes nothing. Placements tell
which rank holds what, and the first holder of each value counts it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from autoplan.common.errors import AutoplanError
from autoplan.common.options import check_argument
from autoplan.execute.collectives import all_reduce_over, index_of, mesh_device, with_sums
from autoplan.execute.parameters.held import Held, held_by, held_parameters
from autoplan.execute.parameters.local_views import reading_locally
from autoplan.execute.parameters.optimizer import answered_for, repeats


@contextmanager
def unshard(model: nn.Module) -> Iterator[nn.Module]:
    """Gather every FSDP2 unit of `model` inside the block; afterwards all are resharded, even after an error.

    Parameters that tensor parallelism shards stay so: the model's code reads them as it does in its forward.
    """
    check_argument("model", model, nn.Module, "pass the model itself, an nn.Module")
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    with ExitStack() as stack:
        for unit in units:
            stack.callback(unit.reshard)
        for unit in units:
            unit.unshard()
        stack.enter_context(reading_locally(model))
        yield model


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor; any other tensor unchanged."""
    check_argument("tensor", tensor, torch.Tensor, "pass a tensor")
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


Source: TypeAlias = nn.Module | torch.Tensor | Iterable[torch.Tensor]
_Member: TypeAlias = tuple[torch.Tensor, Held | None]  # a parameter, and its record


def global_norm(source: Source, norm_type: float = 2.0) -> torch.Tensor:
    """Return the norm of all gradients of a model, or of parameters: that of the unsharded ones, the same on every
    rank.

    It is collective over every mesh that the parameters lie on. Without any gradient it is 0.
    """
    check_argument("norm_type", norm_type, (int, float), "pass a positive number, or float('inf')")
    if not norm_type > 0:
        raise AutoplanError(f"norm_type={norm_type!r}", hint="pass a positive number, or float('inf')")
    parameters = list(_parameters(_given(source)))
    meshes: dict[DeviceMesh | None, list[_Member]] = {}
    for parameter, held in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        meshes.setdefault(mesh, []).append((parameter, held))
    parts = [_over_mesh(mesh, members, norm_type) for mesh, members in meshes.items()]
    if not parts:
        return torch.zeros(())
    device = parts[-1].device
    totals = torch.stack([part.to(device) for part in parts])
    return totals.max() if math.isinf(norm_type) else totals.sum() ** (1.0 / norm_type)


def clip_gradients(
    source: Source, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale the gradients of a model, or of one or more parameters, in place, so that their norm is at most `max_norm`.

    Return the norm before clipping. It is collective, like `global_norm`.
    """
    check_argument("max_norm", max_norm, (int, float, torch.Tensor), "pass a number")
    if not isinstance(max_norm, torch.Tensor) and not max_norm >= 0:
        raise AutoplanError(f"max_norm={max_norm!r}", hint="pass a number ≥ 0")
    parameters = _given(source)
    norm = global_norm(parameters, norm_type)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise AutoplanError(
            f"the norm of the gradients is {float(norm)}, so they cannot be clipped",
            hint="find the parameter with autoplan.full_tensors(model, grads=True)",
        )
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    with torch.no_grad():
        for parameter, _ in _parameters(parameters):
            if parameter.grad is not None:
                local = to_local(parameter.grad)
                local.mul_(scale.to(local.device))
    return norm


def _given(source: Source) -> nn.Module | list[torch.Tensor]:
    """Return a model unchanged, and tensors as a list; refuse anything else."""
    if isinstance(source, nn.Module):
        return source
    if isinstance(source, torch.Tensor):
        return [source]
    tensors = list(source) if isinstance(source, Iterable) else None
    odd = [source] if tensors is None else [item for item in tensors if not isinstance(item, torch.Tensor)]
    if tensors is None or odd:
        holding = "" if tensors is None else f" holding {type(odd[0]).__name__}"
        raise AutoplanError(
            f"the source of gradients is {type(source).__name__}{holding}, not a model or parameters",
            hint="pass the model, one parameter, or a list of parameters, such as model.parameters()",
        )
    return tensors


def _parameters(source: nn.Module | list[torch.Tensor]) -> Iterator[_Member]:
    """Yield every parameter once, with its record."""
    seen: set[int] = set()
    if isinstance(source, nn.Module):
        pairs: Iterable[_Member] = ((p, held) for _, p, held in held_parameters(source))
    else:
        pairs = ((p, held_by(p)) for p in source)
    for parameter, held in pairs:
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield parameter, held


def _over_mesh(mesh: DeviceMesh | None, members: list[_Member], norm_type: float) -> torch.Tensor:
    """Return the sum of powers (or the maximum) over all members and over the mesh."""
    values = [_counted(p.grad, held) for p, held in members if p.grad is not None]
    device = members[0][0].device if mesh is None else mesh_device(mesh)
    wide = any(value.dtype == torch.float64 for value in values) or members[0][0].dtype == torch.float64
    dtype = torch.float64 if wide else torch.float32
    total = torch.zeros((), dtype=dtype, device=device)
    for value in values:
        if value.numel():
            norm_dtype = dtype.to_complex() if value.is_complex() else dtype
            size = torch.linalg.vector_norm(value, norm_type, dtype=norm_dtype).to(dtype).to(device)
            total = torch.maximum(total, size) if math.isinf(norm_type) else total + size**norm_type
    return total if mesh is None else all_reduce_over(total, mesh, "max" if math.isinf(norm_type) else "sum")


def _counted(gradient: torch.Tensor, held: Held | None) -> torch.Tensor:
    """Return the values of a gradient that this rank counts."""
    gradient = gradient.detach()
    if not isinstance(gradient, DTensor):
        return gradient
    gradient = with_sums(gradient)
    mesh, local = gradient.device_mesh, gradient.to_local()
    for dim, placement in enumerate(gradient.placements):
        if placement.is_replicate() and mesh.get_local_rank(dim) > 0:
            return local.new_zeros(0)
    if held is not None and repeats(held):
        assert held.dim is not None
        rows = answered_for(held, gradient)
        local = local.index_select(held.dim, index_of(rows, local.device))
    return local
