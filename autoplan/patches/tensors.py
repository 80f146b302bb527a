"""Patches of torch for tensors of a sharded model: state dicts, optimizers, norms, storage."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
import torch.distributed._state_dict_utils as utils
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import Optimizer

from autoplan.patches.patched import Hold, Place, apart, hold, patch, while_split

# Full tensors that torch shards for a sharded model: `set_model_state_dict(..., full_state_dict=True)`.
#
# torch shards each of them evenly, in the checkpoint's shape, and copies the shard into the parameter's. A parameter
# with more rows than the checkpoint (some lie on several ranks) has another local size: an error on one rank, while the
# others wait. Such a tensor is left unsharded: our load hook shards it.


def left_whole(wanted: Callable[[Any, torch.Tensor], bool]) -> Hold:
    """Make torch leave a tensor unsharded where `wanted`, called with a parameter and its tensor, says so."""

    def leaving(plain: Any) -> Any:
        def _distribute_tensors(local_state_dict: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
            for key in keys:
                pair = local_state_dict.get(key)
                if isinstance(pair, tuple) and wanted(*pair):
                    local_state_dict[key] = pair[1]
            plain(local_state_dict, keys, *args, **kwargs)

        return _distribute_tensors

    return hold(full_state_dicts_patch, [Place(utils, "_distribute_tensors", leaving)])


@while_split(
    name="full state dicts",
    replaces="torch.distributed._state_dict_utils._distribute_tensors",
    why="torch would shard it evenly, but a parameter with rows on several ranks has another local size",
)
def full_state_dicts_patch() -> bool:
    """Return whether torch passes a parameter with its full tensor, and accepts a tensor that is done."""
    parameter, whole = torch.zeros(2), torch.ones(3)
    state: dict[str, Any] = {"weight": (parameter, whole)}
    with apart(), left_whole(lambda one, other: one is parameter and other is whole):
        vars(utils)["_distribute_tensors"](state, ["weight"], torch.device("cpu"), "no group")
    user = vars(utils)["_broadcast_tensors"].__code__.co_names
    return state == {"weight": whole} and "_distribute_tensors" in user


# Notice every optimizer that is created while a sharded model lives.
#
# torch has hooks for an optimizer's state dict, its steps and its loads, but none for its creation. A hook on the first
# step comes too late: a resumed run loads its states before that, and they would be replicated on every device until
# then. So `Optimizer.__init__` is patched, only for as long as there are parameters whose states need reordering.


def told_of_new_optimizers(tell: Callable[[Optimizer], None]) -> Hold:
    """Call `tell` with every new optimizer, until the hold is released."""

    def telling(plain_init: Any) -> Any:
        @functools.wraps(plain_init)
        def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            plain_init(self, *args, **kwargs)
            tell(self)

        return __init__

    return hold(optimizers_patch, [Place(Optimizer, "__init__", telling)])


@while_split(
    name="creation of optimizers",
    replaces="torch.optim.Optimizer.__init__",
    why="optimizer states of packed weights are in rank order; their state dicts must be in checkpoint order",
)
def optimizers_patch() -> bool:
    """Return whether every optimizer goes through `Optimizer.__init__`, and has its groups and hooks afterwards."""
    seen: list[tuple[type, int]] = []
    kinds = (torch.optim.SGD, torch.optim.AdamW)
    with apart(), told_of_new_optimizers(lambda new: seen.append((type(new), len(new.param_groups[0]["params"])))):
        optimizers = [kind([torch.nn.Parameter(torch.ones(2))], lr=0.1) for kind in kinds]
    hooks = (Optimizer.register_state_dict_post_hook, Optimizer.register_load_state_dict_pre_hook)
    accepted = all(list(inspect.signature(hook).parameters)[:2] == ["self", "hook"] for hook in hooks)
    return accepted and [(kind, 1) for kind in kinds] == [entry for entry in seen if entry[0] in map(type, optimizers)]


# `parameter.data = x` for parameters on ranks.
#
# torch changes the shape and type on the C++ side of a DTensor, and not the local tensor, with which everything
# computes: the assignment silently does nothing. Weight averaging, quantisers and merging of adapters use it.

_PLAIN: Any = torch.Tensor.data


def data_assigned(assign: Callable[[DTensor, Any], bool], read: Callable[[DTensor, Any], Any]) -> Hold:
    """Let `assign` handle `x.data = y` for DTensors, or torch where it returns False, until the hold is released.
    `read` gets a DTensor and its data, and returns the data."""

    def write(self: DTensor, value: Any) -> None:
        if not assign(self, value):
            _PLAIN.__set__(self, value)

    data = property(lambda self: read(self, _PLAIN.__get__(self)), write)
    return hold(parameter_data_patch, [Place(DTensor, "data", lambda _: data, inherited=True)])


@while_split(
    name="data of parameters",
    replaces="torch.distributed.tensor.DTensor.data",
    why="assigning to a DTensor's .data leaves its local tensor unchanged",
)
def parameter_data_patch() -> bool:
    """Return whether DTensor inherits an assignable `data`."""
    before = vars(DTensor).get("data")
    seen: list[Any] = []

    def assign(x: DTensor, value: Any) -> bool:
        seen.append(value)
        return True

    def read(x: DTensor, data: Any) -> Any:
        seen.append(float(data))
        return data

    with apart(), data_assigned(assign, read):
        DTensor.data.__set__(torch.ones(2), 3)
        DTensor.data.__get__(torch.ones(()))
    plain = torch.ones(2)
    _PLAIN.__set__(plain, torch.zeros(2))
    restored = seen == [3, 1] and vars(DTensor).get("data") is before
    return restored and not plain.any() and not _PLAIN.__get__(plain).any()


# Rows and pieces of parameters on ranks: `weight[3]`, `weight[3] = 0`, `bias.chunk(4)`.
#
# DTensor copies what is indexed along a sharded dim, so writes to it are silently lost, and has no rule to set rows.
# And the sum in a penalty cannot be added to a loss: its gradient would be mixed with plain tensors.

_PICKS = ("__getitem__", "chunk", "diagonal", "narrow", "select", "split", "unbind")
_TOTALS = ("mean", "norm", "sum")
_METHODS = ("__setitem__", *_PICKS, *_TOTALS)


def picked(pick: Callable[..., Any], set_item: Callable[..., Any], total: Callable[..., Any]) -> Hold:
    """Call these functions with torch's method and its arguments, for a DTensor, until the hold is released."""

    def places() -> Iterator[Place]:
        for name in _METHODS:
            plain = getattr(torch.Tensor, name)
            function = set_item if name == "__setitem__" else pick if name in _PICKS else total
            made = functools.partialmethod(lambda x, f, own, *args, **more: f(own, x, *args, **more), function, plain)
            yield Place(DTensor, name, lambda _, made=made: made, inherited=True)  # type: ignore[misc]

    return hold(picked_rows_patch, places())


