"""Who would carry a foreign plan out? That library's own code, so that its plan is judged by what it really does.

The same words do different things in different hands: transformers' styles know weights whose gradient is summed, and
packed weights, and experts; torch's styles know none of them. A plan is therefore never judged by what its words should
mean. Each function here gives a `Sharding` for `check_sharding`: how the library shards a live model, and how its
parameters and gradients come back whole.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

from autoplan.check.verify.on_ranks import Sharding
from autoplan.hf.own_sharding import refuse_old_sharding, shard_as_transformers, slice_of


def transformers_sharding(plan: Mapping[str, str]) -> Sharding:
    """transformers' tensor parallelism, as `from_pretrained(distributed_config=…)` applies it."""
    refuse_old_sharding()
    return Sharding(partial(shard_as_transformers, plan=dict(plan)), _gather)


def torch_sharding(plan: Mapping[str, Any]) -> Sharding:
    """torch's `parallelize_module` with a dict of styles; each rank gets style objects of its own."""
    return Sharding(partial(_shard_as_torch, plan=dict(plan)), _gather)


# ------------------------------------------------------------------------------------------------ torch


def _shard_as_torch(model: Any, mesh: Any, *, plan: dict[str, Any]) -> Any:
    from torch.distributed.tensor.parallel import parallelize_module

    return parallelize_module(model, mesh, {pattern: copy.deepcopy(style) for pattern, style in plan.items()})


# ------------------------------------------------------------------------------------------------ back again


def _gather(model: Any, grads: bool) -> dict[str, Any]:
    """Every parameter or gradient, whole, under each of its names."""
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tensor = parameter.grad if grads else parameter.detach()
        if tensor is not None:
            found[name] = _whole(tensor)
    return found


def _whole(tensor: Any) -> Any:
    if not hasattr(tensor, "placements"):
        return tensor
    if not any(type(placement).__name__ == "_StridedShard" for placement in tensor.placements):
        return tensor.full_tensor()
    return _reassembled(tensor)


def _reassembled(tensor: Any) -> Any:
    """A weight sharded in interleaved pieces: every rank's rows, put back where they came from."""
    import torch
    import torch.distributed as dist

    local = tensor.to_local().contiguous()
    places = torch.arange(tensor.numel(), dtype=torch.int64).reshape(tensor.shape)
    mine = slice_of(tensor, places).contiguous()
    group = tensor.device_mesh.get_group()
    size = dist.get_world_size(group)
    pieces = [torch.empty_like(local) for _ in range(size)]
    where = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(pieces, local, group=group)
    dist.all_gather(where, mine, group=group)
    whole = torch.zeros(tensor.numel(), dtype=local.dtype)
    for piece, place in zip(pieces, where, strict=True):
        whole[place.flatten()] = piece.flatten()
    return whole.reshape(tensor.shape)
