"""The undocumented parts of torch that autoplan uses, each with why, and with a canary that notices when it changes.

Those that belong to simulated ranks and to fake tensors are in files of their own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from autoplan.doctor.private import Private

__all__ = ["TORCH"]


class _Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class _Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("the subclass was asked")


def _no_functions() -> bool:
    with _Counting() as mode, torch._C.DisableTorchFunction():
        torch.ones(1) + torch.ones(1)
    return mode.calls == 0


def _no_subclasses() -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return (torch.ones(2).as_subclass(_Own) + 1).sum().item() == 4.0


def _unwatched() -> bool:
    """A checkpointed function is compiled whole, though what it calls so changes a list that lies outside."""
    notes: list[int] = []
    quiet = torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer

    def block(x: torch.Tensor) -> torch.Tensor:
        quiet(notes.append, 1)
        result = x.sin()
        quiet(notes.pop)
        return result

    def run(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

    return bool(torch.compile(run, backend="eager", fullgraph=True)(torch.zeros(2, requires_grad=True)).sum() == 0)


def _mode_enabled() -> bool:
    before = torch._C._is_torch_function_mode_enabled()
    with _Counting():
        return bool(torch._C._is_torch_function_mode_enabled()) and not before


def _no_transforms() -> bool:
    """The transforms of torch.func are seen, and without them a Function is called as its parent class calls it."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return 2 * gradient

    seen: list[bool] = []
    active = torch._C._are_functorch_transforms_active

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(active())
        return x

    torch.func.vmap(look)(torch.ones(2))
    x = torch.ones(1, requires_grad=True)
    called: Any = super(torch.autograd.Function, Twice)
    called.apply(x).backward()
    return seen == [True] and not active() and x.grad is not None and x.grad.item() == 2.0


def _below_autograd() -> bool:
    x = torch.ones(1, requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd():
        made = x.sin()
    return made.grad_fn is None and not made.requires_grad


def _scripted() -> bool:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    return bool(torch.jit.script(twice)._torchdynamo_inline is twice)


def _mode_stack() -> bool:
    from torch.overrides import _get_current_function_mode_stack as stack

    before = len(stack())
    with _Counting() as mode:
        return len(stack()) == before + 1 and stack()[-1] is mode


def _graph_task() -> bool:
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(torch._C._current_graph_task_id()))
    (2 * x).backward()
    return torch._C._current_graph_task_id() == -1 and seen[0] >= 0


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


def _tracked() -> bool:
    variables = import_module("torch._dynamo.variables")
    asked = list(inspect.signature(variables.torch_function.can_dispatch_torch_function).parameters)
    made = list(inspect.signature(variables.base.VariableTracker.build).parameters)
    called = list(inspect.signature(variables.LambdaVariable.call_function).parameters)
    return asked == ["tx", "args", "kwargs"] and made[:2] == ["tx", "value"] and called[1:] == ["tx", "args", "kwargs"]


def _forward_level() -> bool:
    levels = import_module("torch.autograd.forward_ad")
    before: int = levels._current_level
    with levels.dual_level():
        return before == -1 and bool(levels._current_level == 0)


def _functorch() -> bool:
    asked = torch._C._functorch.is_functorch_wrapped_tensor
    seen: list[bool] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(asked(x))
        return x

    torch.vmap(look)(torch.ones(2))
    return seen == [True] and not asked(torch.ones(1))


def _strides() -> bool:
    from torch._prims_common import make_contiguous_strides_for

    return tuple(make_contiguous_strides_for([2, 3, 4])) == torch.empty(2, 3, 4).stride()


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
    ] == [
        ["module"],
        ["module", "tensor_name"],
    ]


def _asserted() -> bool:
    torch._assert_async(torch.tensor(True), "said")
    try:
        torch._assert_async(torch.tensor(False), "said")
    except RuntimeError:
        return True
    return False


def _named_collectives() -> bool:
    ops = torch.ops._c10d_functional
    wanted = {
        "all_reduce": ["input", "reduce_op", "group_name"],
        "all_gather_into_tensor": ["input", "group_size", "group_name"],
        "reduce_scatter_tensor": ["input", "reduce_op", "group_size", "group_name"],
        "wait_tensor": ["tensor"],
    }
    return all([a.name for a in getattr(ops, name).default._schema.arguments] == args for name, args in wanted.items())


def _hooks() -> bool:
    """Hooks of a module's call stand in these dictionaries, by one number each."""
    module = nn.Identity()
    before = module.register_forward_pre_hook(lambda *_: None, with_kwargs=True).id
    after = module.register_forward_hook(lambda *_: None, with_kwargs=True, always_call=True).id
    pre, post = (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs), module._forward_hooks
    flags = (module._forward_hooks_with_kwargs, module._forward_hooks_always_called)
    return all(before in found for found in pre) and after in post and all(after in found for found in flags)


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


