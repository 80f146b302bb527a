"""Whose random numbers? Dropout on a replicated value must draw alike on every rank, on a split value differently.

Everything that seeds, saves or forks randomness on "this rank" goes through here, so that simulated ranks, which share
one process, behave like real ones. On a real rank these functions touch torch's global generators: the CPU's, and the
current CUDA device's once CUDA is in use. The threads engine (`check/ranks/threads.py`) gives each of its ranks a CPU
generator of its own behind the same `torch.get_rng_state` and friends, so nothing here knows about threads.

    with random_streams.fork(seed + rank):   # draws inside depend on the rank
        ...                                  # draws after it go on as if nothing had happened

A `Stream` is a fork that remembers: each `with stream:` goes on where the last one stopped.

No function here looks at a tensor's values through torch: a state is bytes on the host, read and written as such, so
that all of it works where tensors have no values (fake, on meta) and no device is waited for.
"""

from __future__ import annotations

import ctypes
import random
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "Generators",
    "Stream",
    "fork",
    "get_state",
    "manual_seed",
    "mark",
    "marked",
    "number_of",
    "set_state",
    "step",
]

_MARK = 0x6175746F << 31  # what the seed of a marked state begins with; nobody seeds with such numbers


@dataclass(frozen=True)
class Generators:
    """This rank's generators at one moment: the CPU's, and the current CUDA device's if CUDA was in use."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None = None


def _cuda_in_use() -> bool:
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())


def get_state() -> Generators:
    """What this rank would draw from next."""
    import torch

    return Generators(torch.get_rng_state(), torch.cuda.get_rng_state() if _cuda_in_use() else None)


def set_state(state: Generators) -> None:
    """Draw from `state` on."""
    import torch

    torch.set_rng_state(state.cpu)
    if state.cuda is not None:
        torch.cuda.set_rng_state(state.cuda)


def manual_seed(seed: int) -> None:
    """Seed this rank's generators."""
    import torch

    torch.random.default_generator.manual_seed(seed)
    if _cuda_in_use():
        torch.cuda.manual_seed(seed)


def number_of(state: Generators) -> int:
    """A seed that follows from a state: the same wherever the state is."""
    return zlib.crc32(_bytes(state.cpu) + (_bytes(state.cuda) if state.cuda is not None else b""))


def step() -> None:
    """Move this rank's CPU stream on by one draw."""
    import torch

    torch.rand(1, device="cpu")


def mark() -> int:
    """Mark this rank's stream, and return the mark: `marked` says it until somebody seeds, or sets another state.

    What is drawn does not change. The mark lies in a state's first 8 bytes, which hold the seed that it began with and
    are only ever shown. (Were it elsewhere in another torch, the mark would not be seen, and ranks would agree too
    often, not too rarely.)
    """
    state, number = get_state(), _MARK | random.SystemRandom().getrandbits(31)
    ctypes.memmove(state.cpu.data_ptr(), number.to_bytes(8, "little"), 8)
    set_state(state)
    return number


def marked() -> int | None:
    """The mark of this rank's stream, if it has one."""
    import torch

    seed = torch.initial_seed()
    return seed if seed >> 31 == _MARK >> 31 else None


def _bytes(state: torch.Tensor) -> bytes:
    return ctypes.string_at(state.data_ptr(), state.nbytes)


@contextmanager
def fork(seed: int | None = None) -> Iterator[None]:
    """Draw inside the block, from `seed` if there is one; afterwards this rank goes on where it was."""
    before = get_state()
    if seed is not None:
        manual_seed(seed)
    try:
        yield
    finally:
        set_state(before)


class Stream:
    """A second sequence of random numbers besides the rank's own; entering it continues it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._own: Generators | None = None
        self._outside: list[Generators] = []

    def __enter__(self) -> Stream:
        self._outside.append(get_state())
        if self._own is None:
            manual_seed(self.seed)
        else:
            set_state(self._own)
        return self

    def __exit__(self, *_: Any) -> None:
        self._own = get_state()
        set_state(self._outside.pop())
