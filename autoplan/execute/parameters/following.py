"""What other packages do with parameters that lie on ranks, for as long as there are any.

The problem: optimizers, norms, savers and loaders are given parameters and no model, and torch has hooks for few of
them. So each parameter says itself how it lies, and while one lives that does, those who would go wrong with it are
followed: new optimizers (`optimizer_state.py`), norms of gradients (`counted.py`), assignments of data
(`assigned.py`), whole state dicts that torch cuts, safetensors, which would look for memory, and the compiler where it
calls losses. And DTensor is told of the ops by which torch asks something of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autoplan.common.errors import AutoplanError
from autoplan.execute.parameters.assigned import assign_data
from autoplan.execute.parameters.counted import count_once, note_repeating
from autoplan.execute.parameters.held import Mark, held_by, held_parameters, mark_of
from autoplan.execute.parameters.optimizer_state import follow
from autoplan.patches.compiled_loss import heard_by_classes
from autoplan.patches.full_state_dicts import left_whole
from autoplan.patches.optimizers import told_of_new_optimizers
from autoplan.patches.parameter_data import data_assigned
from autoplan.patches.safetensors_storage import told_of_stored
from autoplan.patches.sharding_rules import asked_of_all
from autoplan.patches.total_norm import norm_of

__all__ = ["mark_parameters", "stop_following"]


class _Following:
    """As long as this lives, others are followed. Every marked parameter has it, and so have its copies."""

    def __init__(self) -> None:
        self.holds = (
            told_of_new_optimizers(follow),
            norm_of(count_once),
            data_assigned(_assigned),
            left_whole(_lies_otherwise),
            told_of_stored(_refuse_stored),
            heard_by_classes(),
            asked_of_all(),
        )
        for hold in self.holds:
            hold.until_gone(self)

    def release(self) -> None:
        for hold in self.holds:
            hold.release()

    def __reduce__(self) -> Any:
        return _Following, ()


def mark_parameters(model: nn.Module) -> None:
    """Let parameters on ranks say how they lie, to those who get parameters and no model: optimizers, norms."""
    following: _Following | None = None
    for _, parameter, held in held_parameters(model):
        if held is not None:
            following = following or _Following()
            Mark(held, following).put(parameter)
    if following is None and any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        asked_of_all().until_gone(model)  # FSDP2 alone has cut it
    note_repeating(model)


def stop_following(model: nn.Module) -> None:
    """Leave optimizers made from now on alone: the plan of this model is undone."""
    for parameter in model.parameters():
        mark = mark_of(parameter)
        if mark is not None:
            mark.kept.release()


def _assigned(parameter: DTensor, value: Any) -> bool:
    held = held_by(parameter)
    if held is None:
        return False
    assign_data(parameter, value, held)
    return True


def _lies_otherwise(parameter: torch.Tensor, whole: torch.Tensor) -> bool:
    held = held_by(parameter)
    return held is not None and tuple(whole.shape) == held.shape != tuple(parameter.shape)


def _refuse_stored(tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise AutoplanError(
            f"safetensors writes plain tensors, and one of shape {list(tensor.shape)} lies on ranks",
            hint="autoplan.save_weights(model, folder), called on every rank, writes the checkpoint",
        )
