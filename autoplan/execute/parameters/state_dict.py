"""State dicts of a sharded model in the checkpoint's form: its names, shapes and row order.

The problem: a packed weight is in rank order (`held.py`), and a split buffer is a plain local tensor. Code that saves
or loads must not notice. So a hook on each module restores the checkpoint's order when a state dict is made (one packed
weight is gathered at a time and sharded again into ordinary consecutive pieces), and another one converts what is
loaded, DTensors or full plain tensors, into the form that the module holds. Making a state dict of a model with packed
weights is therefore collective, and so is loading DTensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.utils.hooks import RemovableHandle

from autoplan.common.layout import chunk
from autoplan.common.torch_internals import local_part, own_buffers, own_parameters
from autoplan.execute.collectives import RankGroup, all_gather_rows, like
from autoplan.execute.parameters.held import Held, fsdp_placements, record_of


def register_hooks(module: nn.Module) -> list[RemovableHandle]:
    """Translate this module's own entries whenever state dicts are made or loaded."""
    saving = module.register_state_dict_post_hook(_to_checkpoint)
    return [saving, module.register_load_state_dict_pre_hook(_from_checkpoint)]


def _to_checkpoint(module: nn.Module, state_dict: dict[str, Any], prefix: str, _metadata: Any) -> None:
    record = record_of(module)
    if record is None:
        return
    for name, held in record.parameters.items():
        tensor = state_dict.get(prefix + name)
        if held.in_rank_order and isinstance(tensor, DTensor):
            state_dict[prefix + name] = in_checkpoint_order(tensor, held)
    for name, held in record.buffers.items():
        if prefix + name in state_dict:
            state_dict[prefix + name] = whole_buffer(state_dict[prefix + name], held)


def in_checkpoint_order(tensor: DTensor, held: Held) -> DTensor:
    """Return the tensor in the checkpoint's order, sharded into consecutive pieces on the same mesh."""
    whole = whole_tensor(tensor, held)
    placements = [Shard(p.dim) if hasattr(p, "dim") else p for p in tensor.placements]  # FSDP2's _StridedShard too
    return distribute_tensor(whole, tensor.device_mesh, placements, src_data_rank=None)


@torch.no_grad()  # not `detach`, for which DTensor would propagate placements in each thread
def whole_tensor(tensor: torch.Tensor, held: Held | None) -> torch.Tensor:
    """Return the checkpoint's plain tensor in new memory. Collective over every mesh dim of a DTensor."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone()
    if tensor.is_meta:
        return torch.empty(held.shape if held is not None else tensor.shape, dtype=tensor.dtype, device="meta")
    rows = None if held is None or held.dim is None else held.room
    plainly_cut = tensor.device_mesh.ndim == 1 and tensor.placements[0].is_shard()  # the usual case
    whole = _put_together(tensor, rows) if plainly_cut else gathered(tensor, rows)
    if held is not None and held.in_rank_order:
        return held.to_checkpoint_order(whole)
    return whole.clone() if whole.data_ptr() == tensor.to_local().data_ptr() else whole


def gathered(tensor: DTensor, rows: Sequence[int] | None = None) -> torch.Tensor:
    """Return `full_tensor()`, for 8-bit floats too: not every backend sends those, but each sends bytes. `rows`: the
    room of each tp rank, where it is not DTensor's."""
    # FSDP2 may have sharded the tp shard further along the same dim.
    *before, last = tensor.placements
    if any(hasattr(p, "split_factor") and p.dim == getattr(last, "dim", None) for p in before):
        return _put_together(tensor, rows)
    if tensor.dtype.itemsize > 1 or not tensor.is_floating_point():
        return tensor.full_tensor()
    return like(tensor.to_local().view(torch.uint8), tensor).full_tensor().view(tensor.dtype)


