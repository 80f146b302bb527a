"""The undocumented parts of torch's modules, parameters and checkpointed blocks that are used, with a canary each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn

from autoplan.doctor.private import Private


def _hooks_of_backward() -> bool:
    module, calls = nn.Identity(), import_module("torch.nn.modules.module")
    of_all = (calls._global_backward_hooks, calls._global_backward_pre_hooks)
    before = bool(module._backward_hooks or module._backward_pre_hooks or any(of_all))
    handles = [module.register_full_backward_hook(print), module.register_full_backward_pre_hook(print)]
    handles += [calls.register_module_full_backward_hook(print), calls.register_module_full_backward_pre_hook(print)]
    known = bool(module._backward_hooks and module._backward_pre_hooks and all(of_all))
    for handle in handles:
        handle.remove()
    return known and not before


def _incompatible() -> bool:
    from torch.nn.modules.module import _IncompatibleKeys

    return tuple(_IncompatibleKeys(["a"], ["b"])) == (["a"], ["b"])


def _states() -> bool:
    from torch.distributed._composable_state import (
        _get_module_state,
        _insert_module_state,
        _module_state_mapping,
        _State,
    )

    module, state = nn.Identity(), _State()
    _insert_module_state(module, state)
    found = _get_module_state(module) is state
    _module_state_mapping.pop(module, None)
    return found and _get_module_state(module) is None


def _parametrized() -> bool:
    from torch.nn.utils import parametrize

    return [
        list(inspect.signature(one).parameters) for one in (parametrize._inject_new_class, parametrize._inject_property)
    ] == [["module"], ["module", "tensor_name"]]


def _hooks() -> bool:
    """Hooks of a module's call stand in these dictionaries, by one number each."""
    module = nn.Identity()
    before = module.register_forward_pre_hook(lambda *_: None, with_kwargs=True).id
    after = module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True).id
    pre, post = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs), module._forward_hooks
    flags = (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)
    return all(before in found for found in pre) and after in post and all(after in flag for flag in flags)


def _converted() -> bool:
    """`module.to` goes through `_apply` of each module, which may be an attribute of its own."""
    module, seen = nn.Linear(1, 1), []
    module.__dict__["_apply"] = lambda function, *rest: seen.append(function(module.weight).dtype)
    module.to(torch.float64)
    return seen == [torch.float64]


def _flat() -> bool:
    lstm = nn.LSTM(1, 1)
    held = [lstm._parameters[name] for name in lstm._flat_weights_names]
    return all(a is b for a, b in zip(held, lstm._flat_weights, strict=True)) and callable(lstm._update_flat_weights)


def _places_of_blocks() -> bool:
    """A list of modules looks its own `_get_abs_string_index` up for a number."""
    blocks = nn.ModuleList([nn.Identity(), nn.Linear(1, 1)])
    vars(blocks)["_get_abs_string_index"] = lambda index: "1"
    return blocks[0] is blocks._modules["1"]


def _compiled_name() -> bool:
    linear = nn.Linear(1, 1)
    return torch.compile(linear)._orig_mod is linear


def _kept_of_ops() -> bool:
    """Does the first run keep results in a storage that can be looked through, each with its version?"""
    context = torch.utils.checkpoint.create_selective_checkpoint_contexts([torch.ops.aten.mm.default])
    first: Any = context[0]
    with first:
        made = torch.ones(2, 2) @ torch.ones(2, 2)
    of_mm = first.storage[torch.ops.aten.mm.default]
    (kept,) = of_mm.values() if isinstance(of_mm, dict) else of_mm
    kept.val, kept.version = torch.zeros(2, 2), 0
    with context[1]:
        again = torch.ones(2, 2) @ torch.ones(2, 2)
    return bool(made.all()) and not again.any()


def _checkpointed_name() -> bool:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    linear = nn.Linear(1, 1)
    return checkpoint_wrapper(linear)._checkpoint_wrapped_module is linear


def _state_of_module(name: str, kind: type = dict) -> Callable[[], bool]:
    return lambda: isinstance(vars(nn.BatchNorm1d(1))[name], kind)


def _marked_as_parameters() -> bool:
    """Does the mark make a tensor of another class a parameter?"""

    class Own(torch.Tensor):
        pass

    made: Any = torch.ones(1).as_subclass(Own)
    made._is_param = True
    return isinstance(made, torch.nn.Parameter)


def _compiles_its_call() -> bool:
    module = nn.Identity()
    before = module._compiled_call_impl
    module.compile(backend="eager")
    return before is None and module._compiled_call_impl is not None


