"""Dropout on shards: which modules may draw, and what each rank draws."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import detect_fake_mode

from autoplan.common.code.code_place import names_in, plain_function
from autoplan.common.conventions import conventions
from autoplan.execute import random_streams
from autoplan.execute.collectives import RankGroup, all_reduce
from autoplan.ops import call_record
from autoplan.patches.seeding import seeding, watch_seeding

# May a model draw random numbers: what its rates say, and what its code says of calls that were not recorded.
#
# Asked when a plan is applied, of the model alone.


def may_draw(model: nn.Module) -> bool:
    """Is any dropout, noise or jitter of the model or its configs turned on? Many are there with a rate of zero. Asked
    for compiled code only, which would have to be interrupted to switch streams."""
    for module in model.modules():
        rate = getattr(module, "p", 0.0) if isinstance(module, nn.modules.dropout._DropoutNd) else 0.0
        if rate > 0 or _turned_on(vars(module)) or _turned_on(_settings(module)):
            return True
    return False


def draws_in_code(model: nn.Module) -> frozenset[str]:
    """Do forwards of a model, or what they call in its packages, name functions that draw: "always", or at a "rate"?

    Calls that were not recorded may then reach them. Of a model with a known kind of config nothing is read: its rates
    say what draws.
    """
    if conventions().config_of(model) is not None:
        return frozenset()
    kinds = {type(module) for module in model.modules()}
    packages = {kind.__module__.partition(".")[0] for kind in kinds} - {"torch"}
    waiting = [(plain_function(kind.forward), kind) for kind in kinds]
    read: set[Any] = set()
    found: set[str] = set()
    while waiting:
        function, kind = waiting.pop()
        if function is None or (function, kind) in read:
            continue
        read.add((function, kind))
        names = set(names_in(function.__code__))
        found.update(call_record(name).random.when for name in names)
        below = (plain_function(getattr(kind, name, function.__globals__.get(name))) for name in names)
        waiting += [(f, kind) for f in below if f is not None and (f.__module__ or "").partition(".")[0] in packages]
    return frozenset(found - {"never"})


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


# Dropout under tensor parallelism: whole activations draw the same numbers on every rank, split ones different.
#
# The problem: ranks must draw alike without asking each other in every step, which stalls a device, and the generators
# belong to the user: a data loader seeds from them. So ranks share the first one's stream, as it is, when a plan is
# applied, and again when they were seeded anew; the forwards of all models of a group go on in it, each from where the
# last one stopped. Whoever seeds must do so on every rank, to whatever number: a rank that is left out would wait for
# none, and the others for it.
#
# A rank whose generator stands where the shared stream does draws from it, and leaves it as the unsharded model
# would: that is so on all ranks that were seeded alike. Where it stands elsewhere (a rank that was seeded to another
# number, or that has drawn from it outside of forwards) the forward goes on in the shared stream, and the generator
# is put back.
#
# What acts on split values switches to a stream of its own rank, seeded from the shared one: so recomputation under
# activation checkpointing, which restores the shared state, draws the same masks again. If numbers were drawn there,
# the shared stream has gone on by one draw, the same on every rank.

_Key = tuple[str, int, int]  # name, size and rank of a group


class _Shared:
    """The stream that ranks of a group share: where the next forward goes on, and of which seeding it is."""

    def __init__(self) -> None:
        self.state: random_streams.Generators | None = None
        self.seeding = -1
        self.watch = watch_seeding()
        self.watch.until_gone(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self  # a copied model is one more of the group


_of_groups: weakref.WeakValueDictionary[_Key, _Shared] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class _Switch:
    """A change of streams: to a rank's "own", which `begun` so, to the "shared" one, or none ("same"). `left`: where
    the stream stands that was left; `before`: where it stood, before it went on by one draw."""

    to: str
    left: random_streams.Generators
    before: random_streams.Generators
    begun: random_streams.Generators
    whole_drew: bool = False


class SharedRandomness:
    """What one model on one rank does with the stream of its group. `always`: it draws in eval mode too."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.stream: _Shared | None = None
        self.outside: list[Any] = []
        self.switched: list[_Switch] = []  # innermost last
        self.always = False
        self.apart = 0  # which of several groups it is that hold other positions, and draw other numbers

    @torch.compiler.disable
    def agree(self) -> _Shared:
        """Take the first rank's stream. The one moment at which ranks talk about randomness."""
        if self.device.type == "cuda":
            torch.cuda.init()  # from here on its generator is one of those that are shared
        key = (self.group.name, self.group.size, self.group.rank)
        self.stream = _of_groups.get(key)
        if self.stream is None or not self.stream.watch.held:
            self.stream = _of_groups[key] = _Shared()
        self.stream.state = state_of_the_first(random_streams.get_state(), self.group, self.device)
        if self.apart and detect_fake_mode() is None:
            # A stream that follows from this one.
            mine = random_streams.get_state()
            random_streams.switch((random_streams.number_of(self.stream.state) + self.apart) % 2**32)
            moved = random_streams.get_state()
            random_streams.set_state(mine)
            self.stream.state = moved
        self.stream.seeding = seeding()
        return self.stream

    @torch.compiler.disable
    def begin(self) -> None:
        """Go on in the shared stream."""
        stream = self.stream
        if stream is None or stream.state is None or stream.seeding != seeding():
            stream = self.agree()
        assert stream.state is not None
        mine = random_streams.get_state()
        self.outside.append(random_streams.unlike(mine, stream.state))
        if stream.state.cuda is None and mine.cuda is not None:  # in use since: its stream follows from the CPU's
            random_streams.switch(random_streams.number_of(stream.state))
        random_streams.set_state(random_streams.unlike(stream.state, mine))

    @torch.compiler.disable
    def end(self) -> None:
        self.switched.clear()
        if self.stream is not None:
            self.stream.state = random_streams.get_state()
        random_streams.set_state(self.outside.pop())

    @property
    def active(self) -> bool:
        return bool(self.outside)

    @contextmanager
    def split(self) -> Iterator[None]:
        """Draw per rank inside the block."""
        self.enter_split()
        try:
            yield
        finally:
            self.leave_split()

    @contextmanager
    def split_of(self, generator: torch.Generator) -> Iterator[torch.Generator]:
        """A generator of this rank in place of one that the model brings, which goes on by one draw."""
        seed = random_streams.number_of(random_streams.Generators(generator.get_state())) + 1 + self.group.rank
        yield torch.Generator(generator.device).manual_seed(seed % 2**32)
        torch.rand(1, generator=generator, device=generator.device)

    @torch.compiler.disable
    def enter_split(self) -> None:
        """Draw per rank from here on: from a stream that follows from where the shared one stands, and nothing else."""
        before = random_streams.get_state()
        random_streams.step(before)
        left, seed = random_streams.get_state(), random_streams.number_of(before) + 1 + self.group.rank
        self.switched.append(_Switch("own", left, before, random_streams.switch(seed % 2**32)))

    @torch.compiler.disable
    def leave_split(self) -> None:
        """Back to the shared stream, which has gone on by one draw if there were any: others come next time."""
        switch = self.switched.pop()
        drawn = random_streams.unlike(random_streams.get_state(), switch.begun)
        random_streams.set_state(switch.left)
        if not switch.whole_drew:
            random_streams.set_state(random_streams.left_out(switch.before, drawn))

    @torch.compiler.disable
    def enter_whole(self) -> None:
        """Inside a split module: back to the shared stream for a while."""
        now = random_streams.get_state()
        within = bool(self.switched) and self.switched[-1].to == "own"
        if within:
            random_streams.set_state(self.switched[-1].left)
        self.switched.append(_Switch("shared" if within else "same", now, now, now))

    @torch.compiler.disable
    def leave_whole(self) -> None:
        switch = self.switched.pop()
        if switch.to == "shared":
            left = random_streams.get_state()
            moved = random_streams.unlike(left, self.switched[-1].left) != random_streams.Generators(None)
            self.switched[-1] = replace(self.switched[-1], left=left, whole_drew=self.switched[-1].whole_drew or moved)
            random_streams.set_state(switch.left)


def state_of_the_first(
    mine: random_streams.Generators, group: RankGroup, device: torch.device
) -> random_streams.Generators:
    """The generators of a group's first rank, on every rank."""
    if device.type == "meta" or detect_fake_mode() is not None or _is_fake(group):
        return mine  # nothing is sent where tensors have no values
    parts = [part for part in (mine.cpu, mine.cuda) if part is not None]
    state = torch.cat(parts) if group.rank == 0 else torch.zeros_like(torch.cat(parts))
    first = all_reduce(state.view(torch.int32).to(device), group).cpu().view(torch.uint8)
    cpu, *cuda = first.split([part.numel() for part in parts])
    return random_streams.Generators(cpu.clone(), cuda[0].clone() if cuda else None)


def _is_fake(group: RankGroup) -> bool:
    """A group that stands in for one, and sends nothing?"""
    found = dist.distributed_c10d._resolve_process_group(group.name)  # type: ignore[arg-type, unused-ignore]
    return dist.get_backend(found) == "fake"
