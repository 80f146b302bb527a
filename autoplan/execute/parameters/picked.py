"""Parameters on ranks, used from outside of the model: rows that are picked and set, numbers, random draws.

The problem: loops and initialisers set rows of a table (`weight[3] = 0`), fill pieces (`bias[n : 2 * n].fill_(1)`), log
numbers (`float(p.grad.norm())`) and reinitialise weights (`nn.init`). DTensor copies what is indexed along a sharded
dim, so writes to it are lost; it reads a rank's own number where others have theirs; it draws the same numbers for each
rank's shard; and where a weight is packed in rank order, its rows are not the checkpoint's.

So each of these works on the full tensor, in the checkpoint's order, the same on every rank.
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
from torch.distributed.tensor import DTensor

from autoplan.common.nested import changed_inside, flatten_tensors
from autoplan.common.torch_internals import DisableTorchFunction, local_part, own_parameters
from autoplan.execute.collectives import with_sums
from autoplan.execute.parameters.held import Held, Mark, held_by, mark_of, memory_of
from autoplan.execute.parameters.local_views import whole_view
from autoplan.execute.parameters.state_dict import gathered, local_piece, whole_tensor
from autoplan.patches.sharding_rules import answered_by_torch

_marked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that own marked parameters


def note_marked(model: nn.Module) -> None:
    """Note the modules of a model that own marked parameters."""
    _marked.update(module for module in model.modules() if any(map(_held, own_parameters(module).values())))


def marked_modules() -> list[nn.Module]:
    """Return the live modules that own marked parameters."""
    return list(_marked)


def modules_on(mesh: DeviceMesh) -> list[nn.Module]:
    """Return those with parameters on this mesh; not those of another rank that is a thread."""

    def is_here(parameter: torch.Tensor) -> bool:
        other = parameter.device_mesh if isinstance(parameter, DTensor) else None
        return other is not None and other == mesh and other.get_coordinate() == mesh.get_coordinate()

    return [module for module in list(_marked) if any(map(is_here, module.parameters(recurse=False)))]


def _held(parameter: torch.Tensor | None) -> Held | None:
    return held_by(parameter) if isinstance(parameter, DTensor) else None


def held_of_memory(x: DTensor) -> Held | None:
    """Return how a tensor is held, if it is a marked parameter, its gradient, or the same memory under another name."""
    own = None if x.is_meta else held_by(x)
    if own is not None or x.is_meta or x.grad_fn is not None:
        return own
    place = _place(x)
    for parameter in (one for module in list(_marked) for one in own_parameters(module).values()):
        held = _held(parameter)
        for one in (parameter, parameter.grad) if held is not None and parameter is not None else ():
            if isinstance(one, DTensor) and _place(one) == place:
                return held
    return None


def _place(x: DTensor) -> Any:
    return memory_of(x), local_part(x).storage_offset(), x.shape, x.device_mesh, x.placements


def with_mark(parameter: DTensor, same: Any) -> Any:
    """Mark `parameter.data` like its parameter."""
    mark = mark_of(parameter)
    if isinstance(mark, Mark) and isinstance(same, DTensor):
        mark.put(same)
    return same


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
        with torch.no_grad():
            _write(first.base, lambda whole: first.pick(whole).copy_(plain_args[0]))
        return first


def _plain(x: Any, used_on: Held | None) -> Any:
    """Return the full plain tensor; one computed from a weight in rank order (`bias > 0`) is ordered as `used_on`."""
    if isinstance(x, Picked):
        return x.as_subclass(torch.Tensor)  # the same memory
    if not isinstance(x, DTensor):
        return changed_inside(x, partial(_plain, used_on=used_on))
    held, dim = held_of_memory(x), getattr(x.placements[-1], "dim", None)
    if held is None and dim is not None and used_on is not None and x.shape[dim] == sum(used_on.room):
        held = replace(used_on, dim=dim)
    return whole_tensor(x, held)


@torch.no_grad()
def _write(x: DTensor, change: Callable[[torch.Tensor], Any]) -> None:
    held = held_of_memory(x)
    whole = whole_tensor(x, held)
    change(whole)
    assert held is not None
    local_part(x).copy_(local_piece(whole, held, x.device_mesh, x.placements))
    torch.autograd.graph.increment_version(x)


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