def _gradient_hooks() -> bool:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    empty = not a._backward_hooks and not a._post_accumulate_grad_hooks
    a.register_hook(lambda gradient: None)
    b.register_post_accumulate_grad_hook(lambda parameter: None)
    return empty and bool(a._backward_hooks) and bool(b._post_accumulate_grad_hooks)


def _version() -> bool:
    x = torch.ones(1)
    before = x._version
    x.add_(1)
    return before != x._version


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


def _base_of_views() -> bool:
    whole = torch.ones(2, 2)
    return whole[0]._base is whole and whole._base is None


def _marked_as_parameters() -> bool:
    """Does the mark make a tensor of another class a parameter?"""

    class Own(torch.Tensor):
        pass

    made: Any = torch.ones(1).as_subclass(Own)
    made._is_param = True
    return isinstance(made, torch.nn.Parameter)


def _made_of_a_spec() -> bool:
    """That DTensors are made so is run by every test with a gradient; their constructor has no signature to read."""
    return "_spec" in DTensor.__slots__ or "_spec" in DTensor.__annotations__


def _backward_class() -> bool:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return gradients[0] * 2

    node = Twice.apply(torch.ones(1, requires_grad=True)).grad_fn
    return isinstance(node, Twice._backward_cls)


def _knows_loss_parallel() -> bool:
    """While it is in force, what it does is listed there."""
    from torch.distributed.tensor.parallel import loss_parallel

    known = DTensor._op_dispatcher._custom_op_handlers
    name = torch.ops.aten.nll_loss_forward.default
    before = name in known
    with loss_parallel():
        return not before and name in known


