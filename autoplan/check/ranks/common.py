"""What both engines share: how a rank fails, how long ranks may take, and one compute thread for each.

How processes are started is shared with the scoreboard, too. In a file below both and their face.
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from autoplan.common.errors import AutoplanError


class RankError(AutoplanError):
    """A simulated rank raised. `rank` is the first that did, `cause` what it raised (on gloo: its traceback's text)."""

    def __init__(self, rank: int, world_size: int, cause: BaseException | str) -> None:
        text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        super().__init__(f"rank {rank} of {world_size} raised {text}")
        self.rank, self.cause = rank, cause


class RankLost(AutoplanError):
    """A rank's process ended without an answer: nothing is known of the plan."""

    def __init__(self, rank: int, world_size: int, exit_code: int | None) -> None:
        killed = exit_code is not None and exit_code < 0
        how = f"was killed by {signal.Signals(-exit_code).name}" if killed and exit_code else f"ended with {exit_code}"
        super().__init__(
            f"rank {rank} of {world_size} {how} before it had an answer, so nothing is known of the plan",
            hint="was there memory enough? A script that starts ranks needs `if __name__ == '__main__':`, too",
        )
        self.rank, self.exit_code = rank, exit_code


class RankNotStarted(AutoplanError):
    """A rank's process could not take over what it was sent: nothing is known of the plan."""


class RankTimeout(AutoplanError):
    """Simulated ranks did not finish: usually they wait in different collectives."""


def process_context(preloaded: list[str]) -> Any:
    """How processes are started: from a fork server that has loaded these modules, where the system has one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded)
    return context


@contextmanager
def one_compute_thread() -> Iterator[None]:
    """Tiny tensors only: OpenMP threads that wait for each other make them many times slower, ranks even more so."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class BudgetSpent(AutoplanError):
    """The time for a trial ran out."""


@dataclass(frozen=True)
class Budget:
    """How long something may take, from when this was made. Without `seconds` there is no end."""

    seconds: float = math.inf
    start: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return max(0.0, self.seconds - (time.monotonic() - self.start))

    @property
    def spent(self) -> bool:
        return self.left == 0.0

    def check(self, when: str) -> None:
        """Raise if nothing is left."""
        if self.spent:
            hint = f"give it more: trial_seconds={10 * self.seconds:g} (--trial-seconds)"
            raise BudgetSpent(f"the {self.seconds:g} s of the trial ran out {when}", hint=hint)
