"""The random streams of a rank: dropout must draw alike on replicated values, and differently on split ones.

Everything that seeds, saves or forks randomness on "this rank" goes through here, so that simulated ranks, which share
one process, behave like real ones. On a real rank these functions use torch's global generators: the CPU's, and the
current CUDA device's once CUDA is in use. The threads engine (`check/ranks/threads.py`) gives each of its ranks a CPU
generator of its own behind `torch.get_rng_state` and the like, so nothing here knows about threads.

    with random_streams.fork(seed + rank):   # draws inside depend on the rank
        ...                                  # draws after it go on as if nothing had happened

Reading and switching streams here leaves no trace: the former state is restored bit for bit, and torch's own seeding
functions, which `patches/seeding.py` observes, are not called.

No function here reads a tensor through torch: a state is bytes on the host, read and written as such, so that it works
where tensors have no values (fake, on meta) and waits for no device.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoplan.common.code.code_place import names_in, plain_function
from autoplan.common.conventions import conventions
from autoplan.common.torch_internals import DROPOUTS, detect_fake_mode, outside_of_modes
from autoplan.execute.collectives import RankGroup, all_reduce
from autoplan.ops import call_record
from autoplan.patches.seeding import is_simulated, note_seed, seeding, watch_seeding


@dataclass(frozen=True)
class Generators:
    """The states of this rank's generators: the CPU's, and the current CUDA device's if CUDA is in use. None: a
    generator that is left out."""

    cpu: torch.Tensor | None
    cuda: torch.Tensor | None = None


def _on_host() -> torch.Generator:
    return torch.random.default_generator


def _on_device() -> torch.Generator | None:
    """Return the generator of the current CUDA device, if CUDA is in use. A simulated rank has only its CPU generator;
    the device's belongs to the caller."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()) or is_simulated():
        return None
    return torch.cuda.default_generators[torch.cuda.current_device()]


def get_state() -> Generators:
    """Return the states from which this rank would draw next."""
    device = _on_device()
    return Generators(_on_host().get_state(), None if device is None else device.get_state())


def set_state(state: Generators) -> None:
    """Set this rank's generators to `state`."""
    device = _on_device()
    if state.cpu is not None:
        _on_host().set_state(state.cpu)
    if state.cuda is not None and device is not None:
        device.set_state(state.cuda)


@contextmanager
def kept_state(generator: torch.Generator | None = None) -> Iterator[Callable[[], None]]:
    """Yield a function that restores the present state of a generator, or of this rank's own generators."""
    if generator is not None:
        own = generator.get_state()
        yield lambda: generator.set_state(own) and None
    else:
        before = get_state()
        yield lambda: set_state(before)


def unlike(state: Generators, other: Generators) -> Generators:
    """Return the generators of `state` whose state in `other` differs or is missing."""
    return Generators(*(
        None if own is None or another is not None and _bytes(own) == _bytes(another) else own
        for own, another in ((state.cpu, other.cpu), (state.cuda, other.cuda))
    ))  # fmt: skip


def left_out(state: Generators, others: Generators) -> Generators:
    """Return the generators of `state` that `others` lacks."""
    return Generators(state.cpu if others.cpu is None else None, state.cuda if others.cuda is None else None)


def switch(seed: int) -> Generators:
    """Switch to a stream that begins with `seed`, and return its state."""
    device = _on_device()
    _on_host().manual_seed(seed)
    if device is not None:
        device.manual_seed(seed)
    return get_state()


def manual_seed(seed: int) -> None:
    """Seed this rank's generators, as `torch.manual_seed` does."""
    switch(seed)
    note_seed()


def number_of(state: Generators) -> int:
    """Return a seed derived from a state: equal states give equal seeds."""
    return zlib.crc32(b"".join(_bytes(part) for part in (state.cpu, state.cuda) if part is not None))


def step(drawn: Generators) -> None:
    """Advance by one draw those generators that `drawn` has a state of."""
    device = _on_device()
    if drawn.cpu is not None:
        with outside_of_modes():  # a draw that no recording or fake run may see
            torch.rand(1, device="cpu", generator=_on_host().get_state.__self__)
    if drawn.cuda is not None and device is not None:
        device.set_offset(device.get_offset() + 4)  # without launching a kernel


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)


