"""N ranks without N machines.

A plan is only believed once the sharded model has run on several ranks. Two engines do that:

`threads`  every rank is a thread of this process and collectives meet in memory: starts in milliseconds, any callable
           will do, results come back as they are. The default. (`threads.py`, where all private torch API lives)
`gloo`     every rank is a process with a real process group on the loopback device: slower to start, the callable
           must be picklable and results are copied back. The cross-check. (`processes.py`)

Neither disturbs the caller: thread count, random state and a process group that is already alive are as they were.
This module loads no torch until it is asked to run something.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, TypeVar

from autoplan.common.errors import AutoplanError

Engine = Literal["threads", "gloo"]
Result = TypeVar("Result")


def run_ranks(
    fn: Callable[[int], Result], world_size: int, *, engine: Engine = "threads", timeout: float = 120.0
) -> list[Result]:
    """Call `fn(rank)` on each of `world_size` simulated ranks and return the results.

    Inside, the default process group is initialised and device meshes on "cpu" can be made. Every rank starts from the
    caller's random state and then draws on its own. `gloo` needs a picklable `fn`.

    >>> import torch.distributed as dist
    >>> run_ranks(lambda rank: rank + dist.get_world_size(), 2)
    [2, 3]
    """
    if engine not in ("threads", "gloo"):
        raise AutoplanError(f"unknown engine {engine!r}", hint="choose 'threads' or 'gloo'")
    if engine == "gloo":
        return run_processes(fn, (), world_size, timeout=timeout)
    from autoplan.check.ranks.threads import run_threads

    return run_threads(fn, _checked(world_size), timeout)


def run_processes(
    target: Callable[..., Any], args: Sequence[Any], world_size: int, *, timeout: float = 300.0
) -> list[Any]:
    """Call the picklable `target(rank, *args)` in `world_size` gloo processes; results come back as copies."""
    from autoplan.check.ranks.processes import start_and_collect

    return start_and_collect(target, tuple(args), _checked(world_size), timeout)


def travels(value: Any) -> bool:
    """Return whether a value can be sent to ranks that are processes."""
    from autoplan.check.ranks.processes import CANNOT_TRAVEL, packed

    try:
        packed(value)
    except CANNOT_TRAVEL:
        return False
    return True


def count_collectives() -> AbstractContextManager[Counter[str]]:
    """Count the collectives that this rank issues inside, by kind: `Counter({"all_reduce": 4})`. Either engine."""
    from autoplan.check.ranks.threads import counted

    return counted()


def _checked(world_size: int) -> int:
    if world_size < 1:
        raise AutoplanError(f"cannot simulate {world_size} ranks", hint="world_size must be at least 1")
    return world_size
