"""Megatron-FSDP, driven by the same plan: tensor parallelism from the plan, units from the discovered blocks.

`megatron-fsdp` (an optional extra) shards with NVIDIA's kernels in place of FSDP2. Its units are classes, its mesh dims
have names, and it runs on CUDA only. So the call is built as a value first: it can be inspected and tested anywhere,
and where it cannot run it refuses before the model is touched.

    call = megatron_call(model, mesh, plan, optimizer=optimizer, zero_dp_strategy="optim_grads_params")
    print(call)                        # function and every argument
    model, optimizer = call.run()
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan.common.errors import AutoplanError
from autoplan.common.options import check_argument
from autoplan.execute.data_parallel.mesh_dims import read_mesh
from autoplan.execute.tensor_parallel import apply_plan, tp_mesh_of
from autoplan.values import Plan

# Options of fully_shard and fully_shard_model that do not follow from model, mesh and plan (0.2 to 0.6).
OPTIONS = (
    "average_in_collective", "calculate_per_token_loss", "cuda_graph_mode", "device", "disable_bucketing",
    "disable_symmetric_registration", "enable_fine_grained_param_gather", "fsdp_db_use_persist_buf_on_alloc_fail",
    "fsdp_double_buffer", "grad_reduce_in_fp32", "init_model_with_meta_device", "keep_fp8_transpose_cache",
    "maxpool_double_buffer", "mixed_precision_policy", "nccl_ub", "outer_dp_sharding_strategy",
    "overlap_grad_reduce", "overlap_param_gather", "preproc_state_dict_for_dcp_ckpt", "preserve_fp32_weights",
    "report_nan_in_param_grad", "sync_model_each_microbatch", "use_decoupled_grad", "zero_dp_strategy",
)  # fmt: skip


@dataclass(frozen=True)
class MegatronCall:
    """A call of `megatron_fsdp.{function}(model, **arguments)`, made after the plan was applied over the tp mesh."""

    function: str
    arguments: Mapping[str, Any]
    model: nn.Module = field(repr=False, compare=False)
    optimizer: torch.optim.Optimizer | None = field(repr=False, compare=False)
    plan: Plan = field(repr=False)
    tp_mesh: DeviceMesh | None = field(repr=False, compare=False)
    gather_logits: bool | None = None

    def __str__(self) -> str:
        shown = {key: _shown(value) for key, value in self.arguments.items()}
        lines = ",\n    ".join(f"{key}={value}" for key, value in shown.items())
        first = "model, optimizer" if self.optimizer is not None else "model"
        return f"megatron_fsdp.{self.function}(\n    {first},\n    {lines},\n)"

    def run(self) -> Any:
        """Apply the plan, make the call and return the model, or model and optimizer."""
        library = self.check()
        if self.tp_mesh is not None and self.plan.ranks > 1:
            apply_plan(self.model, self.tp_mesh, self.plan, gather_logits=self.gather_logits)
        positional = (self.model,) if self.optimizer is None else (self.model, self.optimizer)
        return getattr(library, self.function)(*positional, **self.arguments)

    def check(self) -> Any:
        """Return the library, or raise where it cannot run. Nothing is changed."""
        if not torch.cuda.is_available():
            raise AutoplanError(
                "Megatron-FSDP runs on CUDA devices only, and this machine has none; the model was not touched",
                hint="use autoplan.parallelize (FSDP2), or look at the call: print(megatron_call(...))",
            )
        if find_spec("megatron_fsdp") is None:
            hint = 'pip install "autoplan[megatron]"'
            raise AutoplanError("megatron-fsdp is not installed; the model was not touched", hint=hint)
        library = import_module("megatron_fsdp")
        accepted = inspect.signature(getattr(library, self.function)).parameters
        if unknown := sorted(set(self.arguments) - set(accepted)):
            raise AutoplanError(
                f"the installed megatron-fsdp does not support {', '.join(unknown)}; the model was not touched",
                hint="omit it, or install another version",
            )
        return library


def megatron_call(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    mesh_dims: Mapping[str, str] | None = None,
    gather_logits: bool | None = None,
    **options: Any,
) -> MegatronCall:
    """Return the call that shards `model` with Megatron-FSDP. Its own options pass by name; unknown ones raise."""
    check_argument("model", model, nn.Module, "pass the model to shard")
    check_argument("mesh", mesh, DeviceMesh, "make one with torch.distributed.device_mesh.init_device_mesh")
    check_argument("plan", plan, Plan, "pass the result of autoplan.plan() or load_plan()")
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise AutoplanError(
            f"autoplan knows no Megatron-FSDP option {', '.join(unknown)}",
            hint=f"known: {', '.join(OPTIONS)}; mesh, units and tp follow from the mesh and the plan",
        )
    if optimizer is not None and plan.ranks > 1:
        raise AutoplanError(
            "an existing optimizer holds parameters that tensor parallelism replaces",
            hint="omit it, create it from the returned model, and pass it to megatron_fsdp.fully_shard_optimizer",
        )
    dims = read_mesh(mesh, mesh_dims)
    if dims.data is None:
        hint = 'name one "dp_shard", or pass mesh_dims='
        raise AutoplanError("the mesh has no dim to shard data-parallel over", hint=hint)
    # Tensor parallelism replaces these classes by subclasses, which count as units too.
    modules = dict(model.named_modules(remove_duplicate=False))
    classes = {type(modules[fqn]): None for stack in plan.layers for fqn in stack.fqns}
    if not classes:
        raise AutoplanError("no repeated blocks were found, so there are no units", hint="autoplan.layers(model)")
    named = {"dp_shard_dim": "dp_shard", "dp_outer_dim": "dp_replicate", "tp_dim": "tp"}
    names = {argument: dims.names[purpose] for argument, purpose in named.items() if purpose in dims.names}
    arguments = {"device_mesh": mesh, **names, "fsdp_unit_modules": list(classes)}
    function = "fully_shard_model" if optimizer is None else "fully_shard"
    tp_mesh = tp_mesh_of(mesh, plan, dims.names)
    return MegatronCall(function, arguments | options, model, optimizer, plan, tp_mesh, gather_logits)


def _shown(value: Any) -> str:
    if isinstance(value, DeviceMesh):
        return f"mesh{tuple(value.mesh.shape)} of {', '.join(value.mesh_dim_names or ())}"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else repr(value)