@contextmanager
def fork(seed: int | None = None) -> Iterator[None]:
    """Draw inside the block, from `seed` if given; restore this rank's state afterwards."""
    before = get_state()
    if seed is not None:
        switch(seed)
    try:
        yield
    finally:
        set_state(before)


# Dropout on shards: which modules may draw, and what each rank draws.

# Whether a model may draw random numbers, judged by its rates and by its code when a plan is applied.


def may_draw(model: nn.Module) -> bool:
    """Return whether any dropout, noise or jitter of the model or its configs has a rate above zero. Only compiled code
    asks, which would have to be interrupted to switch streams."""
    for module in model.modules():
        rate = getattr(module, "p", 0.0) if isinstance(module, DROPOUTS) else 0.0
        if rate > 0 or _turned_on(vars(module)) or _turned_on(_settings(module)):
            return True
    return False


def draws_in_code(model: nn.Module) -> frozenset[str]:
    """Return when functions named in the model's forwards, or in their callees of its packages, draw: "always", "rate".

    Unrecorded calls may reach such functions. A known kind of config needs no search: its rates say what draws.
    """
    if conventions().config_of(model) is not None:
        return frozenset()
    kinds = {type(module) for module in model.modules()}
    packages = {kind.__module__.partition(".")[0] for kind in kinds} - {"torch"}
    waiting = [(plain_function(kind.forward), kind) for kind in kinds]
    read: set[Any] = set()
    moments: set[str] = set()
    while waiting:
        function, kind = waiting.pop()
        if function is None or (function, kind) in read:
            continue
        read.add((function, kind))
        names = set(names_in(function.__code__))
        moments.update(call_record(name).random.when for name in names)
        below = (plain_function(getattr(kind, name, function.__globals__.get(name))) for name in names)
        waiting += [(f, kind) for f in below if f is not None and (f.__module__ or "").partition(".")[0] in packages]
    return frozenset(moments - {"never"})


def _settings(module: nn.Module) -> Mapping[str, Any]:
    """Return the settings of a module's config by name, whatever the kind of config."""
    config_read = conventions().config_of(module)
    if config_read is not None:
        return dict(config_read.to_dict())
    config = getattr(module, "config", None)
    return config if isinstance(config, Mapping) else getattr(config, "__dict__", {})


def _turned_on(settings: Mapping[str, Any]) -> bool:
    for name, value in settings.items():
        if isinstance(value, dict) and not str(name).startswith("_") and _turned_on(value):
            return True
        if isinstance(value, float) and value > 0 and conventions().is_rate(str(name)):
            return True
    return False


# Dropout under tensor parallelism: replicated activations draw the same numbers on every rank, split ones different.
#
# The problem: ranks must draw alike without communicating in every step, which stalls a device, and the generators
# belong to the user: a data loader seeds from them. So ranks adopt the first rank's stream when a plan is applied, and
# again after seeding; the forwards of all models of a group continue it, each from where the last one stopped. Whoever
# seeds must do so on every rank, with any number: otherwise the seeded ranks would wait for the others.
#
# A rank whose generator is in the state of the shared stream draws from it, and leaves it as the unsharded model would;
# this is the case on ranks that were seeded alike. Otherwise (another seed, or draws outside of forwards) the forward
# uses the shared stream, and the rank's generator is restored afterwards.
#
# Modules that act on split values switch to a stream of their rank, seeded from the shared one. Recomputation under
# activation checkpointing, which restores the shared state, then draws the same masks again. If numbers were drawn
# there, the shared stream advances by one draw, the same on every rank.

_Key = tuple[str, int, int]  # name, size and rank of a group


