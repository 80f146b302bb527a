"""Hear of every optimizer that is made while a sharded model lives.

torch has hooks for an optimizer's state dict, its steps and its loads, but none for its creation. A hook on the first
step comes too late: a run that goes on loads its states before that, and they would lie whole on every device until
then. So `Optimizer.__init__` tells us, for as long as there are parameters whose states need an order, and no longer.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from autoplan.patches.patched import Hold, Patch, Place, hold

__all__ = ["OPTIMIZERS", "told_of_new_optimizers"]


def told_of_new_optimizers(tell: Callable[[Optimizer], None], patch: Patch | None = None) -> Hold:
    """Call `tell` with every new optimizer, from now on until the hold is released."""

    def telling(plain_init: Any) -> Any:
        @functools.wraps(plain_init)
        def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
            plain_init(self, *args, **kwargs)
            tell(self)

        return __init__

    return hold(patch or OPTIMIZERS, [Place(Optimizer, "__init__", telling)])


def _canary() -> bool:
    """Does every optimizer go through `Optimizer.__init__`, and have its groups and hooks when that has ended?"""
    seen: list[tuple[type, int]] = []
    apart = replace(OPTIMIZERS, name="canary of optimizers")  # sharded models may hold the patch itself
    told = told_of_new_optimizers(lambda made: seen.append((type(made), len(made.param_groups[0]["params"]))), apart)
    kinds = (torch.optim.SGD, torch.optim.AdamW)
    try:
        made = [kind([torch.nn.Parameter(torch.ones(2))], lr=0.1) for kind in kinds]
    finally:
        told.release()
    hooks = (Optimizer.register_state_dict_post_hook, Optimizer.register_load_state_dict_pre_hook)
    taken = all(list(inspect.signature(hook).parameters)[:2] == ["self", "hook"] for hook in hooks)
    return taken and [(kind, 1) for kind in kinds] == [one for one in seen if one[0] in map(type, made)]


OPTIMIZERS = Patch(
    name="creation of optimizers",
    replaces="torch.optim.Optimizer.__init__",
    why="optimizer states of packed weights lie in rank order; their state dicts must be in the checkpoint's",
    scope="while a model that `parallelize` has split lives, or one of its parameters",
    undone="torch's own comes back when the last such model is collected or undone",
    where="autoplan/execute/parameters/following.py",
    canary=_canary,
)