def _put_together(tensor: DTensor, rows: Sequence[int] | None) -> torch.Tensor:
    """Undo `local_piece`: gather over FSDP2's mesh dims first, then over tp, whose ranks hold `rows`.

    `full_tensor()` does the same at a higher cost, but caches the sizes of uneven pieces by thread: wrong for simulated
    ranks. It is not differentiable.
    """
    mesh, local, dim = tensor.device_mesh, tensor.to_local(), tensor.placements[-1].dim
    tp = mesh.ndim - 1
    sizes = rows or [len(chunk(tensor.shape[dim], mesh.size(tp), rank)) for rank in range(mesh.size(tp))]
    levels = [(tp, sizes)]
    count = sizes[mesh.get_local_rank(tp)]
    for mesh_dim, placement in enumerate(tensor.placements[:-1]):
        if getattr(placement, "dim", None) == dim:
            pieces = [len(chunk(count, mesh.size(mesh_dim), rank)) for rank in range(mesh.size(mesh_dim))]
            levels.append((mesh_dim, pieces))
            count = pieces[mesh.get_local_rank(mesh_dim)]
    for mesh_dim, pieces in reversed(levels):
        group = RankGroup.of(mesh.get_group(mesh_dim))
        local = all_gather_rows(local, group, dim, pieces) if group.size > 1 else local
    return local


def whole_buffer(local: torch.Tensor, held: Held) -> torch.Tensor:
    """Return the checkpoint's buffer from the ranks' shards. Collective."""
    if held.read is not None and held.read.dim is not None:
        local = whole_buffer(local, held.read)
    if held.dim is None or held.group.size == 1:
        return held.to_checkpoint_order(local)
    ranked = all_gather_rows(local.detach(), held.group, held.dim, [len(rows) for rows in held.rows])
    return held.to_checkpoint_order(ranked)


def _from_checkpoint(module: nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    record, errors = record_of(module), others[-1]
    if record is None:
        return
    for held_by_name, own in ((record.parameters, own_parameters(module)), (record.buffers, own_buffers(module))):
        for name, held in held_by_name.items():
            value, current = state_dict.get(prefix + name), own.get(name)
            if not isinstance(value, torch.Tensor) or current is None:
                continue  # missing: torch reports it
            if tuple(value.shape) != held.shape:
                errors.append(  # torch's own message, with the checkpoint's shape rather than the one in rank order
                    f"size mismatch for {prefix + name}: copying a param with shape {value.shape} from checkpoint, "
                    f"the shape in current model is {torch.Size(held.shape)}."
                )
                state_dict[prefix + name] = current
            elif isinstance(current, DTensor):
                state_dict[prefix + name] = as_held(value, current, held)
            elif name in record.buffers:
                state_dict[prefix + name] = held.buffer(_plain(value))


def renew_units(module: nn.Module) -> None:
    """Let FSDP2 renew its own references to the parameters of a module, as it does in its hooks after a load."""
    for hook in list(module._load_state_dict_post_hooks.values()):
        hook(module, nn.Module().load_state_dict({}))


def as_held(value: torch.Tensor, parameter: DTensor, held: Held) -> DTensor:
    """Return a loaded tensor, plain and full or a DTensor in checkpoint order, with the placements of `parameter`."""
    mesh, placements = parameter.device_mesh, parameter.placements
    same = isinstance(value, DTensor) and (value.device_mesh, value.placements) == (mesh, placements)
    if same and not held.in_rank_order:
        return value
    local = local_piece(_plain(value), held, mesh, placements)
    target = parameter.to_local().device
    if target.type != "meta":
        local = local.to(target)
    elif local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    return like(local, parameter)


def local_piece(
    whole: torch.Tensor, held: Held | None, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """Return this rank's shard: its rows on the tp mesh, and of those FSDP2's consecutive piece. None: cut evenly."""
    if held is None:
        return local_part(distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None))
    local = held.roomy(held.cut(whole.detach()))
    for mesh_dim, placement in enumerate(fsdp_placements(placements, held)):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            mine = chunk(local.size(dim), mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
            local = local.narrow(dim, mine.start, len(mine))
    return local.contiguous()


def _plain(value: torch.Tensor) -> torch.Tensor:
    return gathered(value) if isinstance(value, DTensor) else value
