"""Apply a plan to a live model, by Megatron-FSDP or as styles of torch too; and the part of a plan for a stage."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.options import Options, check_argument
from autoplan.common.patterns import grouped, matches, nearest
from autoplan.execute.agreement import fail_together, meet, same_model, same_plan
from autoplan.execute.data_parallel.mesh_dims import MeshDims, context_of, read_mesh, tp_mesh_of
from autoplan.execute.fits import model_hash
from autoplan.execute.parameters.optimizer import mark_parameters
from autoplan.execute.tensor_parallel import apply_plan, record
from autoplan.execute.weights.methods import take_methods
from autoplan.patches.as_it_was import whole_or_as_it_was
from autoplan.values import Entry, Plan
from autoplan.values.plan import digest

# Tensor parallelism, then checkpointing, then FSDP2; all of it, or none of it.
#
# The order is fixed: checkpointing must recompute what tensor parallelism added to a block, and FSDP2 must gather and
# free whole blocks, checkpointed ones too.


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    plan: Plan,
    options: Options = Options(),  # noqa: B008 - frozen
    dims: MeshDims | None = None,
    averaged: bool = False,
) -> nn.Module:
    """Shard `model` in place as `plan` and `options` say. Nothing is decided here, and nothing audited.

    `averaged`: gradients over cp ranks will be averaged elsewhere, as FSDP2 does on a mesh with dp_shard.
    """
    dims = read_mesh(mesh) if dims is None else dims
    dims = dims.for_context() if plan.cp_size > 1 else dims
    with whole_or_as_it_was(model), fail_together(dims.voters, "parallelize"):
        dims.check_experts(plan.tp_size, plan.ep_size)
        tp_mesh = tp_mesh_of(mesh, plan, dims.names)
        options.data.check(0 if dims.data is None else dims.data.size(dims.data.ndim - 1))
        meet(same_model(model), same_plan(plan, options.tensor))
        if tp_mesh is not None and plan.ranks > 1:
            averaged = (averaged or dims.data is not None) and plan.cp_size > 1
            groups = context_of(mesh, plan, dims.names)
            apply_plan(model, tp_mesh, plan, **vars(options.tensor), averaged=averaged, more_groups=groups)
        record(model, plan, notes=dims.notes, voters=dims.voters)
        if options.checkpointing.blocks:
            from autoplan.execute.checkpointing.blocks import checkpoint_blocks

            checkpoint_blocks(model, plan.layers, options.checkpointing.blocks, options.checkpointing.scope)
        if dims.data is not None:
            from autoplan.execute.data_parallel.fsdp import shard_data_parallel

            shard_data_parallel(model, dims.data, plan.layers, options.data, kept=dims.stages > 1)
        mark_parameters(model)
        take_methods(model)
    return model


# Megatron-FSDP, driven by the same plan: tensor parallelism from the plan, units from the discovered blocks.
#
# `megatron-fsdp` (an optional extra) shards with NVIDIA's kernels in place of FSDP2. Its units are classes, its mesh
# dims have names, and it runs on CUDA only. So the call is built as a value first: it can be inspected and tested
# anywhere, and where it cannot run it refuses before the model is touched.
#
#     call = megatron_call(model, mesh, plan, optimizer=optimizer, zero_dp_strategy="optim_grads_params")
#     print(call)                        # function and every argument
#     model, optimizer = call.run()

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


# A plan as styles for torch's own `parallelize_module`.
#
# A split is decided for the whole model: reductions sit on other modules than their weights, tied weights have two
# owners, integers are edited together. So each module's style only marks that the module takes part, and the last one,
# for the model itself (key ""), applies the plan: same code, same numbers as `autoplan.parallelize`. A dictionary from
# which entries were removed is refused, because half of a column/row pair is silently wrong.


class PlannedModule(ParallelStyle):
    """A style that marks its module as taking part in the plan. `choices` are its entries: pattern and style."""

    def __init__(self, choices: tuple[tuple[str, str], ...], taken: set[str]) -> None:
        super().__init__()
        self.choices, self._taken = choices, taken

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._taken.update(pattern for pattern, _ in self.choices)
        return module

    def __repr__(self) -> str:
        return f"PlannedModule({', '.join(dict.fromkeys(style for _, style in self.choices))})"


class PlannedModel(ParallelStyle):
    """A style that applies the plan once every planned module has been named."""

    def __init__(self, plan: Plan, taken: set[str], gather_logits: bool | None) -> None:
        super().__init__()
        self.plan, self._taken, self.gather_logits = plan, taken, gather_logits
        self._used = False

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self._used:
            raise PlanMismatchError(
                "these style objects were already applied to a model, and cannot be reused",
                hint="call plan.to_torch() once per model: it returns fresh objects each time",
            )
        self._used = True
        missing = [e.pattern for e in self.plan.entries if _module_of(e) and e.pattern not in self._taken]
        if missing:
            raise PlanMismatchError(
                f"{len(missing)} of {len(self.plan.entries)} planned modules were not applied, first {missing[0]!r}",
                hint="pass the whole dictionary of plan.to_torch() to parallelize_module",
            )
        self._taken.clear()
        mesh = device_mesh if device_mesh.ndim == 1 and device_mesh.size() == self.plan.ranks else None
        mesh = mesh or tp_mesh_of(device_mesh, self.plan)
        return module if mesh is None else apply_plan(module, mesh, self.plan, gather_logits=self.gather_logits)

    def __repr__(self) -> str:
        return f"PlannedModel({self.plan.model}, tp={self.plan.tp_size})"


def to_torch(plan: Plan, *, gather_logits: bool | None = None) -> dict[str, ParallelStyle]:
    """Return fresh {pattern: style} for `parallelize_module(model, tp_mesh, …)`; the last key is ""."""
    applied: set[str] = set()
    by_module = grouped((_module_of(entry), entry) for entry in plan.entries)
    styles: dict[str, ParallelStyle] = {
        module: PlannedModule(tuple((entry.pattern, entry.style) for entry in entries), applied)
        for module, entries in by_module.items()
        if module
    }
    styles[""] = PlannedModel(plan, applied, gather_logits)
    return styles


def _module_of(entry: Entry) -> str:
    """Return the module of an entry; torch only matches modules, so a parameter's entry is named by its owner."""
    owner, _, name = entry.pattern.rpartition(".")
    return owner if entry.parameters == (name,) else entry.pattern