MODULES = (
    Private(
        "torch.nn.modules.dropout._DropoutNd",
        "all dropout modules",
        lambda: isinstance(nn.Dropout2d(), torch.nn.modules.dropout._DropoutNd),
    ),
    Private(
        "torch.nn.modules.conv._ConvNd",
        "all convolutions",
        lambda: isinstance(nn.Conv1d(1, 1, 1), torch.nn.modules.conv._ConvNd),
    ),
    Private(
        "torch.nn.modules.module._IncompatibleKeys",
        "FSDP2's hook after a load is called as torch calls it",
        _incompatible,
    ),
    Private(
        "torch.distributed._composable_state._module_state_mapping",
        "what FSDP2 notes about a module is forgotten when it fails half way",
        _states,
    ),
    Private(
        "torch.nn.utils.parametrize._inject_new_class",
        "a parametrized module is sent to another process",
        _parametrized,
    ),
    Private(
        "torch.nn.utils.parametrize._inject_property", "a parametrized module is sent to another process", _parametrized
    ),
    Private(
        "torch.nn.Parameter._is_param",
        "a DTensor is made a parameter of a module without a step through DTensor's dispatcher",
        _marked_as_parameters,
    ),
    Private(
        "torch.nn.Module._backward_hooks",
        "a head whose backward someone listens to gives whole logits",
        _hooks_of_backward,
    ),
    Private(
        "torch.nn.Module._backward_pre_hooks",
        "a head whose backward someone listens to gives whole logits",
        _hooks_of_backward,
    ),
    Private(
        "torch.nn.modules.module._global_backward_hooks",
        "a head whose backward someone listens to gives whole logits",
        _hooks_of_backward,
    ),
    Private(
        "torch.nn.modules.module._global_backward_pre_hooks",
        "a head whose backward someone listens to gives whole logits",
        _hooks_of_backward,
    ),
    Private(
        "torch.utils.checkpoint._VersionWrapper",
        "what a checkpointed block keeps of its ops is copied before one changes it in place",
        _kept_of_ops,
    ),
    Private(
        "torch.nn.Module._parameters",
        "parameters are replaced where torch itself keeps them",
        _state_of_module("_parameters"),
    ),
    Private(
        "torch.nn.Module._buffers", "buffers are replaced where torch itself keeps them", _state_of_module("_buffers")
    ),
    Private("torch.nn.Module._modules", "blocks are left out of a copy that is recorded", _state_of_module("_modules")),
    Private(
        "torch.nn.Module._non_persistent_buffers_set",
        "buffers that no checkpoint holds",
        _state_of_module("_non_persistent_buffers_set", set),
    ),
    Private(
        "torch.nn.Module._load_state_dict_post_hooks",
        "FSDP2 looks at its parameters again after a load of ours",
        _state_of_module("_load_state_dict_post_hooks"),
    ),
    Private(
        "torch.nn.Module._load_state_dict_pre_hooks",
        "hooks that cannot be sent to another process are left out",
        _state_of_module("_load_state_dict_pre_hooks"),
    ),
    Private(
        "torch.nn.Module._forward_pre_hooks",
        "hooks are stored in the order in which they run, which compiled code of torch 2.11 relies on",
        _hooks,
    ),
    Private(
        "torch.nn.Module._forward_hooks",
        "a checkpointed block runs its hooks again too, and so for the dictionaries next to it",
        _hooks,
    ),
    Private(
        "torch.nn.Module._call_impl",
        "the path guard sees there what a module is called with",
        lambda: torch.nn.Module._call_impl.__code__.co_filename == inspect.getfile(torch.nn.Module),
    ),
    Private(
        "torch.nn.Module._compiled_call_impl",
        "the path guard does not look at modules that run compiled",
        _compiles_its_call,
    ),
    Private("torch.nn.Module._apply", "a block that converts itself in its forward must keep its DTensors", _converted),
    Private(
        "torch.nn.ModuleList._get_abs_string_index",
        "of many equal blocks few are recorded, found by their old numbers",
        _places_of_blocks,
    ),
    Private("torch.nn.RNNBase._flat_weights", "recurrent layers compute with a list of their weights", _flat),
    Private("torch.nn.RNNBase._flat_weights_names", "recurrent layers compute with a list of their weights", _flat),
    Private(
        "torch._dynamo.OptimizedModule._orig_mod",
        "torch.compile puts a level in between that stands in no checkpoint's names",
        _compiled_name,
    ),
    Private(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper._checkpoint_wrapped_module",
        "checkpoint_wrapper puts a level in between that stands in no checkpoint's names",
        _checkpointed_name,
    ),
)