@while_split(
    name="picked rows",
    replaces="__getitem__, __setitem__, chunk, diagonal, mean, narrow, norm, select, split, sum and unbind of "
    "torch.distributed.tensor.DTensor",
    why="writes to indexed rows of a sharded parameter are lost, and a penalty on it cannot be added to a loss",
)
def picked_rows_patch() -> bool:
    """Return whether DTensor inherits these methods from Tensor."""
    before = {name: vars(DTensor).get(name) for name in _METHODS}
    seen: list[Any] = []

    def told(plain: Any, x: Any, *args: Any) -> None:
        seen.append((plain.__name__, *args))

    dtensor: Any = DTensor.__new__  # methods are looked up on the class: no ranks are needed
    with apart(), picked(told, told, told):
        for name in _METHODS:
            vars(DTensor)[name].__get__(dtensor, DTensor)(1)
    return seen == [(name, 1) for name in before] and before == {name: vars(DTensor).get(name) for name in before}


# torch's norm of all gradients, where several ranks hold the same rows.
#
# `torch.nn.utils.clip_grad_norm_` and `get_total_norm` get gradients, and a DTensor does not show rows that two ranks
# hold: they would count twice. Callers import both by name before any model is sharded, so the function that both keep
# in the closure of their `torch.no_grad` is replaced.


