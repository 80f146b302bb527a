"""Undocumented parts of torch that autoplan uses, each with a reason and a canary that notices a change."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import torch._dynamo
import torch.utils.checkpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from autoplan.doctor.examine import Private, Table
from autoplan.patches.classes import unscripted_patch

TORCH = Table()


class _Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class _Own(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("the subclass was asked")


@TORCH.hold("autoplan's hooks must not be seen by a function mode", "torch._C.DisableTorchFunction")
def _no_functions() -> bool:
    with _Counting() as mode, torch._C.DisableTorchFunction():
        torch.ones(1) + torch.ones(1)
    return mode.calls == 0


@TORCH.hold("code inside sharded logits must see plain tensors", "torch._C.DisableTorchFunctionSubclass")
def _no_subclasses() -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return (torch.ones(2).as_subclass(_Own) + 1).sum().item() == 4.0


@TORCH.hold(
    "inside a compiled checkpointed block, autoplan's hooks record state outside it and undo that",
    "torch._dynamo.utils._disable_side_effect_safety_checks_for_current_subtracer",
)
def _unwatched() -> bool:
    """Return whether a checkpointed function compiles without a graph break though it changes an outside list."""
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


@TORCH.hold("parameters are read at every step; avoids overhead", "torch._C._is_torch_function_mode_enabled")
def _mode_enabled() -> bool:
    before = torch._C._is_torch_function_mode_enabled()
    with _Counting():
        return bool(torch._C._is_torch_function_mode_enabled()) and not before


@TORCH.hold(
    "an autograd Function is called at every step; avoids overhead", "torch._C._are_functorch_transforms_active"
)
def _no_transforms() -> bool:
    """Return whether torch.func transforms are seen, and a Function can be called as its parent class does."""

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


@TORCH.hold("a collective records nothing, and need not check whether it should", "torch._C._AutoDispatchBelowAutograd")
def _below_autograd() -> bool:
    x = torch.ones(1, requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd():
        result = x.sin()
    return result.grad_fn is None and not result.requires_grad


@TORCH.hold(
    "a block recomputed in backward runs in the modes of its forward",
    "torch.overrides._get_current_function_mode_stack",
)
def _mode_stack() -> bool:
    from torch.overrides import _get_current_function_mode_stack as stack

    before = len(stack())
    with _Counting() as mode:
        return len(stack()) == before + 1 and stack()[-1] is mode


@TORCH.hold(
    "whether this is backward: sums of parallel branches are joined there, and checkpointed blocks run again",
    "torch._C._current_graph_task_id",
)
def _graph_task() -> bool:
    seen: list[int] = []
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: seen.append(torch._C._current_graph_task_id()))
    (2 * x).backward()
    return torch._C._current_graph_task_id() == -1 and seen[0] >= 0


@TORCH.hold("a sharded model inside forward-mode AD is refused", "torch.autograd.forward_ad._current_level")
def _forward_level() -> bool:
    levels = import_module("torch.autograd.forward_ad")
    before: int = levels._current_level
    with levels.dual_level():
        return before == -1 and bool(levels._current_level == 0)


@TORCH.hold(
    "calls inside of vmap are recorded by the tensors that it wraps, and collectives run on these",
    "torch._C._functorch",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "_add_batch_dim",
)
def _functorch() -> bool:
    functorch: Any = torch._C._functorch
    clear = import_module("torch._functorch.pyfunctorch").temporarily_clear_interpreter_stack
    x, seen = torch.arange(6.0).view(2, 3), []

    def look(row: torch.Tensor) -> torch.Tensor:
        level, dim = functorch.maybe_get_level(row), functorch.maybe_get_bdim(row)
        inside = functorch.get_unwrapped(row)
        seen.append(inside is x and functorch.is_batchedtensor(row) and functorch.is_functorch_wrapped_tensor(row))
        with clear():
            doubled = 2 * inside
        return functorch._add_batch_dim(doubled, dim, level)

    doubled = torch.vmap(look, in_dims=1)(x)
    return seen == [True] and bool((doubled == 2 * x.T).all()) and not functorch.is_functorch_wrapped_tensor(x)


@TORCH.hold("targets are checked without synchronising the device", "torch._assert_async")
def _asserted() -> bool:
    torch._assert_async(torch.tensor(True), "said")
    try:
        torch._assert_async(torch.tensor(False), "said")
    except RuntimeError:
        return True
    return False


@TORCH.hold("collectives by group name, which torch.compile can trace", "torch.ops._c10d_functional")
def _named_collectives() -> bool:
    ops = torch.ops._c10d_functional
    wanted = {
        "all_reduce": ["input", "reduce_op", "group_name"],
        "all_gather_into_tensor": ["input", "group_size", "group_name"],
        "reduce_scatter_tensor": ["input", "reduce_op", "group_size", "group_name"],
        "wait_tensor": ["tensor"],
    }
    return all([a.name for a in getattr(ops, name).default._schema.arguments] == args for name, args in wanted.items())


@TORCH.hold(
    "a parameter with hooks, which would be lost, is refused",
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
)
def _gradient_hooks() -> bool:
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    empty = not a._backward_hooks and not a._post_accumulate_grad_hooks
    a.register_hook(lambda gradient: None)
    b.register_post_accumulate_grad_hook(lambda parameter: None)
    return empty and bool(a._backward_hooks) and bool(b._post_accumulate_grad_hooks)


@TORCH.hold("an in-place change of a cache is detected", "torch.Tensor._version")
def _version() -> bool:
    x = torch.ones(1)
    before = x._version
    x.add_(1)
    return before != x._version


@TORCH.hold("a view of a weight is recognised by its owner", "torch.Tensor._base")
def _base_of_views() -> bool:
    whole = torch.ones(2, 2)
    return whole[0]._base is whole and whole._base is None


@TORCH.hold(
    "a parameter's memory layout, for its gradient to match; DTensors are built from it and the local tensor",
    "torch.distributed.tensor.DTensor._spec",
)
def _made_of_a_spec() -> bool:
    """Return whether DTensor has a spec. Tests with gradients cover the constructor, which has no signature."""
    return "_spec" in DTensor.__slots__ or "_spec" in DTensor.__annotations__


@TORCH.hold(
    "DTensor asks its Python methods about plain tensors beside it, in this thread",
    "torch._C._get_dtensor_allow_implicit_replication",
    "torch._C._set_dtensor_allow_implicit_replication",
)
def _plain_beside() -> bool:
    before = torch._C._get_dtensor_allow_implicit_replication()
    torch._C._set_dtensor_allow_implicit_replication(True)
    inside = torch._C._get_dtensor_allow_implicit_replication()
    torch._C._set_dtensor_allow_implicit_replication(before)
    return bool(inside) and torch._C._get_dtensor_allow_implicit_replication() == before


@TORCH.hold("whether torch's loss parallelism is active", "torch.distributed.tensor.DTensor._op_dispatcher")
def _knows_loss_parallel() -> bool:
    """Return whether its handlers are listed there while it is active."""
    from torch.distributed.tensor.parallel import loss_parallel

    handlers = DTensor._op_dispatcher._custom_op_handlers
    name = torch.ops.aten.nll_loss_forward.default
    before = name in handlers
    with loss_parallel():
        return not before and name in handlers


TORCH += [
    Private(
        "torch.jit.ScriptFunction._torchdynamo_inline",
        "a TorchScript function is read as the Python function that it was compiled from",
        unscripted_patch.canary,
    ),
    Private(
        "torch._dynamo.config.nontraceable_tensor_subclasses",
        "sharded logits passed in after a graph break are handled eagerly",
        lambda: isinstance(torch._dynamo.config.nontraceable_tensor_subclasses, set),
    ),
    Private(
        "torch._ops.OpOverload._schema",
        "an op's name, and whether it mutates a tensor",
        lambda: (
            torch.ops.aten.add_.Tensor._schema.is_mutable and torch.ops.aten.add_.Tensor._schema.name == "aten::add_"
        ),
    ),
    Private(
        "torch.distributed.tensor.DTensor._local_tensor",
        "the local tensor, without an autograd node",
        lambda: "_local_tensor" in DTensor.__slots__ or "_local_tensor" in DTensor.__annotations__,
    ),
    Private(
        "torch.Tensor._is_view",
        "a result that is a view is copied before others may change it",
        lambda: torch.ones(2)[:1]._is_view() and not torch.ones(1)._is_view(),
    ),
    Private(
        "torch.ops.aten._local_scalar_dense",
        "Python reads a number from a tensor through it",
        lambda: torch.ops.aten._local_scalar_dense(torch.ones(())) == 1,
    ),
    Private(
        "torch.ops.aten._is_any_true",
        "torch looks for NaN in gradients with it, and DTensor has no rule for it",
        lambda: bool(torch.ops.aten._is_any_true.default(torch.tensor([True, False]))),
    ),
    Private(
        "torch.ops.aten._has_same_storage_numel",
        "forward-mode AD reads a parameter's memory layout with it, and DTensor has no rule for it",
        lambda: torch.ops.aten._has_same_storage_numel.default(torch.ones(2), torch.ones(2)),
    ),
    Private(
        "torch.ops.aten._new_zeros_with_same_feature_meta",
        "forward-mode AD makes zeros with it, and DTensor has no rule for it",
        lambda: not torch.ops.aten._new_zeros_with_same_feature_meta.default(torch.ones(2), torch.ones(2)).any(),
    ),
]
_COMPILED = "compiled losses dispatch to the class of sharded logits"
TORCH.there(
    {
        "torch._dynamo.variables.LambdaVariable:call_function(self, tx, args, kwargs)": _COMPILED,
        "torch._dynamo.variables.base.VariableTracker:build(tx, value, …)": _COMPILED,
        "torch._dynamo.variables.torch_function.can_dispatch_torch_function(tx, args, kwargs)": _COMPILED,
        "torch._dynamo.variables.user_defined.UserDefinedClassVariable": _COMPILED,
        "torch.distributed.tensor.placement_types._StridedShard": "marks a weight sharded in interleaved pieces",
        "torch.distributed._state_dict_utils": "full tensors of parameters with replicated rows must stay full",
        "torch.distributed._state_dict_utils._distribute_tensors": "it shards full tensors for parameters",
        "torch.distributed._state_dict_utils._broadcast_tensors": "its caller",
        "torch.distributed.device_mesh.DeviceMesh._flatten": "FSDP2 shards over dp and cp ranks as over one dim",
        "torch.distributed.device_mesh.DeviceMesh._concatenate": "replicas before that dim need a 2-d mesh",
    }
)