# The part of a plan that a pipeline stage needs.
#
# The problem: a pipeline gives each rank some blocks of a model, and the embedding or the head only to its ends. Such a
# stage cannot be planned by itself, since its inputs are unknown. The full model can, once, anywhere (on meta), and
# each stage takes what concerns its own modules. It must be a piece of that model: the plan knows every parameter of
# the stage under the same name. The remaining plan is then as sound as the full one.

_SHOWN = 3


def part_for(plan: Plan, model: nn.Module) -> Plan:
    """Return the part of `plan` that concerns `model`, a piece of the model that the plan was made for."""
    tensors = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    buffers = [name for name, _ in model.named_buffers(remove_duplicate=False)]
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    packed = tuple(weight for weight in plan.packed if _means(weight.owner, modules))
    _refuse_strangers(plan, model, tensors)
    part = within(plan, modules, [*tensors, *buffers, *(weight.name for weight in packed)])
    if (part.runtime.parameters, part.runtime.instructions) == (plan.runtime.parameters, plan.runtime.instructions):
        return plan
    if plan.sequence_parallel:
        raise PlanMismatchError(
            f"the plan for {plan.model} shards the sequence of a stream whose ends are not in this stage",
            hint="plan the whole model with sequence_parallel=False: stages exchange full sequences",
        )
    sizes = tuple(size for size in plan.made_for.sizes if _means(size.pattern, [*tensors, *buffers]))
    made_for = replace(plan.made_for, sizes=sizes)
    part = replace(
        part,
        entries=tuple(e for e in plan.entries if _means(e.pattern, [*modules, *tensors])),
        replicated=tuple(whole for whole in plan.replicated if _means(whole.fqn, tensors)),
        runtime=replace(
            part.runtime,
            constants=tuple(constant for constant in plan.runtime.constants if _means(constant.pattern, modules)),
            idle=_within(plan.runtime.idle, modules),
            outputs=(),  # a stage returns something else
            shapes=(),
            unsummed=(),  # its inputs come from another stage, after that stage's reductions
        ),
        obstacles=tuple(obstacle for obstacle in plan.obstacles if _means(obstacle.pattern, modules)),
        packed=packed,
        paths=(),  # a stage is entered and left elsewhere
        made_for=made_for,
    )
    if plan.made_for.content and digest(plan) == plan.made_for.content:  # else it was edited: it stays suspect
        part = replace(part, made_for=replace(made_for, content=digest(part), model=model_hash(model)))
    return part


def within(plan: Plan, modules: Sequence[str], tensors: Sequence[str]) -> Plan:
    """Return the plan without what it does to other modules and tensors than these."""
    runtime = replace(
        plan.runtime,
        parameters=tuple(rule for rule in plan.runtime.parameters if _means(rule.pattern, tensors)),
        instructions=tuple(done for done in plan.runtime.instructions if _means(done.pattern, modules)),
        random=_within(plan.runtime.random, modules),
        random_whole=_within(plan.runtime.random_whole, modules),
    )
    layers = (replace(stack, fqns=blocks) for stack in plan.layers if (blocks := _within(stack.fqns, modules)))
    return replace(plan, runtime=runtime, layers=tuple(layers))


def _refuse_strangers(plan: Plan, model: nn.Module, tensors: list[str]) -> None:
    """Raise where the model holds a parameter that the plan does not know."""
    planned = [*(rule.pattern for rule in plan.runtime.parameters), *(whole.fqn for whole in plan.replicated)]
    planned += [f"{weight.owner}.{tensor.name}" for weight in plan.packed for tensor in weight.tensors]
    strange = [name for name in tensors if not any(matches(pattern, name) for pattern in planned)]
    if not strange:
        return
    close = nearest(strange[0], planned)
    more = f" and {len(strange) - 1} more" if len(strange) > 1 else ""
    raise PlanMismatchError(
        f"{type(model).__name__} holds {strange[0]}{more}, which the plan for {plan.model} does not include",
        hint="a stage must keep the names of the whole model (with its block numbers)"
        + (f"; nearest: {', '.join(close[:_SHOWN])}" if close else ""),
    )


def _means(pattern: str, names: Iterable[str]) -> bool:
    return any(matches(pattern, name) for name in names)


def _within(patterns: tuple[str, ...], modules: Iterable[str]) -> tuple[str, ...]:
    return tuple(pattern for pattern in patterns if _means(pattern, modules))
