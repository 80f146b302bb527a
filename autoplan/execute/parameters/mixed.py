"""Ops on parameters that lie on ranks and plain tensors, outside of the model.

The problem: losses and metrics compute with a parameter and plain tensors (`hidden @ model.table.weight.T`,
`w.T @ w - torch.eye(n)`), and a loss is computed of logits that left a compiled model as a DTensor, and plain labels.
DTensor refuses to mix them, since it cannot know whether a plain tensor is the same on every rank.

Beside a model that `parallelize` has split it is: tensor-parallel ranks run the same code on the same data. So such an
op is computed on full tensors, in the checkpoint's order, and its result is plain. Its gradient is then full and the
same on every rank, too; each rank keeps its piece where the gradient reaches the DTensor.

Inside of the model code reads local tensors, and nothing is mixed: only a parameter's own local tensor
(`get_parameter(name).data`) beside DTensors (`named_parameters()`) is taken for the parameter. Replicated parameters
whose gradients are the same on every rank are computed with as outside.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Placement

from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.nested import changed_inside, flatten_tensors
from autoplan.common.torch_internals import backward_hooks, local_part, local_spec, place_local, schema_of
from autoplan.execute.collectives import RankGroup, Recorded, all_reduce, in_backward, with_sums
from autoplan.execute.parameters.held import Held, held_by, is_local_of, memory_of, record_of, units_of
from autoplan.execute.parameters.picked import held_of_memory, modules_on
from autoplan.execute.parameters.state_dict import local_piece, whole_tensor
from autoplan.patches.sharding_rules import NOT_OURS


def mixed(op: Any, mesh: DeviceMesh, args: Any, kwargs: Any) -> Any:
    """Return the result of an op on DTensors and plain tensors; NOT_OURS if they are not those of a sharded model. No
    op: return whether it would be."""
    owners = modules_on(mesh)
    if not owners or torch.compiler.is_compiling():
        return NOT_OURS
    if op is None:
        return None
    inside = any(record is not None and record.reading.inside for record in map(record_of, owners))
    if inside and not all(_is_same_on_ranks(x) for _, x in flatten_tensors((args, kwargs)) if isinstance(x, DTensor)):
        return _with_parameters(op, owners, args, kwargs)
    return _on_full_tensors(op, owners, args, kwargs)


def in_place(op: Any, mesh: DeviceMesh, args: Any, kwargs: Any) -> Any:
    """Return the result of an op that changes a DTensor which waits for a sum over ranks (a norm, in a step of
    Adafactor): the sum is made first."""
    x = args[0] if args else None
    if not isinstance(x, DTensor) or x.requires_grad or not any(placed.is_partial() for placed in x.placements):
        return NOT_OURS
    if not modules_on(mesh):
        return NOT_OURS
    summed = with_sums(x)
    place_local(x, local_part(summed), local_spec(summed))
    return op(*args, **kwargs)


def _is_same_on_ranks(x: DTensor) -> bool:
    """Return whether it is a replicated parameter of which every rank computes the whole gradient."""
    held = held_by(x) if x.is_leaf else None
    return held is not None and held.dim is None and held.gradient == "local" and not units_of(x, held)


def _changed(value: Any, change: Any) -> Any:
    return change(value) if isinstance(value, torch.Tensor) else changed_inside(value, partial(_changed, change=change))


def _with_parameters(op: Any, owners: list[nn.Module], args: Any, kwargs: Any) -> Any:
    """Return the result with each local tensor of a parameter replaced by the parameter, if all plain ones are that.
    Otherwise, where nothing is differentiated, with each parameter replaced by its local tensor."""
    tensors = [x for _, x in flatten_tensors((args, kwargs)) if isinstance(x, DTensor) or x.numel() != 1]
    plain = [x for x in tensors if not isinstance(x, DTensor)]
    parameters = [(p, p.detach()) for p in _parameters(owners)] if plain else []
    changes = {id(x): next((same for p, same in parameters if is_local_of(x, p)), None) for x in plain}
    if None in changes.values() or any(x.requires_grad and torch.is_grad_enabled() for x in plain):
        changes = {id(x): _part(x, owners) for x in tensors if isinstance(x, DTensor)}
    if None in changes.values():
        raise PlanMismatchError(
            f"{op} of a parameter that lies on ranks and a plain tensor, inside of the model",
            hint="read the parameter as an attribute of its module; put modules in before autoplan.parallelize",
        )
    args, kwargs = _changed((args, kwargs), lambda x: changes.get(id(x), x))
    return op(*args, **kwargs)


def _part(x: DTensor, owners: list[nn.Module]) -> torch.Tensor | None:
    """Return this rank's part of a parameter, or of what was computed of it; None if its gradient is wanted."""
    held = held_of_memory(x)
    wide = _may_be_in_rank_order(x, owners) if held is None else held if held.read is not None else None
    if (x.requires_grad and torch.is_grad_enabled()) or units_of(x, held) or x.placements[0].is_partial():
        return None
    if wide is not None and (wide.has_spare_room or wide.read is not None):
        return None
    return local_part(x) if held is None else held.held_of(local_part(x))


def _parameters(owners: list[nn.Module]) -> Iterator[DTensor]:
    for module in owners:
        yield from (p for p in module.parameters(recurse=False) if isinstance(p, DTensor))