def norm_of(counted: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> Hold:
    """Make torch compute norms of `counted(gradients)`, until the hold is released."""

    def counting(plain: Any) -> Any:
        @functools.wraps(plain)
        def total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            return plain(counted(gradients), *args, **kwargs)

        return total_norm

    (cell,) = get_total_norm.__closure__
    return hold(total_norm_patch, [Place(cell, "cell_contents", counting)])


@while_split(
    name="norm of gradients",
    replaces="the function in the closure of torch.nn.utils.get_total_norm",
    why="torch's gradient norm would count rows that several ranks hold more than once",
)
def total_norm_patch() -> bool:
    """Return whether both functions take the norm of the replaced gradients."""
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with apart(), norm_of(lambda gradients: [4 * gradient for gradient in gradients]):
        norms = (clip_grad_norm_(iter([weight]), 100.0), get_total_norm(iter([weight.grad])))
    return all(abs(float(norm) - 32**0.5) < 1e-5 for norm in norms) and float(weight.grad[0]) == 1


# `safetensors.torch.save_model` and `save_file` of tensors on ranks: one clear error.
#
# They read the memory of each tensor, and a DTensor has none of its own: torch's error is about a storage that Python
# cannot use. Both are imported by name before any model is sharded; the function that reads the memory is not.


def told_of_stored(tell: Callable[[torch.Tensor], None]) -> Hold:
    """Call `tell`, which may raise, with each tensor that safetensors is about to write, until the hold is released."""

    def telling(plain: Any) -> Any:
        def storage_ptr(tensor: torch.Tensor) -> int:
            tell(tensor)
            return plain(tensor)

        return storage_ptr

    return hold(safetensors_storage_patch, [Place(import_module("safetensors.torch"), "storage_ptr", telling)])


@while_split(
    name="memory that safetensors writes",
    replaces="safetensors.torch.storage_ptr",
    why="DTensors have no storage of their own; the error must say how to save a sharded model",
    without="safetensors fails on a sharded model with its own error",
)
def safetensors_storage_patch() -> bool:
    """Return whether both ways to write tensors read their memory before anything else."""
    theirs, seen = import_module("safetensors.torch"), []

    def tell(tensor: torch.Tensor) -> None:
        seen.append(tensor.shape)
        raise ValueError("told")

    with apart(), told_of_stored(tell):
        for save, argument in ((theirs.save_model, torch.nn.Linear(2, 2)), (theirs.save_file, {"one": torch.ones(2)})):
            try:
                save(argument, "nowhere/at/all")
            except ValueError as error:
                seen.append(str(error))
    return seen == [torch.Size([2, 2]), "told", torch.Size([2]), "told"]


# `torch.autograd.grad(loss, model.parameters())` and `loss.backward(inputs=…)` by parameters that FSDP2 shards, and
# graphs of gradients (`create_graph=True`) through its units.
#
# The graph holds what FSDP2 gathered, not the parameters: torch finds them unused, and `backward` says nothing. And a
# backward frees what was gathered, so that a second one reads memory that is gone.


def told_of_inputs(tell: Callable[[list[Any], list[Any]], None]) -> Hold:
    """Call `tell`, which may raise, with the tensors that gradients are asked for by name, and with the outputs if a
    graph of the gradients is wanted, until the hold is released."""

    def listed(tensors: Any) -> list[Any]:
        return [] if tensors is None else [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)

    def telling(plain: Any) -> Any:
        signature = inspect.signature(plain)

        @functools.wraps(plain)
        def gradients(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                arguments = signature.bind(*args, **kwargs).arguments
                outputs = arguments.get("outputs", arguments.get("tensors")) if arguments.get("create_graph") else None
                tell(listed(arguments.get("inputs")), listed(outputs))
            return plain(*args, **kwargs)

        return gradients

    return hold(gradient_inputs_patch, [Place(torch.autograd, name, telling) for name in ("grad", "backward")])


@patch(
    name="inputs of gradients",
    replaces="torch.autograd.grad and torch.autograd.backward",
    why="parameters that FSDP2 shards are in no graph: no gradient would reach them, and backward says nothing",
    scope="while a model in FSDP2 units is alive",
    undone="torch's own are restored when the last such model is collected",
    without="gradients asked for by parameters of FSDP2 units are missing",
    where="autoplan/execute/data_parallel/lost.py",
)
def gradient_inputs_patch() -> bool:
    """Return whether all three ways to name inputs lead here."""
    x = torch.ones(2, requires_grad=True)
    seen: list[tuple[list[Any], list[Any]]] = []
    with apart(), told_of_inputs(lambda *told: seen.append(told)):
        torch.autograd.grad((2 * x).sum(), x)
        (2 * x).sum().backward(inputs=[x])
        torch.autograd.backward((x * x).sum(), create_graph=True)
    x.grad = None  # of a graph that holds itself
    return [(len(inputs), len(outputs)) for inputs, outputs in seen] == [(1, 0), (1, 0), (0, 1)] and seen[1][0][0] is x
