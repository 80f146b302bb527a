"""Carry a foreign plan out by its own library's code, as a `Sharding` for `check_sharding`.

DeepSpeed's engine cannot run inside simulated ranks, so its layers are imitated here, after release 0.19:

    column   rows of the weight are sharded; the input's gradient is summed; the output stays split (or is gathered)
    row      columns of the weight are sharded; the output is summed, then the whole bias is added
    skip     whole; with `grad_allreduce` its gradient is summed
    counts   a module over cut layers whose attribute is called `num_heads`, `hidden_size` or the like gets its shard

What is not imitated is named by `not_imitated`, and such a plan is not run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional as F

from autoplan.check.verify.on_ranks import Sharding
from autoplan.decide.written_plans.foreign import COUNTS, heads_of, kind_of, spec_for
from autoplan.execute.collectives import RankGroup, all_reduce, copy_to_ranks, gather_over_ranks, sum_over_ranks
from autoplan.hf.own_sharding import refuse_old_sharding, shard_as_transformers, slice_of

Rows = tuple[tuple[int, ...], ...]
_HELD = "_sharded_by_autotp"


def autotp_sharding(config: Mapping[str, Any]) -> Sharding:
    """How AutoTP would carry out a config."""
    return Sharding(partial(_shard, config=config), _gather)


def not_imitated(model: nn.Module, config: Mapping[str, Any], tp_size: int) -> str:
    """Why a config cannot be tried on this model, or an empty string."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, module, spec in _chosen(model, config):
        if not isinstance(module, nn.Linear):
            return f"{name} is of class {type(module).__name__}, which AutoTP cuts in a way that is not imitated"
        if len(owners[id(module.weight)]) > 1:
            return f"the weight of {name} is tied, which AutoTP handles in a way that is not imitated"
        if kind_of(spec) == "row" and name.rpartition(".")[2] in heads_of(config):
            return f"{name} is a head cut along its input, which is not imitated"
        sizes = _parts(module.weight.shape[_dim(spec)], spec)
        if sizes is None or any(size % tp_size for size in sizes):
            sizes = sizes or spec["shape"]
            return f"{name}: {sizes} are not divisible by {tp_size}; AutoTP cuts them by rules that are not imitated"
    return ""


