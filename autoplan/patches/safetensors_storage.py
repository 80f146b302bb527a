"""`safetensors.torch.save_model` and `save_file` of tensors that lie on ranks: one clear error.

They look at the memory of each tensor, and a DTensor has none of its own: torch's error is about a storage that Python
cannot use. Both are imported by name before any model is sharded; the function by which they ask for memory is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from autoplan.patches.patched import Hold, Patch, Place, hold

__all__ = ["SAFETENSORS_STORAGE", "told_of_stored"]


def told_of_stored(tell: Callable[[torch.Tensor], None], patch: Patch | None = None) -> Hold:
    """Until the hold is released, call `tell` with each tensor that safetensors is about to write; it may raise."""
    if find_spec("safetensors") is None:
        return Hold()

    def telling(plain: Any) -> Any:
        def storage_ptr(tensor: torch.Tensor) -> int:
            tell(tensor)
            pointer: int = plain(tensor)
            return pointer

        return storage_ptr

    return hold(patch or SAFETENSORS_STORAGE, [Place(import_module("safetensors.torch"), "storage_ptr", telling)])


def _canary() -> bool:
    """Do both ways to write tensors ask for their memory before anything else?"""
    if find_spec("safetensors") is None:
        return True
    theirs, seen = import_module("safetensors.torch"), []
    apart = replace(SAFETENSORS_STORAGE, name="canary of safetensors")  # sharded models may hold the patch itself

    def tell(tensor: torch.Tensor) -> None:
        seen.append(tensor.shape)
        raise ValueError("told")

    held = told_of_stored(tell, apart)
    try:
        for save, given in ((theirs.save_model, torch.nn.Linear(2, 2)), (theirs.save_file, {"one": torch.ones(2)})):
            try:
                save(given, "nowhere/at/all")
            except ValueError as error:
                seen.append(str(error))
    finally:
        held.release()
    return seen == [torch.Size([2, 2]), "told", torch.Size([2]), "told"]


SAFETENSORS_STORAGE = Patch(
    name="memory that safetensors writes",
    replaces="safetensors.torch.storage_ptr",
    why="a tensor that lies on ranks has no memory of its own; whoever saves it is told how to save a sharded model",
    scope="while a model that `parallelize` has split lives, or one of its parameters",
    undone="safetensors' own comes back when the last such model is collected or undone",
    where="autoplan/execute/parameters/following.py",
    canary=_canary,
    without="safetensors refuses a sharded model in its own words",
)
