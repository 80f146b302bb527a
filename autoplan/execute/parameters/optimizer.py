"""Optimizers of a sharded model: states, steps and norms in which shared rows count once."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from autoplan.common.errors import AutoplanError
from autoplan.common.layout import chunk
from autoplan.common.torch_internals import local_part, local_spec, place_local
from autoplan.execute.collectives import index_of, like
from autoplan.execute.parameters.held import (
    UNITS_ALONE,
    Held,
    Mark,
    held_by,
    held_parameters,
    mark_of,
    marked_modules,
    note_marked,
    record_of,
    units_of,
    with_mark,
)
from autoplan.execute.parameters.outside import draw, in_place, mixed, number_in, ordered, pick, set_item, total
from autoplan.execute.parameters.state_dict import as_held, in_checkpoint_order, renew_units
from autoplan.patches.sharding_rules import asked_of_all, heard_by_classes, mixed_by, numbers_and_draws
from autoplan.patches.tensors import data_assigned, left_whole, norm_of, picked, told_of_new_optimizers, told_of_stored

# Rows of a gradient that several ranks hold count once, here and in torch's own norms.
#
# The problem: with fewer K/V heads than ranks, a DTensor has more rows than the checkpoint, and its norm counts some of
# them twice. Our own functions know which; torch's `clip_grad_norm_` gets gradients only. So the owners of parameters
# with such rows are noted here, and before torch takes a norm, rows that another rank counts are set to zero.
#
# A second mesh dim, with a weight of keys or values on (kv, replica), would tell torch which rows are the same. But it
# cannot tell it of a packed weight, of whose rows each rank has its own queries and several have one key: phi3 at tp 4
# is `2*4!*8|16|16`. Rank order and these sums would stay for such weights, beside another form for the others.

_Owner: TypeAlias = nn.Module | Optimizer  # not parameters: torch swaps none that has a weak reference
_owners: weakref.WeakSet[_Owner] = weakref.WeakSet()


def note_repeating(owner: _Owner) -> None:
    """Note the model's modules, or the optimizer, whose parameters have shared rows, for `count_once`."""
    owners: Iterable[_Owner] = (owner,) if isinstance(owner, Optimizer) else owner.modules()
    _owners.update(each for each in owners if any(True for _ in _repeating(each)))


def _repeating(owner: _Owner) -> Iterator[tuple[torch.Tensor, Held]]:
    for parameter in _parameters(owner) if isinstance(owner, Optimizer) else owner._parameters.values():
        held = held_by(parameter) if parameter is not None else None
        if held is not None and repeats(held):
            yield parameter, held


