"""The state of one sharded model on one rank while its forward runs: what its hooks tell each other."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from autoplan.common.errors import AutoplanError
from autoplan.execute.collectives import RankGroup
from autoplan.execute.hooks.parallel_branches import Branches
from autoplan.execute.randomness.dropout import SharedRandomness

__all__ = ["Running", "cannot_be_pickled"]


def cannot_be_pickled() -> AutoplanError:
    """For what a pickle of a sharded model meets first."""
    return AutoplanError(
        "a sharded model cannot be pickled: it holds a part of each weight, and names the ranks that hold the others",
        hint="autoplan.save_weights(model, folder), or torch.distributed.checkpoint of model.state_dict(); "
        "copy.deepcopy(model) works",
    )


@dataclass
class Running:
    """See above."""

    mesh: DeviceMesh
    group: RankGroup
    gather_logits: bool | None  # None: where no gradient is computed
    randomness: SharedRandomness
    frames: list[str] = field(default_factory=list)
    whole_logits: bool = False  # gathered where they leave their head
    split_loss: bool = True  # may a model's own loss work on split logits?
    loss: bool = False  # it is doing so: logits leave their head as SplitLogits
    draws_unseen: bool = True  # may one that takes what nobody saw it take?
    draws: bool = True  # may a forward draw random numbers? Compiled code that does not leaves the streams alone
    sequence_padding: str = "error"
    lengths: dict[str, int] = field(default_factory=dict)  # the true length of each sequence that is cut
    branches: Branches = field(default_factory=Branches)
    depth: int = 0

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise cannot_be_pickled()

    def __copy__(self) -> Running:
        return replace(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Running:
        """For a copied model, on the same ranks."""
        made = memo[id(self)] = replace(self)
        for name, value in vars(self).items():
            if name not in ("mesh", "group"):
                setattr(made, name, copy.deepcopy(value, memo))
        return made

    def may_draw(self, module: nn.Module) -> bool:
        """May a module that runs now draw random numbers? A checkpoint of the model's own runs it again in backward,
        outside of the model's forward."""
        randomness = self.randomness
        return randomness.active or randomness.always or module.training

    @property
    def returns_whole_logits(self) -> bool:
        """Whoever computes gradients has a loss to give logits to; whoever does not may do anything with them."""
        return not torch.is_grad_enabled() if self.gather_logits is None else self.gather_logits