class _Shared:
    """The stream that ranks of a group share: where the next forward continues, and from which seeding it comes."""

    def __init__(self) -> None:
        self.state: Generators | None = None
        self.seeding = -1
        self.watch = watch_seeding()
        self.watch.until_gone(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shared:
        return self  # a copied model shares the stream of its group


_of_groups: weakref.WeakValueDictionary[_Key, _Shared] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class _Switch:
    """A switch of streams: to the rank's "own" (which begins at `begun`), to the "shared" one, or none ("same").
    `left`: the state of the stream that was left; `before`: its state before it advanced by one draw."""

    to: str
    left: Generators
    before: Generators
    begun: Generators
    whole_drew: bool = False


class SharedRandomness:
    """One model's use of its group's stream on one rank. `always`: the model draws in eval mode too."""

    def __init__(self, group: RankGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.stream: _Shared | None = None
        self.outside: list[Any] = []
        self.switched: list[_Switch] = []  # innermost last
        self.always = False
        self.apart = 0  # this group's number among those that hold other positions

    @torch.compiler.disable
    def agree(self) -> _Shared:
        """Adopt the first rank's stream. Ranks communicate about randomness only here."""
        if self.device.type == "cuda":
            torch.cuda.init()  # so that its generator is shared too
        key = (self.group.name, self.group.size, self.group.rank)
        self.stream = _of_groups.get(key)
        if self.stream is None or not self.stream.watch.held:
            self.stream = _of_groups[key] = _Shared()
        self.stream.state = state_of_the_first(get_state(), self.group, self.device)
        if self.apart and detect_fake_mode() is None:
            # Derive the stream of this group from it.
            mine = get_state()
            switch((number_of(self.stream.state) + self.apart) % 2**32)
            moved = get_state()
            set_state(mine)
            self.stream.state = moved
        self.stream.seeding = seeding()
        return self.stream

    @torch.compiler.disable
    def begin(self) -> None:
        """Continue in the shared stream."""
        stream = self.stream
        if stream is None or stream.state is None or stream.seeding != seeding():
            stream = self.agree()
        assert stream.state is not None
        mine = get_state()
        self.outside.append(unlike(mine, stream.state))
        if stream.state.cuda is None and mine.cuda is not None:  # in use since: derive its stream from the CPU's
            switch(number_of(stream.state))
        set_state(unlike(stream.state, mine))

    @torch.compiler.disable
    def end(self) -> None:
        self.switched.clear()
        if self.stream is not None:
            self.stream.state = get_state()
        set_state(self.outside.pop())

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
        """Yield a generator of this rank in place of the model's own `generator`, which advances by one draw."""
        seed = number_of(Generators(generator.get_state())) + 1 + self.group.rank
        yield torch.Generator(generator.device).manual_seed(seed % 2**32)
        torch.rand(1, generator=generator, device=generator.device)

    @torch.compiler.disable
    def enter_split(self) -> None:
        """Switch to a stream of this rank, which depends only on the state of the shared stream and the rank."""
        before = get_state()
        step(before)
        left, seed = get_state(), number_of(before) + 1 + self.group.rank
        self.switched.append(_Switch("own", left, before, switch(seed % 2**32)))

    @torch.compiler.disable
    def leave_split(self) -> None:
        """Return to the shared stream, advanced by one draw if there were any, so that the next ones differ."""
        switch = self.switched.pop()
        drawn = unlike(get_state(), switch.begun)
        set_state(switch.left)
        if not switch.whole_drew:
            set_state(left_out(switch.before, drawn))

    @torch.compiler.disable
    def enter_whole(self) -> None:
        """Return to the shared stream for a while, inside a split module."""
        now = get_state()
        within = bool(self.switched) and self.switched[-1].to == "own"
        if within:
            set_state(self.switched[-1].left)
        self.switched.append(_Switch("shared" if within else "same", now, now, now))

    @torch.compiler.disable
    def leave_whole(self) -> None:
        switch = self.switched.pop()
        if switch.to == "shared":
            left = get_state()
            moved = unlike(left, self.switched[-1].left) != Generators(None)
            self.switched[-1] = replace(self.switched[-1], left=left, whole_drew=self.switched[-1].whole_drew or moved)
            set_state(switch.left)


def state_of_the_first(mine: Generators, group: RankGroup, device: torch.device) -> Generators:
    """Return the generators of a group's first rank, on every rank."""
    if device.type == "meta" or detect_fake_mode() is not None:
        return mine  # nothing is sent where tensors have no values
    process_group = dist.distributed_c10d._resolve_process_group(group.name)  # type: ignore[arg-type, unused-ignore]
    if dist.get_backend(process_group) == "fake":
        return mine
    parts = [part for part in (mine.cpu, mine.cuda) if part is not None]
    state = torch.cat(parts) if group.rank == 0 else torch.zeros_like(torch.cat(parts))
    first = all_reduce(state.view(torch.int32).to(device), group).cpu().view(torch.uint8)
    cpu, *cuda = first.split([part.numel() for part in parts])
    return Generators(cpu.clone(), cuda[0].clone() if cuda else None)
