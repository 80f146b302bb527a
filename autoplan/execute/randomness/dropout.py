"""Dropout under tensor parallelism: whole activations draw the same numbers on every rank, split ones different.

The problem: ranks come with streams of their own, and must draw alike without asking each other in every step, which
stalls a device. So they share the first rank's stream, as it is, when the plan is applied; the model's forwards go on
in it, each from where the last one stopped, whatever ranks draw elsewhere. They share it again when they were seeded
anew: then the forward draws what the unsharded model draws after that seed. Whoever seeds must do so on every rank, to
whatever number: a rank that is left out would wait for none, and the others for it.

A module whose random calls act on split values switches to a stream of its own rank, seeded from the shared one: so
recomputation under activation checkpointing, which restores the shared state, draws the same masks again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode

from autoplan.execute.collectives import RankGroup, all_reduce
from autoplan.execute.randomness import streams as random_streams

__all__ = ["SharedRandomness"]


class SharedRandomness:
    """The streams of one model on one rank."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.shared: random_streams.Generators | None = None  # where the next forward goes on
        self.mark: int | None = None  # of the rank's own stream since ranks agreed
        self.outside: list[Any] = []
        self.switched: list[Any] = []  # states of the streams we left, innermost last
        self.training = True

    @torch.compiler.disable
    def agree(self) -> None:
        """Take the first rank's stream. The one moment at which ranks talk about randomness."""
        self.shared = self._of_the_first(random_streams.get_state())
        known = random_streams.marked()  # another model's, which was seeded by the same hand
        self.mark = known if known not in (None, self.mark) else random_streams.mark()

    def _of_the_first(self, mine: random_streams.Generators) -> random_streams.Generators:
        if self.device.type == "meta" or detect_fake_mode() is not None or _is_fake(self.group):
            return mine  # nothing is sent where tensors have no values
        parts = [mine.cpu] if mine.cuda is None else [mine.cpu, mine.cuda]
        state = torch.cat(parts) if self.group.rank == 0 else torch.zeros_like(torch.cat(parts))
        first = all_reduce(state.view(torch.int32).to(self.device), self.group).cpu().view(torch.uint8)
        cpu, *cuda = first.split([part.numel() for part in parts])
        return random_streams.Generators(cpu.clone(), cuda[0].clone() if cuda else None)

    @torch.compiler.disable
    def begin(self, training: bool = True) -> None:
        """Go on in the shared stream."""
        if self.shared is None or random_streams.marked() != self.mark:
            self.agree()
        assert self.shared is not None
        self.training = training
        self.outside.append(random_streams.get_state())
        if self.shared.cuda is None:  # the device came into use since: its stream follows from the CPU's
            random_streams.manual_seed(random_streams.number_of(self.shared))
        random_streams.set_state(self.shared)

    @torch.compiler.disable
    def end(self) -> None:
        self.switched.clear()
        self.shared = random_streams.get_state()
        random_streams.set_state(self.outside.pop())

    @property
    def active(self) -> bool:
        return bool(self.outside)

    @torch.compiler.disable
    def enter_split(self) -> None:
        """Draw per rank from here on. What draws of a shard draws in training: in eval mode the stream is left as it
        was, so that what comes after draws as unsharded."""
        before = random_streams.get_state()
        random_streams.step()
        self.switched.append(random_streams.get_state() if self.training else before)
        random_streams.manual_seed(random_streams.number_of(before) + 1 + self.group.rank)

    @torch.compiler.disable
    def leave_split(self) -> None:
        random_streams.set_state(self.switched.pop())

    @torch.compiler.disable
    def enter_whole(self) -> None:
        """Inside a split module: back to the shared stream for a while."""
        if self.switched:
            mine = random_streams.get_state()
            random_streams.set_state(self.switched[-1])
            self.switched.append(mine)

    @torch.compiler.disable
    def leave_whole(self) -> None:
        if self.switched:
            mine = self.switched.pop()
            self.switched[-1] = random_streams.get_state()
            random_streams.set_state(mine)


def _is_fake(group: RankGroup) -> bool:
    """A group that stands in for one, and sends nothing?"""
    found = dist.distributed_c10d._resolve_process_group(group.name)  # type: ignore[arg-type, unused-ignore]
    return dist.get_backend(found) == "fake"
