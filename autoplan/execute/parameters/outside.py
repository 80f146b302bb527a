"""Parameters on ranks, used from outside of the model: picked rows, numbers, random draws, ops with plain tensors.

The problem: loops and initialisers set rows of a table (`weight[3] = 0`), fill pieces (`bias[n : 2 * n].fill_(1)`), log
numbers (`float(p.grad.norm())`) and reinitialise weights (`nn.init`). DTensor copies what is indexed along a sharded
dim, so writes to it are lost; it reads a rank's own number where others have theirs; it draws the same numbers for each
rank's shard; and where a weight is packed in rank order, its rows are not the checkpoint's. Losses and metrics compute
with a parameter and plain tensors (`hidden @ model.table.weight.T`, `w.T @ w - torch.eye(n)`), and a loss is computed
of logits that left a compiled model as a DTensor, and plain labels. DTensor refuses to mix them, since it cannot know
whether a plain tensor is the same on every rank.

Beside a model that `parallelize` has split it is: tensor-parallel ranks run the same code on the same data. So each of
these works on full tensors, in the checkpoint's order, the same on every rank, and its result is plain. Its gradient is
then full and the same on every rank, too; each rank keeps its piece where the gradient reaches the DTensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
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
from autoplan.common.torch_internals import (
    DisableTorchFunction,
    backward_hooks,
    local_part,
    local_spec,
    place_local,
    schema_of,
)
from autoplan.execute.collectives import RankGroup, Recorded, all_reduce, in_backward, with_sums
from autoplan.execute.parameters.held import (
    Held,
    held_by,
    held_of_memory,
    is_local_of,
    memory_of,
    modules_on,
    parameters_of,
    record_of,
    units_of,
)
from autoplan.execute.parameters.state_dict import gathered, local_piece, whole_tensor
from autoplan.execute.parameters.views import whole_view
from autoplan.patches.sharding_rules import NOT_OURS, answered_by_torch


@torch.no_grad()
def _put(x: DTensor, whole: torch.Tensor, held: Held | None) -> None:
    """Write a full tensor into the shards."""
    local_part(x).copy_(local_piece(whole, held, x.device_mesh, x.placements))
    torch.autograd.graph.increment_version(x)


def _changed(value: Any, change: Any) -> Any:
    return change(value) if isinstance(value, torch.Tensor) else changed_inside(value, partial(_changed, change=change))


# Indexing and slicing.


class Picked(torch.Tensor):
    """A replicated part of a tensor on ranks, as indexing returned it: writes to it are written to the tensor, too."""

    base: DTensor
    pick: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        picked = (item for _, item in flatten_tensors((args, kwargs)) if isinstance(item, Picked))
        first = next(picked, None)
        used_on = None if first is None else held_of_memory(first.base)
        plain_args, plain_kwargs = _plain((args, kwargs or {}), used_on)
        with DisableTorchFunction():
            result = function(*plain_args, **plain_kwargs)
        name = getattr(function, "__name__", "")
        operator = name.replace("__i", "__", 1)  # of __iadd__ there is an __add__, and of __int__ no __nt__
        in_place = operator != name and hasattr(torch.Tensor, operator)
        written = in_place or name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        first = args[0] if args else None
        if not written or not isinstance(first, Picked):
            return result
        _write(first.base, lambda whole: first.pick(whole).copy_(plain_args[0]))
        return first


def _plain(value: Any, used_on: Held | None) -> Any:
    """Return full plain tensors; one computed from a weight in rank order (`bias > 0`) is ordered as `used_on`."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, Picked):
            return x.as_subclass(torch.Tensor)  # the same memory
        if not isinstance(x, DTensor):
            return x
        held, dim = held_of_memory(x), getattr(x.placements[-1], "dim", None)
        if held is None and dim is not None and used_on is not None and x.shape[dim] == sum(used_on.room):
            held = replace(used_on, dim=dim)
        return whole_tensor(x, held)

    return _changed(value, plain)


def _write(x: DTensor, change: Callable[[torch.Tensor], Any]) -> None:
    held = held_of_memory(x)
    assert held is not None
    with torch.no_grad():
        whole = whole_tensor(x, held)
        change(whole)
        _put(x, whole, held)


