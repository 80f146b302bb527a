"""Dropout under tensor parallelism: whole activations draw the same numbers on every rank, split ones different.

At the start of a training forward the ranks of a tp group agree on one seed (whatever seeds they came with) and draw
from that shared stream. A module whose random calls act on split values switches to a stream of its own rank, seeded
from the shared one: so recomputation under activation checkpointing, which restores the shared state, draws the same
masks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autoplan.common.conventions import conventions
from autoplan.execute.collectives import RankGroup, all_reduce
from autoplan.execute.randomness import streams as random_streams

__all__ = ["SharedRandomness", "may_draw", "proposed_seed"]

_SEEDS = 2**31 - 1


def proposed_seed() -> int:
    """What a rank proposes, out of its own stream."""
    return random_streams.number_in(torch.randint(_SEEDS, (1,)))


class SharedRandomness:
    """The streams of one model on one rank."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.outside: list[Any] = []
        self.switched: list[Any] = []  # states of the streams we left, innermost last
        self.training = True

    def begin(self, training: bool = True) -> None:
        """Agree on a seed: the first rank's draw counts."""
        self.training = training
        draw = proposed_seed()
        self.outside.append(random_streams.get_state())
        mine = torch.tensor([draw if self.group.rank == 0 else 0], device=self.device)
        random_streams.manual_seed(random_streams.number_in(all_reduce(mine, self.group)))

    def end(self) -> None:
        self.switched.clear()
        random_streams.set_state(self.outside.pop())

    @property
    def active(self) -> bool:
        return bool(self.outside)

    def enter_split(self) -> None:
        """Draw per rank from here on. What draws of a shard draws in training: in eval mode the stream is left as it
        was, so that what comes after draws as unsharded."""
        before = random_streams.get_state()
        seed = proposed_seed()
        self.switched.append(random_streams.get_state() if self.training else before)
        random_streams.manual_seed(seed + 1 + self.group.rank)

    def leave_split(self) -> None:
        random_streams.set_state(self.switched.pop())

    def enter_whole(self) -> None:
        """Inside a split module: back to the shared stream for a while."""
        if self.switched:
            mine = random_streams.get_state()
            random_streams.set_state(self.switched[-1])
            self.switched.append(mine)

    def leave_whole(self) -> None:
        if self.switched:
            mine = self.switched.pop()
            self.switched[-1] = random_streams.get_state()
            random_streams.set_state(mine)


def may_draw(model: nn.Module) -> bool:
    """Is any dropout, noise or jitter of the model or its configs turned on? Many are there with a rate of zero.

    Asked for compiled code only, which would have to be interrupted to agree on a seed.
    """
    for module in model.modules():
        rate = getattr(module, "p", 0.0) if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0
        if rate > 0 or _turned_on(vars(module)) or _turned_on(_settings(module)):
            return True
    return False


def _settings(module: nn.Module) -> Mapping[str, Any]:
    """What the config of a module says by name, whatever kind of config it is."""
    known = conventions().config_of(module)
    if known is not None:
        return dict(known.to_dict())
    config = getattr(module, "config", None)
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})


def _turned_on(settings: Mapping[str, Any]) -> bool:
    for name, value in settings.items():
        if isinstance(value, dict) and not str(name).startswith("_") and _turned_on(value):
            return True
        if isinstance(value, float) and value > 0 and conventions().is_rate(str(name)):
            return True
    return False
