"""Shared by both engines: how a rank fails, time limits, and one compute thread per rank.

The scoreboard starts its processes from here, too.
"""

from __future__ import annotations

import math
import multiprocessing
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from autoplan.common.errors import AutoplanError
from autoplan.common.random_values import drawn_so_far
from autoplan.hf.driving import SLOW_TO_IMPORT
from autoplan.patches.simulated_ranks import host_generators


class RankError(AutoplanError):
    """A simulated rank raised. `rank` is the first that did, `cause` its exception (on gloo: the traceback as text)."""

    def __init__(self, rank: int, world_size: int, cause: BaseException | str) -> None:
        text = cause if isinstance(cause, str) else f"{type(cause).__name__}: {cause}"
        super().__init__(f"rank {rank} of {world_size} raised {text}")
        self.rank, self.cause = rank, cause


class RankLost(AutoplanError):
    """A rank's process ended without an answer: nothing is known of the plan."""

    def __init__(self, rank: int, world_size: int, exit_code: int | None) -> None:
        how = "ended" if exit_code is None else f"ended with {exit_code}"
        if exit_code is not None and exit_code < 0:
            how = f"was killed by {signal.Signals(-exit_code).name}"
        hint = "did it run out of memory? A script that starts ranks needs `if __name__ == '__main__':`"
        super().__init__(f"rank {rank} of {world_size} {how} before it returned a result", hint=hint)
        self.rank, self.exit_code = rank, exit_code


class RankNotStarted(AutoplanError):
    """A rank's process could not load its job: nothing is known of the plan."""


class RankTimeout(AutoplanError):
    """Simulated ranks did not finish: usually they wait in different collectives."""


# Modules that a rank or the scoreboard needs. A Python process has one fork server, so there is one list.
PRELOADED = ["torch.distributed.tensor", *SLOW_TO_IMPORT]
PRELOADED += ["autoplan.check.ranks.threads", "autoplan.check.scoreboard.score"]


def process_context() -> Any:
    """Return a context that starts processes, from a fork server that has imported what they need, if possible."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def end_process(process: Any, grace: float) -> None:
    """End a process, by force if it is still there after `grace` seconds."""
    process.terminate()
    process.join(grace)
    if process.is_alive():
        process.kill()
        process.join()


@contextmanager
def one_compute_thread() -> Iterator[None]:
    """Use one compute thread: on tiny tensors, OpenMP threads that wait for each other are many times slower."""
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
    """A time limit that starts when it is made. Without `seconds` there is none."""

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
            hint = f"raise the limit: trial_seconds={10 * self.seconds:g} (--trial-seconds)"
            raise BudgetSpent(f"the trial exceeded its limit of {self.seconds:g} s {when}", hint=hint)


# State that a model's code keeps outside of the model: lists and counters of its Python modules and classes.
#
# The problem: packages of routed experts collect their losses in a list of a Python module. Ranks as threads share one
# process, so each would find the others' entries there, and a right plan would look wrong. One run shows what changes;
# the ranks of such a model are processes, as in training. So are those of a model that draws from the generators of the
# process without the functions of `random` and `numpy.random`, which are per thread (scipy's distributions do).


GENERATORS = "the generators of random and numpy.random"

_LIBRARIES = ("torch", "transformers", "autoplan", "builtins")


class KeptOutside:
    """Watches for changes of the Python modules and classes of a model's code while the model runs."""

    def __init__(self, model: nn.Module) -> None:
        kinds = {kind for module in model.modules() for kind in type(module).__mro__}
        self.classes = {kind for kind in kinds if kind.__module__.split(".")[0] not in _LIBRARIES}
        homes = {kind.__module__ for kind in self.classes} & sys.modules.keys()
        self._spaces: dict[str, Mapping[str, Any]] = {home: vars(sys.modules[home]) for home in homes}
        self._spaces |= {f"{kind.__module__}.{kind.__qualname__}": vars(kind) for kind in self.classes}
        self.before = dict(self._now())
        self.changed: tuple[str, ...] = ()

    def __enter__(self) -> KeptOutside:
        self._handle = register_module_forward_hook(self._look) if self.before else None
        own = random.Random(0), numpy.random.RandomState(0)
        self._drawn, self._by_name = drawn_so_far()[1:], host_generators(lambda: own)
        self._by_name.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._by_name.__exit__(*exception)
        if drawn_so_far()[1:] != self._drawn:
            self.changed += (GENERATORS,)

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.changed and type(module) in self.classes:
            now = dict(self._now())
            self.changed = tuple(name for name, value in self.before.items() if not _alike(value, now.get(name)))

    def _now(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield the contents of each counter and container."""
        for home, space in self._spaces.items():
            for name, value in list(space.items()):
                if name.startswith("__"):
                    continue
                if isinstance(value, int | float | str):
                    yield f"{home}.{name}", [value]
                elif isinstance(value, (list, dict, set)):  # references keep the ids valid
                    yield f"{home}.{name}", list(value.values() if isinstance(value, dict) else value)


def _alike(before: list[Any], other: list[Any] | None) -> bool:
    pairs = zip(before, other or (), strict=False)
    same = all(a is b or isinstance(a, int | float | str) and a == b for a, b in pairs)
    return other is not None and len(before) == len(other) and same
