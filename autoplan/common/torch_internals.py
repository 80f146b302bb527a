"""The undocumented parts of torch that several files need, each reached here only. Every other one is used in a single
file (`tests/patches/test_canaries.py` holds both to it); `autoplan doctor` tries them all.

A comment says what torch offers in public, and why it is not enough.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

import torch
from torch import nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch._subclasses.fake_tensor import is_fake as is_fake
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes

DisableTorchFunction = torch._C.DisableTorchFunction
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
# torch.distributed._functional_collectives is as private, and waits by a subclass of Tensor
collectives_by_name = torch.ops._c10d_functional
# a plain assert synchronises the device
assert_async = torch._assert_async
outside_of_modes = _disable_current_modes
# torch.func says only to its own functions that one of them runs
transforms_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_functorch: Any = torch._C._functorch
is_wrapped: Callable[[torch.Tensor], bool] = _functorch.is_functorch_wrapped_tensor
function_mode_is_active: Callable[[], bool] = torch._C._is_torch_function_mode_enabled
# the tensor that a view shows; a descriptor, by which a subclass intercepts the question
BASE: Any = torch.Tensor._base

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention
# torch's base classes of these are private
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class DispatchMode(TorchDispatchMode):
    """A mode that sees each op, for runs that torch.compile has no part in: torch wraps the method of other modes in a
    function that keeps the compiler away, which takes as long as most ops of small tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside of one that `torch.vmap` passes around, on which its ops work."""
    while _functorch.is_batchedtensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


def outside_of_vmap(function: Callable[..., torch.Tensor], tensor: torch.Tensor, *more: Any) -> torch.Tensor:
    """Call an elementwise function, which needs no batching rule, on the tensor inside; wrap the result alike."""
    if _functorch.is_batchedtensor(tensor):
        level, dim = _functorch.maybe_get_level(tensor), _functorch.maybe_get_bdim(tensor)
        result = outside_of_vmap(function, _functorch.get_unwrapped(tensor), *more)
        return _functorch._add_batch_dim(result, dim, level)
    with temporarily_clear_interpreter_stack():
        return function(tensor, *more)


def own_parameters(module: nn.Module) -> dict[str, Any]:
    """Return torch's own dict of a module's parameters: `named_parameters` leaves out those that are None, and
    `setattr` and `register_parameter` run hooks and refuse plain tensors."""
    return module._parameters


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return torch's own dict of a module's buffers, for the same reasons."""
    return module._buffers


def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return torch's own dict of a module's children, for the same reasons."""
    return module._modules


def transient_buffers(module: nn.Module) -> set[str]:
    """Return the names of a module's buffers that no state dict holds; `state_dict` says so by making a whole one."""
    return module._non_persistent_buffers_set


def backward_hooks(of: nn.Module | torch.Tensor) -> Any:
    """Return the dict of hooks on a module's or a tensor's backward, or None: torch removes hooks, and lists none."""
    return of._backward_hooks


def gradient_hooks(tensor: torch.Tensor) -> tuple[Any, Any]:
    """Return the dicts of hooks on a tensor's gradient, and on one that was accumulated; None for none."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


def put_gradient_hooks(tensor: torch.Tensor, hooks: Any, accumulated: Any) -> None:
    """Set both dicts; torch refuses a None where there is none."""
    if tensor._backward_hooks is not hooks:
        tensor._backward_hooks = hooks
    if tensor._post_accumulate_grad_hooks is not accumulated:
        tensor._post_accumulate_grad_hooks = accumulated


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the dicts of hooks before and after a module's forward."""
    return module._forward_pre_hooks, module._forward_hooks


def leave_out_of_graphs(module: nn.Module) -> None:
    """Let torch.compile break its graph at a module, which runs with its hooks and children as it does uncompiled."""
    call, apart = module._call_impl, torch.compiler.disable(module._call_impl)

    def run(*args: Any, **kwargs: Any) -> Any:
        return (apart if torch.compiler.is_compiling() else call)(*args, **kwargs)

    run.__dict__[_LEFT_OUT] = True
    module._compiled_call_impl = run


_LEFT_OUT = "_autoplan_left_out"


def take_into_graphs(module: nn.Module) -> None:
    """Undo that."""
    if not runs_compiled(module):
        module._compiled_call_impl = None


def runs_compiled(module: nn.Module) -> bool:
    """Return whether the module was compiled, by `module.compile()` or `torch.compile(module)`."""
    compiled = module._compiled_call_impl
    return (compiled is not None and not hasattr(compiled, _LEFT_OUT)) or "_orig_mod" in module._modules


def compiled_somewhere(model: nn.Module) -> bool:
    """Return whether a part of the model is compiled, or the caller is: what runs inside would be compiled too."""
    return any(runs_compiled(part) for part in model.modules()) or called_by_compiled_code()


def called_by_compiled_code() -> bool:
    """Return whether code that torch.compile runs is among the callers."""
    dynamo = getattr(sys.modules.get("torch._dynamo.eval_frame"), "__file__", None)
    frame: FrameType | None = sys._getframe() if dynamo else None
    while frame is not None and frame.f_code.co_filename != dynamo:
        frame = frame.f_back
    return frame is not None


def uncompiled(model: Any) -> Any:
    """Return the model inside what `torch.compile` returned, or the model itself."""
    return getattr(model, "_orig_mod", model)


def local_part(tensor: DTensor) -> torch.Tensor:
    """Return a DTensor's local tensor itself: `to_local` returns a view, with an autograd node where gradients are
    recorded."""
    return tensor._local_tensor


def local_spec(tensor: DTensor) -> Any:
    """Return where a DTensor lies, with its whole shape and strides; the public parts of it make no DTensor without a
    check among ranks."""
    return tensor._spec


def place_local(tensor: DTensor, local: torch.Tensor, spec: Any = None) -> None:
    """Replace a DTensor's local tensor, and what is said of it; `.data =` leaves both as they are."""
    tensor._local_tensor = local
    if spec is not None:
        tensor._spec = spec


def schema_of(op: Any) -> Any:
    """Return the schema of an op: its name, its arguments, and what it writes."""
    return op._schema


def storage_id(tensor: torch.Tensor) -> int:
    """Return a number of the tensor's storage, its own while it lives; `data_ptr` is 0 where there is no memory."""
    return cast(int, tensor.untyped_storage()._cdata)


def fake_like(
    mode: FakeTensorMode, base: torch.Tensor | None, shape: torch.Size, stride: tuple[int, ...], offset: int,
    dtype: torch.dtype, device: torch.device,
) -> FakeTensor:  # fmt: skip
    """Return a fake tensor of this shape, on the storage of `base` if given; ops of the mode take longer."""
    with in_kernel_invocation_manager(mode):
        empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if base is not None:
            empty.set_(base.untyped_storage(), offset, shape, stride)
        return FakeTensor(mode, empty, device)


def version_of(tensor: torch.Tensor) -> int:
    """Return how often the tensor was changed in place."""
    return tensor._version


def flattened(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return all dims of a mesh as one of this name; public ways make a mesh of its own, with new groups."""
    return mesh._flatten(name)


def dispatcher() -> Any:
    """Return what runs the ops of DTensors: `register_sharding` adds rules to it, and nothing public asks for them."""
    return DTensor._op_dispatcher


def op_handlers() -> dict[Any, Any]:
    """Return the ops that DTensor leaves to a function of theirs."""
    return DTensor._op_dispatcher._custom_op_handlers