def pick(plain: Callable[..., Any], x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a method that indexes or slices a DTensor."""
    held = held_of_memory(x)
    if held is None or all(placed.is_replicate() for placed in x.placements) or torch.compiler.is_compiling():
        return plain(x, *args, **kwargs)
    args, kwargs = _plain((args, kwargs), held)
    name = plain.__name__
    if torch.is_grad_enabled() and x.requires_grad:
        return getattr(whole_view(x, held), name)(*args, **kwargs) if held.in_rank_order else plain(x, *args, **kwargs)

    def picked(whole: torch.Tensor, number: int | None = None) -> Any:
        result = getattr(whole, name)(*args, **kwargs)
        return result if number is None else result[number]

    def made(tensor: torch.Tensor, number: int | None = None) -> Picked:
        part = tensor.as_subclass(Picked)
        part.base, part.pick = x, lambda whole: picked(whole, number)
        return part

    result = picked(whole_tensor(x, held))
    return made(result) if isinstance(result, torch.Tensor) else tuple(made(part, n) for n, part in enumerate(result))


def total(plain: Callable[..., Any], x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Return the scalar that a method computes of all values, in a penalty, as a plain tensor that can be added to a
    loss. Otherwise a backward of plain tensors would reach a DTensor."""
    if torch.compiler.is_compiling() or x.is_meta:
        return plain(x, *args, **kwargs)
    x = with_sums(x)  # DTensor adds up norms of shards like sums
    result = plain(x, *args, **kwargs)
    penalty = type(x) is DTensor and isinstance(result, DTensor) and result.requires_grad and result.dim() == 0
    if not penalty or not modules_on(x.device_mesh):
        return result
    scalar = result.full_tensor()
    alias: Any = weakref.ref(scalar)
    scalar.full_tensor = lambda: alias().view(())  # for callers that expect a DTensor; a tensor without `full_tensor`
    return scalar


def set_item(plain: Callable[..., Any], x: DTensor, index: Any, value: Any) -> Any:
    """Perform `x[index] = value`."""
    held = held_of_memory(x)
    if held is None or torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
        return plain(x, index, value)
    index, value = _plain((index, value), held if held.dim is not None else None)
    _write(x, lambda whole: whole.__setitem__(index, value))
    return None


# Numbers and random draws.


def number_in(op: Any, args: Any, kwargs: Any) -> Any:
    """Return the number in a DTensor, reduced over ranks where it is partial."""
    return gathered(args[0]).item()


def draw(op: Any, args: Any, kwargs: Any) -> Any:
    """Draw random numbers in place: every rank draws those of the full tensor, and keeps its shard."""
    x = args[0]
    held = held_of_memory(x)
    if held is None and (x.is_meta or not modules_on(x.device_mesh)):
        return answered_by_torch(op, args, kwargs)
    mesh, placements = x.device_mesh, x.placements
    whole = torch.empty(x.shape if held is None else held.shape, dtype=x.dtype, device=x.device)
    op(whole, *args[1:], **kwargs)
    local_part(x).copy_(local_piece(whole, held, mesh, placements))  # none is held of a tensor made like a parameter
    return x


# Ops on DTensors and plain tensors.
#
# Inside of the model code reads local tensors, and nothing is mixed: only a parameter's own local tensor
# (`get_parameter(name).data`) beside DTensors (`named_parameters()`) is taken for the parameter. Replicated parameters
# whose gradients are the same on every rank are computed with as outside.


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


def _with_parameters(op: Any, owners: list[nn.Module], args: Any, kwargs: Any) -> Any:
    """Return the result with each local tensor of a parameter replaced by the parameter, if all plain ones are that.
    Otherwise, where nothing is differentiated, with each parameter replaced by its local tensor."""
    tensors = [x for _, x in flatten_tensors((args, kwargs)) if isinstance(x, DTensor) or x.numel() != 1]
    plain = [x for x in tensors if not isinstance(x, DTensor)]
    parameters = [(p, p.detach()) for p in parameters_of(owners)] if plain else []
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


def _on_full_tensors(op: Any, owners: list[nn.Module], args: Any, kwargs: Any) -> Any:
    wholes: dict[int, tuple[torch.Tensor, Held | None, DTensor]] = {}
    units = min((units_of(p, held_by(p)) for p in parameters_of(owners)), default=0)

    def whole(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return x
        if id(x) not in wholes:
            held = _how_it_lies(op, x, owners)
            hooks = (backward_hooks(x) or {}).values()
            if x.requires_grad and torch.is_grad_enabled() and not any(isinstance(hook, _Pieces) for hook in hooks):
                x.register_hook(_Pieces(x, held, units))  # a parameter is hooked once
            wholes[id(x)] = whole_tensor(x, held), held, x
        return wholes[id(x)][0]

    whole_args, whole_kwargs = _changed((args, kwargs), whole)
    result = op(*whole_args, **whole_kwargs)
    named = zip(schema_of(op).arguments, args, strict=False)
    written = [value for argument, value in named if argument.alias_info is not None and argument.alias_info.is_write]
    written += [kwargs[a.name] for a in schema_of(op).arguments if a.name in kwargs and a.alias_info is not None]
    for _, x in flatten_tensors(written):
        if isinstance(x, DTensor):
            if any(placed.is_partial() for placed in x.placements):
                raise AutoplanError(
                    f"a tensor of {list(x.shape)}, {x.placements}, is changed in place by plain tensors",
                    hint="change it out of place",
                )
            _put(x, wholes[id(x)][0], wholes[id(x)][1])
    back = {id(full): x for full, _, x in wholes.values()}
    return _changed(result, lambda full: back.get(id(full), full))


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
    """Return how a parameter lies that is kept in rank order, if a tensor has as many rows as it, and is cut, or was
    gathered by DTensor while it computed."""
    if all(placed.is_replicate() for placed in x.placements) and x.grad_fn is None:
        return None
    all_held = (held_by(parameter) for parameter in parameters_of(owners))
    return next((held for held in all_held if held and held.in_rank_order and sum(held.room) in x.shape), None)


def _how_it_lies(op: Any, x: DTensor, owners: list[nn.Module]) -> Held | None:
    """Return how a DTensor is held: a parameter, its gradient, or its transpose. What else was computed is cut evenly,
    unless it may have the rows of a parameter that is kept in rank order."""
    held = held_of_memory(x)
    if held is not None:
        return held
    place = memory_of(x)
    for parameter in parameters_of(owners):
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