def _chosen(model: nn.Module, config: Mapping[str, Any]) -> Iterator[tuple[str, nn.Module, Mapping[str, Any]]]:
    """Modules with a matrix that a spec cuts."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.dim() == 2:
            spec = spec_for(config, f"{name}.weight")
            if spec is not None and kind_of(spec) != "skip":
                yield name, module, spec


def _dim(spec: Mapping[str, Any]) -> int:
    return int(spec.get("partition_dim", 0 if kind_of(spec) == "column" else 1))


def _parts(size: int, spec: Mapping[str, Any]) -> list[int] | None:
    """The packed segments of the cut dim; None where the shape does not fit it."""
    shape = spec.get("shape")
    segments = shape[_dim(spec)] if shape else 1
    if isinstance(segments, (list, tuple)):
        return list(segments) if sum(segments) == size else None
    if segments == -1:
        return [size]
    return [size // segments] * segments if size % segments == 0 else None


def _shard(model: nn.Module, mesh: Any, *, config: Mapping[str, Any]) -> nn.Module:
    group = RankGroup.of(mesh)
    held: dict[str, tuple[int, Rows, RankGroup]] = {}
    for name, module, spec in list(_chosen(model, config)):
        assert isinstance(module, nn.Linear)
        dim = _dim(spec)
        rows = _rows(_parts(module.weight.shape[dim], spec) or [], group.size)
        held[f"{name}.weight"] = (dim, rows, group)
        _keep(module, "weight", dim, rows[group.rank])
        if kind_of(spec) == "row":
            module.forward = partial(_row, module, group)
            continue
        if module.bias is not None:
            held[f"{name}.bias"] = (0, rows, group)
            _keep(module, "bias", 0, rows[group.rank])
        module.forward = partial(_column, module, group, rows if spec.get("gather_output") else None)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (spec_for(config, name) or {}).get("grad_allreduce"):
            parameter.register_hook(partial(all_reduce, group=group))
    # Attributes that look like counts of what is cut, by name, on every module over a cut layer.
    for name, module in model.named_modules():
        own = getattr(module, "weight", None)
        is_layer = isinstance(own, torch.Tensor) and own.dim() == 2
        near = [*module.parameters(recurse=False), *(p for c in module.children() for p in c.parameters(recurse=False))]
        above = any(parameter.startswith(f"{name}.") for parameter in held)
        if not name or is_layer or not above or any(parameter.dim() >= 3 for parameter in near):
            continue
        for attribute in COUNTS:
            value = getattr(module, attribute, None)
            if isinstance(value, int) and not isinstance(value, bool):
                setattr(module, attribute, value // group.size)
    model.__dict__[_HELD] = held
    return model


def _rows(sizes: list[int], tp: int) -> Rows:
    starts = [sum(sizes[:place]) for place in range(len(sizes))]
    return tuple(
        tuple(start + row for start, size in zip(starts, sizes, strict=True)
              for row in range(rank * size // tp, (rank + 1) * size // tp))
        for rank in range(tp)
    )  # fmt: skip


def _keep(module: nn.Module, name: str, dim: int, rows: tuple[int, ...]) -> None:
    whole = module._parameters[name]
    assert whole is not None
    own = whole.detach().index_select(dim, torch.tensor(rows))
    module._parameters[name] = nn.Parameter(own, requires_grad=whole.requires_grad)


def _column(module: nn.Linear, group: RankGroup, gathered: Rows | None, x: torch.Tensor) -> torch.Tensor:
    out = F.linear(copy_to_ranks(x, group), module.weight, module.bias)
    return out if gathered is None else gather_over_ranks(out, group, -1, gathered)


def _row(module: nn.Linear, group: RankGroup, x: torch.Tensor) -> torch.Tensor:
    out = sum_over_ranks(F.linear(x, module.weight), group)
    return out if module.bias is None else out + module.bias


def _gather(model: nn.Module, grads: bool) -> dict[str, torch.Tensor]:
    """Every parameter or gradient, whole, under each of its names."""
    held = model.__dict__[_HELD]
    whole = _tensors(model, grads)
    for name, (dim, rows, group) in held.items():
        if name in whole:
            whole[name] = gather_over_ranks(whole[name].detach(), group, dim, rows)
    return whole


def _tensors(model: nn.Module, grads: bool) -> dict[str, torch.Tensor]:
    """Every parameter or gradient, as it lies on this rank, under each of its names."""
    named = model.named_parameters(remove_duplicate=False)
    tensors = {name: parameter.grad if grads else parameter.detach() for name, parameter in named}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def transformers_sharding(plan: Mapping[str, str]) -> Sharding:
    """transformers' tensor parallelism, as `from_pretrained(distributed_config=…)` applies it."""
    refuse_old_sharding()
    return Sharding(partial(shard_as_transformers, plan=dict(plan)), _gathered)


def torch_sharding(plan: Mapping[str, Any]) -> Sharding:
    """torch's `parallelize_module` with a dict of styles; each rank gets style objects of its own."""
    return Sharding(partial(_shard_as_torch, plan=dict(plan)), _gathered)


def _shard_as_torch(model: Any, mesh: Any, *, plan: dict[str, Any]) -> Any:
    return parallelize_module(model, mesh, {pattern: copy.deepcopy(style) for pattern, style in plan.items()})


def _gathered(model: Any, grads: bool) -> dict[str, Any]:
    """Every parameter or gradient, whole, under each of its names."""
    return {name: _whole(tensor) for name, tensor in _tensors(model, grads).items()}


def _whole(tensor: Any) -> Any:
    if not hasattr(tensor, "placements"):
        return tensor
    if not any(type(placement).__name__ == "_StridedShard" for placement in tensor.placements):
        return tensor.full_tensor()
    # A weight sharded in interleaved pieces: every rank's rows, put back where they came from
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
