"""What a checkpointed block keeps op by op, where it is not run again whole.

In: ops as they are called. Out: keep the result, or compute it again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from autoplan.ops import op_record
from autoplan.ops.records.record import Drawn

__all__ = ["all_but_drawn", "selective_contexts"]


def selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of one call that keep every other matmul, attention and every collective; the rest is computed again."""
    first, again = create_selective_checkpoint_contexts(_Policy())
    return first, again


def all_but_drawn() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of one compiled call on a CPU that compute all again but what takes random numbers (attention may).

    torch's partitioner keeps a state of the generator for each of those, and on a CPU puts it behind the meshes that
    gradients of DTensors need: each is then taken for the other, and the forward fails. On a GPU it passes generators
    another way.
    """
    first, again = create_selective_checkpoint_contexts(_keep_drawn)
    return first, again


def _keep_drawn(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    draws = torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())
    return CheckpointPolicy.MUST_SAVE if draws else CheckpointPolicy.PREFER_RECOMPUTE


class _Policy:
    """Counts matmuls in forward and in recomputation apart, so that both runs keep the same ones."""

    def __init__(self) -> None:
        self.matmuls = {False: 0, True: 0}

    def __call__(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        name = op._opname if hasattr(op, "_opname") else str(op)
        if getattr(op, "namespace", "") in ("_c10d_functional", "c10d"):
            return CheckpointPolicy.MUST_SAVE
        drawn = op_record(name).drawn
        if drawn is Drawn.ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if drawn is Drawn.CONTRACTION:
            self.matmuls[context.is_recompute] += 1
            odd = self.matmuls[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if odd else CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.PREFER_RECOMPUTE
