"""Lengths of vectors of which every rank holds a part: the squares are summed over ranks, then the root is taken.

A call may return the lengths themselves (`norm`), or what it divides by them (`normalize`, `_weight_norm`): there each
rank knows only its part of a length's gradient, so those parts are summed in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoplan.execute.collectives import RankGroup, copy_to_ranks, sum_over_ranks
from autoplan.execute.executors import At, executes
from autoplan.values import LengthCall

__all__: list[str] = []


@executes(LengthCall)
def _lengths_of(planned: LengthCall, at: At) -> Callable[[Any, Any, Any], Any]:
    group = at.group
    return lambda func, args, kwargs: _scaled(planned, args, kwargs, group)


def _scaled(planned: LengthCall, args: tuple[Any, ...], kwargs: dict[str, Any], group: RankGroup) -> Any:
    """What `planned`, a call that takes lengths over an axis of which x is this rank's part, returns on this rank."""
    name = planned.site.function
    given = dict(zip(_SIGNATURES.get(name, ("x",)), args, strict=False)) | kwargs
    x = next(iter(given.values()))
    x = x if kwargs.get("dtype") is None else x.to(kwargs["dtype"])
    lengths = _lengths(x, planned.dims, group)
    if name == "normalize":
        return x / copy_to_ranks(lengths, group).clamp_min(given.get("eps", 1e-12))
    if name == "_weight_norm":
        return x * (given["g"] / copy_to_ranks(lengths, group))
    return lengths if planned.keepdim else lengths.squeeze(planned.dims)


_SIGNATURES = {"normalize": ("input", "p", "dim", "eps"), "_weight_norm": ("v", "g", "dim")}


def _lengths(x: torch.Tensor, dims: tuple[int, ...], group: RankGroup) -> torch.Tensor:
    """Over `dims`, which stay as dims of 1. Where everything is zero the gradient is zero, as torch has it."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    squares = sum_over_ranks(wide.square().sum(dims, keepdim=True), group)
    return torch.where(squares > 0, squares, 1.0).sqrt().mul(squares > 0).to(x.dtype)
