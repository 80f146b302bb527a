"""Whose random numbers? Dropout on a replicated value must draw alike on every rank, on a split value differently.

Everything that seeds, saves or forks randomness on "this rank" goes through here, so that simulated ranks, which share
one process, behave like real ones. On a real rank these functions touch torch's global generators: the CPU's, and the
current CUDA device's once CUDA is in use. The threads engine (`check/ranks/threads.py`) gives each of its ranks a CPU
generator of its own behind the same `torch.get_rng_state` and friends, so nothing here knows about threads.

    with random_streams.fork(seed + rank):   # draws inside depend on the rank
        ...                                  # draws after it go on as if nothing had happened

Reading and switching streams here writes nothing that others read once it is over: what was there is put back, bit for
bit, and torch's own functions for seeding are not called (`patches/seeding.py` listens to them).

No function here looks at a tensor's values through torch: a state is bytes on the host, read and written as such, so
that all of it works where tensors have no values (fake, on meta) and no device is waited for.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import _disable_current_modes

from autoplan.patches.seeding import is_simulated, note_seed


@dataclass(frozen=True)
class Generators:
    """This rank's generators at one moment: the CPU's, and the current CUDA device's if CUDA was in use. None: a
    generator that is not meant."""

    cpu: torch.Tensor | None
    cuda: torch.Tensor | None = None


def _on_host() -> torch.Generator:
    return torch.random.default_generator


def _on_device() -> torch.Generator | None:
    """The generator of the current CUDA device, if CUDA is in use. A simulated rank draws on its own, and the device's
    is the caller's."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()) or is_simulated():
        return None
    found: torch.Generator = torch.cuda.default_generators[torch.cuda.current_device()]
    return found


def get_state() -> Generators:
    """What this rank would draw from next."""
    device = _on_device()
    return Generators(_on_host().get_state(), None if device is None else device.get_state())


def set_state(state: Generators) -> None:
    """Draw from `state` on."""
    device = _on_device()
    if state.cpu is not None:
        _on_host().set_state(state.cpu)
    if state.cuda is not None and device is not None:
        device.set_state(state.cuda)


@contextmanager
def kept_state(generator: torch.Generator | None = None) -> Iterator[Callable[[], None]]:
    """Give a function that puts back what was there: of a generator, or of this rank's own."""
    if generator is not None:
        own = generator.get_state()
        yield lambda: generator.set_state(own) and None
    else:
        before = get_state()
        yield lambda: set_state(before)


def unlike(state: Generators, other: Generators) -> Generators:
    """The generators of `state` that `other` has in another state, or not at all."""
    return Generators(*(
        None if one is None or another is not None and _bytes(one) == _bytes(another) else one
        for one, another in ((state.cpu, other.cpu), (state.cuda, other.cuda))
    ))  # fmt: skip


def left_out(state: Generators, others: Generators) -> Generators:
    """The generators of `state` that `others` has no state of."""
    return Generators(state.cpu if others.cpu is None else None, state.cuda if others.cuda is None else None)


def switch(seed: int) -> Generators:
    """Draw from a stream that begins with `seed`, and return its state."""
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
    """A seed that follows from a state: the same wherever the state is."""
    return zlib.crc32(b"".join(_bytes(part) for part in (state.cpu, state.cuda) if part is not None))


def step(drawn: Generators) -> None:
    """Move those generators on by one draw that `drawn` has a state of."""
    device = _on_device()
    if drawn.cpu is not None:
        with _disable_current_modes():  # a draw of ours, of which no recording or fake run need know
            torch.rand(1, device="cpu", generator=_on_host().get_state.__self__)
    if drawn.cuda is not None and device is not None:
        device.set_offset(device.get_offset() + 4)  # no kernel runs for it


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)


@contextmanager
def fork(seed: int | None = None) -> Iterator[None]:
    """Draw inside the block, from `seed` if there is one; afterwards this rank goes on where it was."""
    before = get_state()
    if seed is not None:
        switch(seed)
    try:
        yield
    finally:
        set_state(before)
