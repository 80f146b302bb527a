"""Lengths of vectors of which every rank holds a part: the squares are summed over ranks, then the root is taken.

A call may return the lengths themselves (`norm`), or what it divides by them (`normalize`, `_weight_norm`): there each
rank knows only its part of a length's gradient, so those parts are summed in backward.
"""

from __future__ import annotations

from typing import Any

import torch

from autoplan.execute.collectives import RankGroup, copy_to_ranks, sum_over_ranks
from autoplan.values import ScopedCall

__all__ = ["scaled_by_lengths"]


def scaled_by_lengths(planned: ScopedCall, args: tuple[Any, ...], kwargs: dict[str, Any], group: RankGroup) -> Any:
    """What `planned`, a call that takes lengths over an axis of which x is this rank's part, returns on this rank."""
    details = dict(planned.details)
    given = dict(zip(_SIGNATURES.get(planned.name, ("x",)), args, strict=False)) | kwargs
    x = next(iter(given.values()))
    x = x if kwargs.get("dtype") is None else x.to(kwargs["dtype"])
    lengths = _lengths(x, details["dims"], group)
    if planned.name == "normalize":
        return x / copy_to_ranks(lengths, group).clamp_min(given.get("eps", 1e-12))
    if planned.name == "_weight_norm":
        return x * (given["g"] / copy_to_ranks(lengths, group))
    return lengths if details["keepdim"] else lengths.squeeze(details["dims"])


_SIGNATURES = {"normalize": ("input", "p", "dim", "eps"), "_weight_norm": ("v", "g", "dim")}


def _lengths(x: torch.Tensor, dims: tuple[int, ...], group: RankGroup) -> torch.Tensor:
    """Over `dims`, which stay as dims of 1. Where everything is zero the gradient is zero, as torch has it."""
    wide = x.float() if x.dtype.itemsize < 4 else x
    squares = sum_over_ranks(wide.square().sum(dims, keepdim=True), group)
    return torch.where(squares > 0, squares, 1.0).sqrt().mul(squares > 0).to(x.dtype)