def _on_full_tensors(op: Any, owners: list[nn.Module], args: Any, kwargs: Any) -> Any:
    wholes: dict[int, tuple[torch.Tensor, DTensor, Held | None]] = {}
    units = min((units_of(p, held_by(p)) for p in _parameters(owners)), default=0)

    def whole(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return x
        if id(x) not in wholes:
            held = _how_it_lies(op, x, owners)
            hooks = (backward_hooks(x) or {}).values()
            if x.requires_grad and torch.is_grad_enabled() and not any(isinstance(hook, _Pieces) for hook in hooks):
                x.register_hook(_Pieces(x, held, units))  # a parameter is hooked once
            wholes[id(x)] = whole_tensor(x, held), x, held
        return wholes[id(x)][0]

    whole_args, whole_kwargs = _changed((args, kwargs), whole)
    result = op(*whole_args, **whole_kwargs)
    named = zip(schema_of(op).arguments, args, strict=False)
    written = [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]
    written += [kwargs[a.name] for a in schema_of(op).arguments if a.name in kwargs and a.alias_info is not None]
    for _, x in flatten_tensors(written):
        if isinstance(x, DTensor):
            _write_back(x, *wholes[id(x)])
    back = {id(full): x for full, x, _ in wholes.values()}
    return _changed(result, lambda full: back.get(id(full), full))


def _write_back(x: DTensor, whole: torch.Tensor, _: DTensor, held: Held | None) -> None:
    if any(placed.is_partial() for placed in x.placements):
        raise AutoplanError(
            f"a tensor of {list(x.shape)}, {x.placements}, is changed in place by plain tensors",
            hint="change it out of place",
        )
    local_part(x).copy_(local_piece(whole, held, x.device_mesh, x.placements))
    torch.autograd.graph.increment_version(x)


# Tensors of which the rows are in rank order.


def ordered(op: Any, mesh: DeviceMesh, args: Any, kwargs: Any) -> Any:
    """Return the result of an op that depends on the order of rows (a cumulative sum), computed on full tensors if a
    tensor may have the rows of a parameter that is kept in rank order."""
    tensors = [x for _, x in flatten_tensors((args, kwargs)) if isinstance(x, DTensor)]
    owners = modules_on(mesh)
    if torch.compiler.is_compiling() or not any(_may_be_in_rank_order(x, owners) for x in tensors):
        return NOT_OURS
    return _on_full_tensors(op, owners, args, kwargs)


def _may_be_in_rank_order(x: DTensor, owners: list[nn.Module]) -> Held | None:
    """Return how a parameter lies that is kept in rank order, if a tensor has as many rows as it, and is cut."""
    if all(placed.is_replicate() for placed in x.placements):
        return None
    all_held = (held_by(parameter) for parameter in _parameters(owners))
    return next((held for held in all_held if held and held.in_rank_order and sum(held.room) in x.shape), None)


def _how_it_lies(op: Any, x: DTensor, owners: list[nn.Module]) -> Held | None:
    """Return how a DTensor is held: a parameter, its gradient, or its transpose. What else was computed is cut evenly,
    unless it may have the rows of a parameter that is kept in rank order."""
    held = held_of_memory(x)
    if held is not None:
        return held
    place = memory_of(x)
    for parameter in _parameters(owners):
        held = held_by(parameter)
        if held is not None and held.dim is not None and memory_of(parameter) == place and x.dim() == 2:
            return held if x.shape == parameter.shape else replace(held, dim=1 - held.dim, shape=held.shape[::-1])
    other = _may_be_in_rank_order(x, owners)
    if other is not None and in_backward():  # gradients are added that reach one tensor, a full one among them
        expected = [pieces.held for pieces in list(_expected) if pieces.fit(x)]
        if expected and all(held == expected[0] for held in expected):
            return expected[0]
    if other is not None:
        raise AutoplanError(
            f"{op} of a tensor of {list(x.shape)} that lies on ranks: it may be computed of a parameter of "
            f"{list(other.shape)} whose rows are in another order on ranks than in the checkpoint",
            hint="autoplan.full_tensors(model) gives plain tensors, without a gradient; or keep that parameter "
            "whole: overrides={name: 'replicate'}",
        )
    return None


# Gradients.


class _Pieces:
    """Makes a full gradient of a DTensor one that lies as it does, on the mesh of which FSDP2 has the first `units`
    dims."""

    def __init__(self, x: DTensor, held: Held | None, units: int) -> None:
        self.held, self.units = held, units
        self.how, self.shape, self.stride = _how(x), x.shape, x.stride()
        _expected.add(self)

    def fit(self, gradient: DTensor) -> bool:
        mesh, placements = _how(gradient)
        same = (gradient.shape, mesh, placements) == (self.shape, *self.how)
        return same and mesh.get_coordinate() == self.how[0].get_coordinate()

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if isinstance(gradient, DTensor):
            return gradient
        return _Piece.apply(gradient, self.held, self.units, self.how, self.shape, self.stride)


_expected: weakref.WeakSet[_Pieces] = weakref.WeakSet()


def _how(x: DTensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    return x.device_mesh, tuple(Replicate() if placed.is_partial() else placed for placed in x.placements)


class _Piece(Recorded):
    """The piece of a full gradient, averaged over data-parallel ranks as FSDP2 does."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, held: Held | None, units: int, how: Any, shape: Any, stride: Any) -> Any:
        ctx.held, ctx.averaged = held, units > 0
        mesh, placements = how
        for dim in range(units):
            group = RankGroup.of(mesh.get_group(dim))
            whole = all_reduce(whole, group) / group.size
        piece = local_piece(whole, held, mesh, placements).contiguous()
        return DTensor.from_local(piece, mesh, placements, run_check=False, shape=shape, stride=stride)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.averaged:
            raise AutoplanError(
                "a second derivative by a parameter that FSDP2 shards, with plain tensors beside it",
                hint="autoplan.full_tensors(model) gives plain tensors",
            )
        whole = whole_tensor(gradient, ctx.held) if isinstance(gradient, DTensor) else gradient
        return whole, None, None, None, None, None
