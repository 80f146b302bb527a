"""The state of a sharded optimizer in a folder: what a run needs besides its weights to go on, at any number of ranks.

Saved with torch.distributed.checkpoint, by names of parameters and in the checkpoint's order
(`parameters/optimizer_state.py`), so that each rank writes its own shards and a run may go on at another tp size.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from autoplan.common.errors import AutoplanError
from autoplan.execute.agreement import Voters, fail_together, meet, same_model

__all__ = ["load_optimizer", "save_optimizer"]


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> None:
    """Write the optimizer's state. Every rank calls it."""
    with fail_together(Voters.everyone(model), "save_optimizer"):
        meet(same_model(model))
        state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        files = dcp.FileSystemWriter(folder, overwrite=True)
        meet()
        with _as_our_error(f"{folder} could not be written", "is the disk full, and may every rank write there?"):
            dcp.save(state, storage_writer=files)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> None:
    """Read it back into an optimizer of the same kind, fresh or not. Every rank calls it."""
    with fail_together(Voters.everyone(model), "load_optimizer"):
        meet(same_model(model))
        state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
        meet()
        with _as_our_error(f"{folder} could not be read", "is it what save_optimizer wrote, and whole?"):
            dcp.load(state, checkpoint_id=folder)
        meet()
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


@contextmanager
def _as_our_error(told: str, hint: str) -> Iterator[None]:
    """torch tells all ranks what some of them had, in an error that nobody expects: it is no Exception."""
    try:
        yield
    except CheckpointException as error:
        rank, (failure, _) = min(error.failures.items())
        raise AutoplanError(f"{told} by rank {rank}: {type(failure).__name__}: {failure}", hint=hint) from error
