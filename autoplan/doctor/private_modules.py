"""The undocumented parts of torch's modules, parameters and checkpointed blocks in use, with a canary each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn

from autoplan.doctor.examine import Private, Table

MODULES = Table()


@MODULES.hold(
    "a head with backward hooks must return full logits",
    "torch.nn.Module._backward_hooks",
    "torch.nn.Module._backward_pre_hooks",
    "torch.nn.modules.module._global_backward_hooks",
    "torch.nn.modules.module._global_backward_pre_hooks",
)
def _hooks_of_backward() -> bool:
    module, calls = nn.Identity(), import_module("torch.nn.modules.module")
    of_all = (calls._global_backward_hooks, calls._global_backward_pre_hooks)
    before = bool(module._backward_hooks or module._backward_pre_hooks or any(of_all))
    handles = [module.register_full_backward_hook(print), module.register_full_backward_pre_hook(print)]
    handles += [calls.register_module_full_backward_hook(print), calls.register_module_full_backward_pre_hook(print)]
    registered = bool(module._backward_hooks and module._backward_pre_hooks and all(of_all))
    for handle in handles:
        handle.remove()
    return registered and not before


@MODULES.hold("what a load returns, as torch does", "torch.nn.modules.module._IncompatibleKeys")
def _incompatible() -> bool:
    from torch.nn.modules.module import _IncompatibleKeys

    return tuple(_IncompatibleKeys(["a"], ["b"])) == (["a"], ["b"])


@MODULES.hold(
    "FSDP2's state of a module is removed if fully_shard fails halfway",
    "torch.distributed._composable_state._module_state_mapping",
)
def _states() -> bool:
    from torch.distributed import _composable_state as states

    module, state = nn.Identity(), states._State()
    states._insert_module_state(module, state)
    inserted = states._get_module_state(module) is state
    states._module_state_mapping.pop(module, None)
    return inserted and states._get_module_state(module) is None


@MODULES.hold(
    "a checkpointed block reruns its hooks, and those of neighbouring dictionaries",
    "torch.nn.Module._forward_hooks",
    "torch.nn.Module._forward_pre_hooks",
)
def _hooks() -> bool:
    """Return whether a module's hooks are in these dictionaries, under one number each."""
    module = nn.Identity()
    before = module.register_forward_pre_hook(lambda *_: None, with_kwargs=True).id
    after = module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True).id
    pre, post = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs), module._forward_hooks
    flags = (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)
    return all(before in hooks for hooks in pre) and after in post and all(after in flag for flag in flags)


@MODULES.hold("a block that converts itself in its forward must keep its DTensors", "torch.nn.Module._apply")
def _converted() -> bool:
    """Return whether `module.to` calls `_apply` of each module, which may be an instance attribute."""
    module, seen = nn.Linear(1, 1), []
    module.__dict__["_apply"] = lambda function, *rest: seen.append(function(module.weight).dtype)
    module.to(torch.float64)
    return seen == [torch.float64]


@MODULES.hold(
    "recurrent layers compute with a list of their weights",
    "torch.nn.RNNBase._flat_weights",
    "torch.nn.RNNBase._flat_weights_names",
)
def _flat() -> bool:
    lstm = nn.LSTM(1, 1)
    weights = [lstm._parameters[name] for name in lstm._flat_weights_names]
    return all(a is b for a, b in zip(weights, lstm._flat_weights, strict=True)) and callable(lstm._update_flat_weights)


@MODULES.hold(
    "the few recorded blocks are found by their original indices", "torch.nn.ModuleList._get_abs_string_index"
)
def _places_of_blocks() -> bool:
    """Return whether a module list looks up its own `_get_abs_string_index` for a number."""
    blocks = nn.ModuleList([nn.Identity(), nn.Linear(1, 1)])
    vars(blocks)["_get_abs_string_index"] = lambda index: "1"
    return blocks[0] is blocks._modules["1"]


@MODULES.hold("torch.compile adds a name level that checkpoints do not have", "torch._dynamo.OptimizedModule._orig_mod")
def _compiled_name() -> bool:
    linear = nn.Linear(1, 1)
    return torch.compile(linear)._orig_mod is linear


@MODULES.hold(
    "tensors saved by a checkpointed block are copied before they are changed in place",
    "torch.utils.checkpoint._VersionWrapper",
)
def _kept_of_ops() -> bool:
    """Return whether the first run keeps results in a readable storage, each with its version."""
    context = torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
    first: Any = context[0]
    with first:
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    of_mm = first.storage[torch.ops.aten.mm.default]
    (saved,) = of_mm.values() if isinstance(of_mm, dict) else of_mm
    saved.val, saved.version = torch.zeros(2, 2), 0
    with context[1]:
        again = torch.ones(2, 2) @ torch.ones(2, 2)
    return bool(product.all()) and not again.any()


@MODULES.hold(
    "checkpoint_wrapper adds a name level that checkpoints do not have",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper._checkpoint_wrapped_module",
)
def _checkpointed_name() -> bool:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    linear = nn.Linear(1, 1)
    return checkpoint_wrapper(linear)._checkpoint_wrapped_module is linear


def _state_of_module(name: str, kind: type) -> Callable[[], bool]:
    return lambda: isinstance(vars(nn.BatchNorm1d(1))[name], kind)


@MODULES.hold(
    "a DTensor becomes a module's parameter without going through DTensor's dispatcher", "torch.nn.Parameter._is_param"
)
def _marked_as_parameters() -> bool:
    """Return whether the mark makes a tensor of another class a parameter."""

    class Own(torch.Tensor):
        pass

    tensor: Any = torch.ones(1).as_subclass(Own)
    tensor._is_param = True
    return isinstance(tensor, torch.nn.Parameter)


@MODULES.hold("the path guard skips modules that run compiled", "torch.nn.Module._compiled_call_impl")
def _compiles_its_call() -> bool:
    module = nn.Identity()
    before = module._compiled_call_impl
    module.compile(backend="eager")
    return before is None and module._compiled_call_impl is not None


_PARAMETRIZED = "a parametrized module is sent to another process"
MODULES.there(
    {
        "torch.nn.utils.parametrize._inject_new_class(module)": _PARAMETRIZED,
        "torch.nn.utils.parametrize._inject_property(module, tensor_name)": _PARAMETRIZED,
    }
)
MODULES.extend(
    Private(f"torch.nn.Module.{name}", why, _state_of_module(name, kind))
    for name, kind, why in (
        ("_parameters", dict, "parameters are replaced in torch's own dict"),
        ("_buffers", dict, "buffers are replaced in torch's own dict"),
        ("_modules", dict, "blocks are left out of the copy that is recorded"),
        ("_non_persistent_buffers_set", set, "buffers that are not in checkpoints"),
        ("_load_state_dict_post_hooks", dict, "FSDP2 re-examines its parameters after load_weights"),
        ("_load_state_dict_pre_hooks", dict, "FSDP2 frees gathered parameters before a load reads them"),
    )
)
MODULES += [
    Private(
        "torch.nn.Module._call_impl",
        "the path guard reads a module's call arguments there",
        lambda: torch.nn.Module._call_impl.__code__.co_filename == inspect.getfile(torch.nn.Module),
    ),
]
