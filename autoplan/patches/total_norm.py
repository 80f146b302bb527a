"""torch's norm of all gradients, where some rows lie on several ranks.

`torch.nn.utils.clip_grad_norm_` and `get_total_norm` are given gradients, and a DTensor says nothing of rows that two
ranks hold: they would count twice. Callers import both by name before any model is sharded, so what is replaced is
what both keep in a closure: the function under their `torch.no_grad`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm

from autoplan.patches.patched import Hold, Patch, Place, hold

__all__ = ["TOTAL_NORM", "norm_of"]


def norm_of(counted: Callable[[list[torch.Tensor]], list[torch.Tensor]], patch: Patch | None = None) -> Hold:
    """Until the hold is released, torch takes the norm of what `counted` makes of gradients."""

    def counting(plain: Any) -> Any:
        @functools.wraps(plain)
        def total_norm(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            return plain(counted(given), *args, **kwargs)

        return total_norm

    (cell,) = get_total_norm.__closure__
    return hold(patch or TOTAL_NORM, [Place(cell, "cell_contents", counting)])


def _canary() -> bool:
    """Do both take the norm of what we make of the gradients?"""
    apart = replace(TOTAL_NORM, name="canary of the norm of gradients")  # sharded models may hold the patch itself
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    held = norm_of(lambda gradients: [4 * one for one in gradients], apart)
    try:
        norms = (
            clip_grad_norm_(iter([weight]), 100.0),
            get_total_norm(iter([weight.grad])),
        )
    finally:
        held.release()
    return all(abs(float(norm) - 32**0.5) < 1e-5 for norm in norms) and float(weight.grad[0]) == 1


TOTAL_NORM = Patch(
    name="norm of gradients",
    replaces="the function in the closure of torch.nn.utils.get_total_norm",
    why="rows that several ranks hold count once in the norm by which torch clips",
    scope="while a model with such rows lives, or one of its parameters",
    undone="torch's own comes back when the last such model is collected or undone",
    where="autoplan/execute/parameters/following.py",
    canary=_canary,
)
