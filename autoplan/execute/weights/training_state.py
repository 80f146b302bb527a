"""The state of a sharded optimizer in a folder: what a run needs besides its weights to go on, at any number of ranks.

Saved with torch.distributed.checkpoint, by names of parameters and in the checkpoint's order
(`parameters/optimizer_state.py`), so that each rank writes its own shards and a run may go on at another tp size.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

__all__ = ["load_optimizer", "save_optimizer"]


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> None:
    """Write the optimizer's state. Every rank calls it."""
    files = dcp.FileSystemWriter(folder, overwrite=True)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, storage_writer=files)


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> None:
    """Read it back into an optimizer of the same kind, fresh or not. Every rank calls it."""
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
