"""Whose random numbers? Dropout on a replicated value must draw alike on every rank, on a split value differently.

Everything that seeds, saves or forks randomness on "this rank" goes through here, so that simulated ranks, which share
one process, behave like real ones. On a real rank these functions touch torch's global generators: the CPU's, and the
current CUDA device's once CUDA is in use. The threads engine (`check/ranks/threads.py`) gives each of its ranks a CPU
generator of its own behind the same `torch.get_rng_state` and friends, so nothing here knows about threads.

    with random_streams.fork(seed + rank):   # draws inside depend on the rank
        ...                                  # draws after it go on as if nothing had happened

A `Stream` is a fork that remembers: each `with stream:` goes on where the last one stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["State", "Stream", "fork", "get_state", "manual_seed", "number_in", "set_state"]


@dataclass(frozen=True)
class State:
    """This rank's generators at one moment: the CPU's, and the current CUDA device's if CUDA was in use."""

    cpu: torch.Tensor
    cuda: torch.Tensor | None = None


def _cuda_in_use() -> bool:
    import torch

    return bool(torch.cuda.is_available() and torch.cuda.is_initialized())


def get_state() -> State:
    """What this rank would draw from next."""
    import torch

    return State(torch.get_rng_state(), torch.cuda.get_rng_state() if _cuda_in_use() else None)


def set_state(state: State) -> None:
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


def number_in(tensor: torch.Tensor) -> int:
    """The one number in a tensor; zero in a dry run, where tensors have shapes only and nothing is drawn."""
    from torch._subclasses.fake_tensor import is_fake

    return 0 if tensor.is_meta or is_fake(tensor) else int(tensor.item())


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
        self._own: State | None = None
        self._outside: list[State] = []

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
