"""The way a plan shards, handed to the machinery that compares any sharding (`sharded.py`)."""

from __future__ import annotations

from functools import partial
from typing import Any

from autoplan.check.verify.noted import recomputed, unread_parts
from autoplan.check.verify.on_ranks import Sharding
from autoplan.common.options import Checkpointing, Options, TensorParallel
from autoplan.execute.parallelize import shard_model
from autoplan.execute.parameters.buffers import full_tensors
from autoplan.values import Plan


def mesh_of(plan: Plan) -> dict[str, int]:
    """The mesh to simulate for a plan."""
    return {"cp" if plan.cp_size > 1 else "ep" if plan.tp_size < plan.ep_size else "tp": plan.ranks}


def sharding_of(plan: Plan, *, gather_logits: bool = False, checkpointing: str = "", traffic: bool = True) -> Sharding:
    """The way a plan shards, for `check_sharding`. `traffic`: what each block moves is measured."""
    shard = partial(_apply, plan=plan, gather_logits=gather_logits, checkpointing=checkpointing)
    if checkpointing:
        return Sharding(shard, full_tensors, noted=partial(recomputed, stacks=plan.layers))
    shown = {fqn: None for stack in plan.layers for fqn in stack.fqns} if traffic and plan.communication else {}
    return Sharding(shard, full_tensors, tuple(shown), unread=partial(unread_parts, plan=plan))


def _apply(model: Any, mesh: Any, *, plan: Plan, gather_logits: bool, checkpointing: str) -> Any:
    mode = True if checkpointing == "block" else checkpointing or False
    options = Options(TensorParallel(gather_logits, sequence_padding="pad", path_guard="off"), Checkpointing(mode))
    return shard_model(model, mesh, plan, options)