def count_once(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients with zeros in rows that another rank counts."""
    shared = {id(parameter.grad): held for owner in list(_owners) for parameter, held in _repeating(owner)}
    counted: list[torch.Tensor] = []
    for gradient in gradients:
        held = shared.get(id(gradient))
        if held is not None:
            assert isinstance(gradient, DTensor) and held.dim is not None
            local = gradient.to_local()
            rows = index_of(answered_for(held, gradient), local.device)
            own = torch.zeros_like(local).index_copy(held.dim, rows, local.index_select(held.dim, rows))
            gradient = like(own, gradient)
        counted.append(gradient)
    return counted


def repeats(held: Held) -> bool:
    """Return whether any row has several holders."""
    return held.dim is not None and sum(map(len, held.rows)) > held.shape[held.dim]


def answered_for(held: Held, gradient: DTensor) -> list[int]:
    """Return the local rows, within this rank's FSDP2 shard, of which it is the first holder among the tp ranks."""
    before = {row for rows in held.rows[: held.group.rank] for row in rows}
    mine = [row not in before for row in held.rows[held.group.rank]]
    mesh = gradient.device_mesh
    for mesh_dim, placement in enumerate(gradient.placements[:-1]):
        if getattr(placement, "dim", None) == held.dim:
            shard = chunk(len(mine), mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
            mine = mine[shard.start : shard.stop]
    return [place for place, wanted in enumerate(mine) if wanted]


# `parameter.data = x` for a sharded parameter: the model computes with the local shard of x from then on.
#
# x may be a DTensor on the parameter's mesh (`parameter.data * 0.9`, a piece of one vector of all parameters), or a
# full plain tensor in the checkpoint's order. Anything else is refused, since it would be ignored. FSDP2 keeps its own
# reference to the memory that it gathers from, which is renewed. In a forward an assignment would be lost: FSDP2 frees
# what it has gathered.


def assign_data(parameter: DTensor, value: Any) -> bool:
    """Assign `parameter.data = value` for a parameter on ranks; return whether it is one."""
    held = held_by(parameter)
    in_units = units_of(parameter, held) > 0
    if held is None:
        if _modules_with(parameter):
            raise AutoplanError(
                f"parameter.data = … in a forward, for a parameter of {list(parameter.shape)}: FSDP2 has gathered it "
                "and loses the change",
                hint="change it outside of the forward, after the optimizer's step; or leave dp_shard out of the mesh",
            )
        return False
    if not isinstance(value, torch.Tensor):
        _refuse(parameter, value, held, "which must be a tensor")
    if isinstance(value, DTensor):
        if (value.device_mesh, value.shape) != (parameter.device_mesh, parameter.shape):
            _refuse(parameter, value, held, "which has another mesh or shape")
        if in_units and value.placements != parameter.placements:
            _refuse(parameter, value, held, "which FSDP2 shards in its own way")
        value = value.detach().redistribute(placements=parameter.placements)
    elif tuple(value.shape) != held.shape:
        _refuse(parameter, value, held, "which has another shape")
    else:
        value = as_held(value, parameter, held)
    for module in marked_modules() if in_units else ():
        # Free what FSDP2 left gathered in its place after a forward: modules hold the parameter again.
        record = record_of(module)
        gathered = record.reading.gathered if record is not None else None
        if gathered is not None and any(gathered.as_sharded(own) is parameter for own in module._parameters.values()):
            gathered.free()
    torch.Tensor.data.__set__(parameter, value.detach())
    place_local(parameter, local_part(value).detach(), local_spec(value))
    if in_units:
        place_local(parameter, local_part(parameter).contiguous())
        torch.autograd.graph.increment_version(parameter)
        for module in _modules_with(parameter):
            renew_units(module)
    return True


def _modules_with(parameter: DTensor) -> list[nn.Module]:
    """Return the modules of sharded models that hold a parameter now."""
    return [module for module in marked_modules() if any(own is parameter for own in module._parameters.values())]


def _refuse(parameter: DTensor, value: Any, held: Held, why: str) -> None:
    shown = f"a {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        placed = f", {value.placements}" if isinstance(value, DTensor) else ""
        shown += f" of shape {list(value.shape)}{placed}"
    raise AutoplanError(
        f"parameter.data = {shown} for a parameter of {list(held.shape)}, {parameter.placements}, {why}",
        hint="write in place: with torch.no_grad(): parameter.copy_(x), x a DTensor with the same placements; or load "
        "it: model.load_state_dict({name: x}, strict=False)",
    )


# Steps of optimizers that do not work element by element.
#
# The problem: most optimizers work element by element, and need not know that a parameter is sharded. Others take means
# of rows, dot products of all gradients, or orthogonal matrices. DTensor does not support some of that, and raises in
# the middle of a step an error about its own operators. And where a parameter has more rows than the checkpoint (some
# lie on several ranks), they would silently count twice.

_OF_WHOLE_PARAMETERS = frozenset(("LBFGS", "Muon", "Adafactor"))  # by name: transformers has an Adafactor, too


def watch_steps(optimizer: Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Refuse optimizers that would count rows twice, and explain errors of a step."""
    of_whole = not _OF_WHOLE_PARAMETERS.isdisjoint(cls.__name__ for cls in type(optimizer).__mro__)
    for parameter in parameters if of_whole else ():
        held = held_by(parameter)
        if held is not None and tuple(parameter.shape) != held.shape:
            raise AutoplanError(
                f"{type(optimizer).__name__} on a parameter of {list(held.shape)}, some of whose rows are on "
                f"several ranks ({list(parameter.shape)} with the copies): it would count them more than once",
                hint="use an elementwise optimizer, such as AdamW; or replicate the parameter: overrides={name: "
                "'replicate'}",
            )
    plain = optimizer.step

    def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        closure = _Closure(self, args[0] if args else kwargs.get("closure"))
        if args:
            args = (closure.given and closure, *args[1:])
        elif "closure" in kwargs:
            kwargs["closure"] = closure.given and closure
        try:
            return plain(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if isinstance(error, (AutoplanError, torch.OutOfMemoryError)) or error is closure.error:
                raise
            raise AutoplanError(
                f"{type(self).__name__} cannot step on sharded parameters: {error}",
                hint="use an elementwise optimizer, such as AdamW or SGD",
            ) from error
        finally:
            closure.forget()

    optimizer.step = MethodType(step, optimizer)


class _Closure:
    """The closure of a step, whose own errors are left alone. LBFGS uses a plain zero for a parameter without gradient,
    which cannot be mixed with DTensors: such a parameter gets a DTensor of zeros for the duration of the step."""

    def __init__(self, optimizer: Optimizer, given: Callable[[], Any] | None) -> None:
        self.optimizer, self.given = optimizer, given
        self.error: BaseException | None = None
        self.filled: list[torch.Tensor] = []

    def __call__(self) -> Any:
        assert self.given is not None
        self.forget()
        try:
            loss = self.given()
        except BaseException as error:
            self.error = error
            raise
        if isinstance(self.optimizer, LBFGS):
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is None and isinstance(parameter, DTensor):
                        parameter.grad = torch.zeros_like(parameter, requires_grad=False)
                        self.filled.append(parameter)
        return loss

    def forget(self) -> None:
        """Remove the gradients that were filled in."""
        for parameter in self.filled:
            parameter.grad = None
        self.filled.clear()


# Optimizer states of sharded parameters in the checkpoint's shapes and row order.
#
# The problem: a packed weight is in rank order, so are its momenta, and a run resumed at another tp size would silently
# read them shuffled. Model hooks do not see optimizer states. So every optimizer with parameters of a parallelized
# model translates its own state dict: into checkpoint order when one is made, back when one is loaded (from DTensors of
# any mesh, or from full tensors, such as a run on one device saves).
#
# torch has hooks for an optimizer's state dict but none for its creation, so `Optimizer.__init__` is patched to call
# `follow`, for as long as there are parameters of a parallelized model. Optimizers of other parameters are not touched.

_FOLLOWED = "_autoplan_followed"


def follow(optimizer: Optimizer) -> None:
    """Translate the state dicts of this optimizer if it has marked parameters."""
    if getattr(optimizer, _FOLLOWED, False) or not any(held_by(p) is not None for p in _parameters(optimizer)):
        return
    setattr(optimizer, _FOLLOWED, True)
    note_repeating(optimizer)
    watch_steps(optimizer, _parameters(optimizer))
    optimizer.register_state_dict_post_hook(partial(_translated, _saved))
    optimizer.register_load_state_dict_pre_hook(partial(_translated, _loaded))


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


def _translated(translate: Any, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state dict with each tensor of each marked parameter translated. Its keys may be numbers or names."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    by_key = dict(zip(keys, _parameters(optimizer), strict=False))
    states: dict[Any, Any] = {}
    for key, state in state_dict["state"].items():
        parameter = by_key.get(key)
        held = held_by(parameter) if parameter is not None else None
        if held is None or not isinstance(parameter, DTensor) or not isinstance(state, Mapping):
            states[key] = state
        else:
            tensors = {name: v for name, v in state.items() if isinstance(v, torch.Tensor) and v.dim() > 0}
            translated = {name: translate(name, tensor, parameter, held) for name, tensor in tensors.items()}
            states[key] = {**state, **translated}  # step counts and the like stay
    return {**state_dict, "state": states}


def _saved(name: str, value: torch.Tensor, parameter: DTensor, held: Held) -> torch.Tensor:
    if not held.in_rank_order:
        return value
    if not isinstance(value, DTensor) or value.shape != parameter.shape:
        raise AutoplanError(
            f"the optimizer state {name!r} has shape {list(value.shape)}, its packed parameter {list(held.shape)}",
            hint="only states of the parameter's shape can be converted to checkpoint order; replicate that parameter",
        )
    return in_checkpoint_order(value, held)


def _loaded(name: str, value: torch.Tensor, parameter: DTensor, held: Held) -> torch.Tensor:
    if tuple(value.shape) != held.shape:
        if held.in_rank_order:
            raise AutoplanError(
                f"the saved {name!r} has shape {list(value.shape)}, its parameter {list(held.shape)}",
                hint="the optimizer state belongs to another model",
            )
        return value
    own = value.clone() if held.dim is None and not isinstance(value, DTensor) else value  # no alias of the caller's
    return as_held(own, parameter, held)


# Patches of other packages that handle parameters on ranks, for as long as there are any.
#
# The problem: optimizers, norms, savers and loaders get parameters and no model, and torch has hooks for few of them.
# So each parameter is marked, and while a marked one lives, functions that would mishandle it are patched: creation of
# optimizers, norms of gradients, assignments to `.data`, full state dicts that torch shards, safetensors, which would
# look for memory, and the compiler where it calls losses. DTensor also gets rules for the ops by which torch inspects
# parameters.


class _Following:
    """The patches, which last as long as an instance lives. Every marked parameter holds it, and so do its copies."""

    def __init__(self) -> None:
        self.holds = (
            told_of_new_optimizers(follow),
            norm_of(count_once),
            data_assigned(assign_data, with_mark),
            picked(pick, set_item, total),
            numbers_and_draws(number_in, draw),
            *mixed_by(mixed, ordered, in_place),
            left_whole(_lies_otherwise),
            told_of_stored(_refuse_stored),
            heard_by_classes(),
            asked_of_all(),
        )
        for hold in self.holds:
            hold.until_gone(self)

    def release(self) -> None:
        for hold in self.holds:
            hold.release()

    def __reduce__(self) -> Any:
        return _Following, ()


def mark_parameters(model: nn.Module) -> None:
    """Mark parameters on ranks with how they are held, for optimizers and norms, which get no model."""
    many = list(held_parameters(model))
    following = _Following() if any(held is not None for _, _, held in many) else None
    for _, parameter, held in many:
        if following is not None and (held is not None or isinstance(parameter, DTensor)):
            Mark(held or Held(tuple(parameter.shape), UNITS_ALONE), following).put(parameter)
    if following is None and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        asked_of_all().until_gone(model)  # sharded by FSDP2 only
    note_marked(model)
    note_repeating(model)


def stop_following(model: nn.Module) -> None:
    """Leave future optimizers alone: the plan of this model is undone."""
    for parameter in model.parameters():
        mark = mark_of(parameter)
        if mark is not None:
            mark.kept.release()


def _lies_otherwise(parameter: torch.Tensor, whole: torch.Tensor) -> bool:
    held = held_by(parameter)
    return held is not None and tuple(whole.shape) == held.shape != tuple(parameter.shape)


def _refuse_stored(tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise AutoplanError(
            f"safetensors writes plain tensors, but one of shape {list(tensor.shape)} is sharded",
            hint="autoplan.save_weights(model, folder), called on every rank, writes the checkpoint",
        )
