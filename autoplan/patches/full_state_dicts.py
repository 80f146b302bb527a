"""Whole tensors that torch cuts for a sharded model: `set_model_state_dict(..., full_state_dict=True)`.

torch cuts each of them evenly, in the checkpoint's shape, and copies the piece into the parameter's own. A parameter
that has more rows than the checkpoint (some lie on several ranks) has room for another number: an error about sizes on
one rank, while the others wait. Such a tensor is left whole: loading it cuts it as it lies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed._state_dict_utils as utils

from autoplan.patches.patched import Hold, Patch, Place, hold

__all__ = ["FULL_STATE_DICTS", "left_whole"]


def left_whole(wanted: Callable[[Any, torch.Tensor], bool], patch: Patch | None = None) -> Hold:
    """Until the hold is released, torch leaves a tensor whole where `wanted` says so of a parameter and its tensor."""

    def leaving(plain: Any) -> Any:
        def _distribute_tensors(local_state_dict: dict[str, Any], keys: list[str], *args: Any, **kwargs: Any) -> None:
            for key in keys:
                found = local_state_dict.get(key)
                if isinstance(found, tuple) and wanted(*found):
                    local_state_dict[key] = found[1]
            plain(local_state_dict, keys, *args, **kwargs)

        return _distribute_tensors

    return hold(patch or FULL_STATE_DICTS, [Place(utils, "_distribute_tensors", leaving)])


def _canary() -> bool:
    """Does torch hand over a parameter and its whole tensor, and take a tensor for something that is done?"""
    apart = replace(FULL_STATE_DICTS, name="canary of full state dicts")  # sharded models may hold the patch itself
    parameter, whole = torch.zeros(2), torch.ones(3)
    state: dict[str, Any] = {"weight": (parameter, whole)}
    held = left_whole(lambda one, other: one is parameter and other is whole, apart)
    try:
        vars(utils)["_distribute_tensors"](state, ["weight"], torch.device("cpu"), "no group")
    finally:
        held.release()
    user = vars(utils)["_broadcast_tensors"].__code__.co_names
    return state == {"weight": whole} and "_distribute_tensors" in user


FULL_STATE_DICTS = Patch(
    name="full state dicts",
    replaces="torch.distributed._state_dict_utils._distribute_tensors",
    why="a parameter with rows that several ranks hold is no even piece of the checkpoint's tensor",
    scope="while a model that `parallelize` has split lives, or one of its parameters",
    undone="torch's own comes back when the last such model is collected or undone",
    where="autoplan/execute/parameters/following.py",
    canary=_canary,
)
