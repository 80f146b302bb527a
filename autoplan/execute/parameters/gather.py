"""Get whole tensors back: parameters or gradients under the checkpoint's names, in its shapes and row order.

`DTensor.full_tensor()` of a packed weight is in rank order, so comparing it to anything outside is wrong without a
word. This is the way out that is right for every parameter, under FSDP2 too.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoplan.common.options import check_argument
from autoplan.execute.agreement import fail_together, meet, same_model, voters_of
from autoplan.execute.collectives import RankGroup, all_reduce
from autoplan.execute.parameters.held import held_parameters
from autoplan.execute.parameters.state_dict import whole_tensor

__all__ = ["full_tensors"]


def full_tensors(model: nn.Module, grads: bool = False) -> dict[str, torch.Tensor]:
    """Every parameter (or its gradient, where it has one) as a plain whole tensor. Tied names share one tensor.

    Collective: every rank of the mesh must call it. A gradient that only some ranks have counts as zero on the others.
    """
    check_argument("model", model, nn.Module, "give the model itself, an nn.Module")
    with fail_together(voters_of(model), "full_tensors"):
        return _full_tensors(model, grads)


def _full_tensors(model: nn.Module, grads: bool) -> dict[str, torch.Tensor]:
    found = list(held_parameters(model))
    meet(same_model(model))
    owners = {id(parameter): parameter for _, parameter, _ in found}
    present = _present(list(owners.values())) if grads else [True] * len(owners)
    wanted = dict(zip(owners, present, strict=True))
    whole: dict[int, torch.Tensor] = {}
    result: dict[str, torch.Tensor] = {}
    for fqn, parameter, held in found:
        if not wanted[id(parameter)]:
            continue
        if id(parameter) not in whole:
            whole[id(parameter)] = whole_tensor(_gradient(parameter) if grads else parameter, held)
        result[fqn] = whole[id(parameter)]
    return result


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _present(parameters: list[nn.Parameter]) -> list[bool]:
    """Which parameters have a gradient on at least one rank."""
    flags = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.int32)
    mesh = _widest_mesh(parameters)
    if mesh is not None:
        flags = flags.to(mesh.device_type)
        for mesh_dim in range(mesh.ndim):
            group = RankGroup.of(mesh.get_group(mesh_dim))
            flags = all_reduce(flags, group, "max") if group.size > 1 else flags
    return [bool(flag) for flag in flags.tolist()]


def _widest_mesh(parameters: list[nn.Parameter]) -> DeviceMesh | None:
    meshes = [parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)]
    return max(meshes, key=lambda mesh: mesh.ndim, default=None)
