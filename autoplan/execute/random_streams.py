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
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from autoplan.common.torch_internals import outside_of_modes
from autoplan.patches.seeding import is_simulated, note_seed


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