TORCH = (
    Private("torch.Tensor._base", "a view of a weight is told from the weight's owner", _base_of_views),
    Private(
        "torch.autograd.Function._backward_cls", "a move of ours is found again in the autograd graph", _backward_class
    ),
    Private(
        "torch._C.DisableTorchFunction", "hooks of ours are not calls of the model's that a mode counts", _no_functions
    ),
    Private(
        "torch._C.DisableTorchFunctionSubclass", "inside split logits, ops of ours see plain tensors", _no_subclasses
    ),
    Private(
        "torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer",
        "hooks of ours take notes outside a checkpointed block that is compiled, and take them back",
        _unwatched,
    ),
    Private(
        "torch._dynamo.config.nontraceable_tensor_subclasses",
        "split logits that a broken graph was given are worked on as they are",
        lambda: isinstance(torch._dynamo.config.nontraceable_tensor_subclasses, set),
    ),
    Private(
        "torch.jit.ScriptFunction._torchdynamo_inline",
        "a TorchScript function is read as the Python function that it was made of",
        _scripted,
    ),
    Private(
        "torch._C._is_torch_function_mode_enabled",
        "parameters are read at every step: no more work than needed",
        _mode_enabled,
    ),
    Private(
        "torch._C._are_functorch_transforms_active",
        "a Function of ours is called at every step: no more work than needed",
        _no_transforms,
    ),
    Private(
        "torch._C._AutoDispatchBelowAutograd",
        "a collective records nothing, and does not ask whether it should",
        _below_autograd,
    ),
    Private(
        "torch.overrides._get_current_function_mode_stack",
        "a block that runs again in backward runs in the modes of its forward",
        _mode_stack,
    ),
    Private(
        "torch._C._current_graph_task_id",
        "is this backward? sums of parallel branches are joined there, and what is checkpointed runs again",
        _graph_task,
    ),
    Private(
        "torch._C._functorch.is_functorch_wrapped_tensor",
        "a tensor inside vmap has no values to write down",
        _functorch,
    ),
    Private(
        "torch._prims_common.make_contiguous_strides_for",
        "strides of a DTensor whose pieces are in memory only",
        _strides,
    ),
    Private(
        "torch._ops.OpOverload",
        "an op is told from a function",
        lambda: isinstance(torch.ops.aten.add.Tensor, torch._ops.OpOverload),
    ),
    Private(
        "torch._ops.OpOverload._schema",
        "an op's name, and whether it changes a tensor in place",
        lambda: (
            torch.ops.aten.add_.Tensor._schema.is_mutable and torch.ops.aten.add_.Tensor._schema.name == "aten::add_"
        ),
    ),
    Private(
        "torch._ops.OpOverload._opname",
        "an op's name without its namespace",
        lambda: torch.ops.aten.add.Tensor._opname == "add",
    ),
    Private(
        "torch.ops._c10d_functional", "collectives by a group's name, which torch.compile can trace", _named_collectives
    ),
    Private("torch._assert_async", "targets are checked without waiting for the device", _asserted),
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
        "torch.distributed.tensor.placement_types._StridedShard",
        "a weight sharded in interleaved pieces is told by it",
        lambda: hasattr(torch.distributed.tensor.placement_types, "_StridedShard"),
    ),
    Private(
        "torch.distributed.tensor.DTensor._spec",
        "how a parameter lies, for its gradient to lie likewise; DTensors are made of a piece and of that",
        _made_of_a_spec,
    ),
    Private(
        "torch.distributed._state_dict_utils",
        "a whole tensor of a parameter with rows on several ranks is not cut there",
        lambda: callable(import_module("torch.distributed._state_dict_utils")._distribute_tensors),
    ),
    Private(
        "torch.distributed._state_dict_utils._distribute_tensors",
        "it cuts whole tensors for parameters",
        lambda: callable(import_module("torch.distributed._state_dict_utils")._distribute_tensors),
    ),
    Private(
        "torch.distributed._state_dict_utils._broadcast_tensors",
        "what calls it",
        lambda: callable(import_module("torch.distributed._state_dict_utils")._broadcast_tensors),
    ),
    Private(
        "torch.distributed.tensor.DTensor._op_dispatcher",
        "is torch's own loss on split logits in force?",
        _knows_loss_parallel,
    ),
    Private(
        "torch.nn.Parameter._is_param",
        "a DTensor is made a parameter of a module without a step through DTensor's dispatcher",
        _marked_as_parameters,
    ),
    Private(
        "torch.distributed.tensor.DTensor._local_tensor",
        "this rank's piece, without a step of autograd",
        lambda: "_local_tensor" in DTensor.__slots__ or "_local_tensor" in DTensor.__annotations__,
    ),
    Private(
        "torch.Tensor._is_view",
        "a result that is a view is copied before others may change it",
        lambda: torch.ones(2)[:1]._is_view() and not torch.ones(1)._is_view(),
    ),
    Private("torch.Tensor._version", "a cache that was changed in place is noticed", _version),
    Private("torch.Tensor._backward_hooks", "hooks on a parameter would be lost: refused", _gradient_hooks),
    Private("torch.Tensor._post_accumulate_grad_hooks", "hooks on a parameter would be lost: refused", _gradient_hooks),
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
        "torch._C._functorch.peek_interpreter_stack",
        "a sharded model inside of a transform of torch.func is refused",
        lambda: (
            torch.func.vmap(lambda x: x * float(torch._C._functorch.peek_interpreter_stack() is not None))(
                torch.ones(1)
            ).item()
            == 1
            and torch._C._functorch.peek_interpreter_stack() is None
        ),
    ),
    Private(
        "torch.ops.aten._is_any_true",
        "torch looks for NaN in gradients by it, and DTensor does not know it",
        lambda: bool(torch.ops.aten._is_any_true.default(torch.tensor([True, False]))),
    ),
    Private(
        "torch.ops.aten._has_same_storage_numel",
        "a forward derivative asks by it how a parameter lies in memory, and DTensor does not know it",
        lambda: torch.ops.aten._has_same_storage_numel.default(torch.ones(2), torch.ones(2)),
    ),
    Private(
        "torch.ops.aten._new_zeros_with_same_feature_meta",
        "a forward derivative makes zeros by it, and DTensor does not know it",
        lambda: not torch.ops.aten._new_zeros_with_same_feature_meta.default(torch.ones(2), torch.ones(2)).any(),
    ),
    Private(
        "torch.utils.checkpoint._VersionWrapper",
        "what a checkpointed block keeps of its ops is copied before one changes it in place",
        _kept_of_ops,
    ),
    *(
        Private(f"torch._dynamo.variables.{name}", "compiled losses are heard by the class of split logits", _tracked)
        for name in (
            "LambdaVariable",
            "base.VariableTracker",
            "torch_function.can_dispatch_torch_function",
            "user_defined.UserDefinedClassVariable",
        )
    ),
    Private(
        "torch.autograd.forward_ad._current_level",
        "a sharded model inside of a forward derivative is refused",
        _forward_level,
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
        "torch.nn.Module._forward_hooks",
        "a checkpointed block runs its hooks again too, and so for the dictionaries next to it",
        _hooks,
    ),
    Private(
        "torch.nn.Module._call_impl",
        "the path guard sees there what a module is called with",
        lambda: torch.nn.Module._call_impl.__code__.co_filename == inspect.getfile(torch.nn.Module),
    ),
    Private("torch.nn.Module._apply", "a block that converts itself in its forward must keep its DTensors", _converted),
    Private(
        "torch.nn.ModuleList._get_abs_string_index",
        "of many equal blocks few are recorded, found by their old numbers",
        _places_of_blocks,
    ),
    Private(
        "torch.distributed.device_mesh.DeviceMesh._flatten",
        "FSDP2 shards over data and context parallel ranks as over one dim",
        lambda: callable(DeviceMesh._flatten),
    ),
    Private(
        "torch.distributed.device_mesh.DeviceMesh._concatenate",
        "replicas before that dim make a mesh of two",
        lambda: callable(DeviceMesh._concatenate),
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
