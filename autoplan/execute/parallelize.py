"""Apply a plan to a live model: tensor parallelism, then checkpointing, then FSDP2; all of it, or none of it.

The order is fixed: checkpointing must recompute what tensor parallelism added to a block, and FSDP2 must gather and
free whole blocks, checkpointed ones too.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan.common.options import Options
from autoplan.execute.agreement import fail_together, meet, same_model, same_plan
from autoplan.execute.data_parallel.mesh_dims import MeshDims, read_mesh
from autoplan.execute.parameters.optimizer import mark_parameters
from autoplan.execute.tensor_parallel import apply_plan, context_of, record, tp_mesh_of
from autoplan.execute.weights.methods import take_methods
from autoplan.patches.as_it_was import whole_or_as_it_was
from autoplan.values import Plan


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
