"""Models that talk to torch.distributed themselves, while a plan is made for them.

The problem: code of routed experts asks how many ranks there are and exchanges tokens with them. When one rank plans,
the others do not come to that exchange, and it hangs; on simulated ranks it would run its own parallelism beside ours.
So while a plan is made, the model's code is told that there is no process group. Who asks shows by the file that calls:
torch and autoplan themselves get the truth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoplan.common.errors import CaptureError
from autoplan.patches.patched import Patch, Place, patched

__all__ = ["PROCESS_GROUP", "alone"]

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_ANSWERS: dict[str, Any] = {"is_initialized": False, "get_world_size": 1, "get_rank": 0}
_NOTHING = ("all_reduce", "broadcast", "barrier", "reduce")  # of a single rank, they change nothing
_REFUSED = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single",
    "broadcast_object_list", "gather", "irecv", "isend", "new_group", "recv", "reduce_scatter",
    "reduce_scatter_tensor", "scatter", "send",
)  # fmt: skip


def _canary() -> bool:
    """Are these functions of torch.distributed, which models call through it?"""
    return all(callable(vars(dist).get(name)) for name in (*_ANSWERS, *_NOTHING, *_REFUSED))


PROCESS_GROUP = Patch(
    name="process group",
    replaces="torch.distributed.is_initialized, get_rank, get_world_size and the collectives, for callers in the model",
    why="a model that exchanges data with other ranks hangs when one rank plans, and is no longer what is planned",
    scope="while a plan is made and proven",
    undone="the functions themselves are put back",
    where="autoplan/patches/process_group.py",
    canary=_canary,
)


@contextmanager
def alone() -> Iterator[set[str]]:
    """The model's code finds no process group. Gives the names of what it asked for, as it asks."""
    asked: set[str] = set()
    _listeners.append(asked)
    try:
        with patched(PROCESS_GROUP, (Place(dist, name, _made(name)) for name in (*_ANSWERS, *_NOTHING, *_REFUSED))):
            yield asked
    finally:
        _listeners[:] = [one for one in _listeners if one is not asked]


_listeners: list[set[str]] = []


def _made(name: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def instead(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_filename.startswith(_OURS):
                return original(*args, **kwargs)
            for asked in _listeners:
                asked.add(name)
            if name in _ANSWERS:
                return _ANSWERS[name]
            if name in _NOTHING:
                return None
            raise CaptureError(
                f"the model's forward calls torch.distributed.{name} itself, though it was told that there is no group",
                hint="let it do so only where torch.distributed.is_initialized(), which is False while a plan is made",
            )

        return instead

    return make
