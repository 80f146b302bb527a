"""Caches of keys and values in calls that are run again: what a block was given is kept as it was.

Most models leave their cache out when asked, and are asked while they train. Some make one whatever they are told, and
some share keys and values between blocks through it. The block's second run must find the cache as the first one did,
and must not fill it twice. So the second run gets a copy, made before the first. Tensors are not copied where autograd
watches over them: one that was changed in place since is an error, never a wrong gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError

__all__ = ["CacheCopies", "is_cache"]


def is_cache(value: Any) -> bool:
    """Is this an object that collects keys and values, or states?"""
    if value is None or isinstance(value, (torch.Tensor, str, int, float, Mapping, Sequence, Set, nn.Module, type)):
        return False
    return any(callable(getattr(value, name, None)) for name in dir(type(value)) if name.startswith("update"))


@dataclass
class CacheCopies:
    """The caches among a call's arguments, as they were, by place or name."""

    args: dict[int, Any]
    kwargs: dict[str, Any]
    versions: list[tuple[torch.Tensor, int]] = field(default_factory=list)

    @classmethod
    def of(cls, args: Sequence[Any], kwargs: Mapping[str, Any]) -> CacheCopies | None:
        """Copies for a second run; None where no cache is passed."""
        found = cls(
            {place: value for place, value in enumerate(args) if is_cache(value)},
            {name: value for name, value in kwargs.items() if is_cache(value)},
        )
        return found._copied(found.versions) if found.args or found.kwargs else None

    def put_into(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with caches as they were; the copies stay as they are for yet another run."""
        if any(tensor._version != version for tensor, version in self.versions):
            raise AutoplanError(
                "a cache was changed in place after a checkpointed block had read it: the block cannot be run again",
                hint=f"train without a cache ({conventions().cache_switch}=False)",
            )
        fresh = self._copied([])
        return tuple(fresh.args.get(place, value) for place, value in enumerate(args)), {**kwargs, **fresh.kwargs}

    def _copied(self, versions: list[tuple[torch.Tensor, int]]) -> CacheCopies:
        seen: dict[int, Any] = {}
        args = {place: _copy(value, seen, versions) for place, value in self.args.items()}
        kwargs = {name: _copy(value, seen, versions) for name, value in self.kwargs.items()}
        return CacheCopies(args, kwargs, versions)


def _copy(value: Any, seen: dict[int, Any], versions: list[tuple[torch.Tensor, int]]) -> Any:
    """Containers and caches in depth, tensors without gradient too; anything else is the same object."""
    if id(value) in seen:
        return seen[id(value)]
    if isinstance(value, torch.Tensor):
        if value.requires_grad:
            versions.append((value, value._version))
        seen[id(value)] = value if value.requires_grad else value.clone()
    elif type(value) in (list, tuple, set):
        seen[id(value)] = type(value)(_copy(item, seen, versions) for item in value)
    elif isinstance(value, dict):
        made = seen[id(value)] = copy.copy(value)
        made.update({key: _copy(item, seen, versions) for key, item in value.items()})
    elif is_cache(value) and hasattr(value, "__dict__"):
        made = seen[id(value)] = copy.copy(value)
        vars(made).update({name: _copy(item, seen, versions) for name, item in vars(value).items()})
    else:
        return value
    return seen[id(value)]
