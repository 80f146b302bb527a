"""`parameter.data = x` of parameters that lie on ranks.

torch changes what its C++ side says of a DTensor's shape and type, and leaves the local tensor, with which everything
computes, as it was: the assignment does nothing, without a word. Averages of weights, quantisers and adapters that are
merged are written with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoplan.patches.patched import Hold, Patch, Place, hold

__all__ = ["PARAMETER_DATA", "data_assigned"]

_PLAIN: Any = torch.Tensor.data


def data_assigned(assign: Callable[[DTensor, Any], bool], patch: Patch | None = None) -> Hold:
    """Until the hold is released, `assign` carries out `x.data = y` of DTensors; where it says False, torch does."""

    def write(self: DTensor, value: Any) -> None:
        if not assign(self, value):
            _PLAIN.__set__(self, value)

    made = property(_PLAIN.__get__, write)
    return hold(patch or PARAMETER_DATA, [Place(DTensor, "data", lambda _: made, inherited=True)])


def _canary() -> bool:
    """Does a DTensor inherit `data`, from what can be assigned to?"""
    apart = replace(PARAMETER_DATA, name="canary of data of parameters")  # sharded models may hold the patch itself
    before = vars(DTensor).get("data")
    seen: list[Any] = []

    def assign(x: DTensor, value: Any) -> bool:
        seen.append(value)
        return True

    held = data_assigned(assign, apart)
    try:
        DTensor.data.__set__(torch.ones(2), 3)
    finally:
        held.release()
    plain = torch.ones(2)
    _PLAIN.__set__(plain, torch.zeros(2))
    return seen == [3] and vars(DTensor).get("data") is before and not plain.any() and not _PLAIN.__get__(plain).any()


PARAMETER_DATA = Patch(
    name="data of parameters",
    replaces="torch.distributed.tensor.DTensor.data",
    why="an assignment to it changes nothing that is computed with",
    scope="while a model that `parallelize` has split lives, or one of its parameters",
    undone="taken away when the last such model is collected or undone",
    where="autoplan/execute/parameters/following.py",
    canary=_canary,
)
