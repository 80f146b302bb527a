"""Parameters that lie on ranks, seen from outside of the model: rows that are picked and set, numbers, random draws.

The problem: loops and initialisers set rows of a table (`weight[3] = 0`), fill pieces (`bias[n : 2 * n].fill_(1)`), log
numbers (`float(p.grad.norm())`) and draw weights anew (`nn.init`). DTensor copies what is picked along a dim that
is cut, so what is written into it is lost; it reads a rank's own number where others have theirs; it draws the same
numbers for each rank's part; and where a weight is packed in rank order, its rows are not the checkpoint's.

So each of them goes by the whole tensor, in the checkpoint's order, on every rank alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from autoplan.common.nested import changed_inside, flatten_tensors
from autoplan.execute.parameters.held import Held, Mark, held_by, mark_of, memory_of
from autoplan.execute.parameters.local_views import whole_view
from autoplan.execute.parameters.state_dict import gathered, local_piece, whole_tensor
from autoplan.patches.sharding_rules import answered_by_torch

_marked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that own marked parameters


def note_marked(model: nn.Module) -> None:
    """Know the memory of its parameters and of their gradients."""
    _marked.update(module for module in model.modules() if any(map(_held, module._parameters.values())))


def _held(parameter: torch.Tensor | None) -> Held | None:
    return held_by(parameter) if isinstance(parameter, DTensor) else None


def held_of_memory(x: DTensor) -> Held | None:
    """How it lies on ranks, if it is a marked parameter, its gradient, or the same memory under another name."""
    own = None if x.is_meta else held_by(x)
    if own is not None or x.is_meta or x.grad_fn is not None:
        return own
    place = _place(x)
    for parameter in (one for module in list(_marked) for one in module._parameters.values()):
        held = _held(parameter)
        for one in (parameter, parameter.grad) if held is not None and parameter is not None else ():
            if isinstance(one, DTensor) and _place(one) == place:
                return held
    return None


def _place(x: DTensor) -> Any:
    return memory_of(x), x._local_tensor.storage_offset(), x.shape, x.device_mesh, x.placements


def with_mark(parameter: DTensor, same: Any) -> Any:
    """What `parameter.data` is lies as the parameter does."""
    mark = mark_of(parameter)
    if isinstance(mark, Mark) and isinstance(same, DTensor):
        mark.put(same)
    return same


# ------------------------------------------------------------------------------------------------ rows that are picked


class Picked(torch.Tensor):
    """What was picked of a tensor that lies on ranks, whole on each: what is written into it is written there."""

    base: DTensor
    pick: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        picked = (one for _, one in flatten_tensors((args, kwargs)) if isinstance(one, Picked))
        first = next(picked, None)
        used_on = None if first is None else held_of_memory(first.base)
        plain_args, plain_kwargs = _plain((args, kwargs or {}), used_on)
        with torch._C.DisableTorchFunction():
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
    """The whole plain tensor. What is computed of a weight in rank order (`bias > 0`) lies as what it is used on."""
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
    x._local_tensor.copy_(local_piece(whole, held, x.device_mesh, x.placements))
    torch.autograd.graph.increment_version(x)


def pick(plain: Callable[..., Any], x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """What a method of a DTensor gives that picks rows or pieces of it."""
    held = held_of_memory(x)
    if held is None or held.dim is None or torch.compiler.is_compiling():
        return plain(x, *args, **kwargs)
    args, kwargs = _plain((args, kwargs), held)
    name = plain.__name__
    if torch.is_grad_enabled() and x.requires_grad:
        return getattr(whole_view(x, held), name)(*args, **kwargs) if held.in_rank_order else plain(x, *args, **kwargs)

    def picked(whole: torch.Tensor, number: int | None = None) -> Any:
        found = getattr(whole, name)(*args, **kwargs)
        return found if number is None else found[number]

    def made(tensor: torch.Tensor, number: int | None = None) -> Picked:
        one = tensor.as_subclass(Picked)
        one.base, one.pick = x, lambda whole: picked(whole, number)
        return one

    found = picked(whole_tensor(x, held))
    return made(found) if isinstance(found, torch.Tensor) else tuple(made(one, n) for n, one in enumerate(found))


def total(plain: Callable[..., Any], x: DTensor, *args: Any, **kwargs: Any) -> Any:
    """The number that a method makes of all values, in a penalty: a plain tensor, which can be added to a loss. Its
    backward would meet plain tensors as a DTensor otherwise."""
    if torch.compiler.is_compiling() or x.is_meta:
        return plain(x, *args, **kwargs)
    if any(placed.is_partial() for placed in x.placements):  # DTensor adds up norms of parts as if they were sums
        x = x.redistribute(placements=[Replicate() if one.is_partial() else one for one in x.placements])
    found = plain(x, *args, **kwargs)
    penalty = isinstance(found, DTensor) and found.requires_grad and found.dim() == 0
    if not penalty or not any(_lies_on(x, module) for module in list(_marked)):
        return found
    made = found.full_tensor()
    made.full_tensor = weakref.ref(made)  # for those who expect a DTensor: calling it gives the tensor itself
    return made


def set_item(plain: Callable[..., Any], x: DTensor, index: Any, value: Any) -> Any:
    """`x[index] = value`."""
    held = held_of_memory(x)
    if held is None or torch.compiler.is_compiling() or (torch.is_grad_enabled() and x.requires_grad):
        return plain(x, index, value)
    index, value = _plain((index, value), held if held.dim is not None else None)
    _write(x, lambda whole: whole.__setitem__(index, value))
    return None


# ------------------------------------------------------------------------------------------------ numbers, random draws


def number_in(op: Any, args: Any, kwargs: Any) -> Any:
    """The number in a DTensor: the sum of what ranks have, where each has a part."""
    return gathered(args[0]).item()


def draw(op: Any, args: Any, kwargs: Any) -> Any:
    """Random numbers in place: ranks draw those of the whole tensor, and keep their part."""
    x = args[0]
    held = held_of_memory(x)
    if held is None and (x.is_meta or not any(_lies_on(x, module) for module in list(_marked))):
        return answered_by_torch(op, args, kwargs)
    mesh, placements = x.device_mesh, x.placements
    whole = torch.empty(x.shape if held is None else held.shape, dtype=x.dtype, device=x.device)
    op(whole, *args[1:], **kwargs)
    if held is None:  # made like a parameter
        part = distribute_tensor(whole, mesh, placements, src_data_rank=None)._local_tensor
    else:
        part = local_piece(whole, held, mesh, placements)
    x._local_tensor.copy_(part)
    return x


def _lies_on(x: DTensor, module: nn.Module) -> bool:
    """Does it lie on the ranks of a module's parameters?"""
    return any(isinstance(one, DTensor) and one.device_mesh == x.device_mesh for one in module._parameters.values())
