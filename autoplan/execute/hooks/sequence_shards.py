"""Values that are a rank's share of the positions, known wherever they turn up again.

Under sequence parallelism what blocks take in and return are shares. transformers collects just these tensors for a
caller that asks for hidden states, the first one behind our hook, and the plan may never have seen it. So the hooks
mark the tensors that they cut, and whatever marked leaves the model is gathered there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from autoplan.common.nested import flatten_tensors
from autoplan.values import SequenceName

__all__ = ["Share", "is_share", "mark_share", "shares_in"]

_MARK = "_autoplan_share"


class Share(NamedTuple):
    """Along which dim a value is cut, and which sequence that is."""

    dim: int
    sequence: SequenceName


def mark_share(tensor: torch.Tensor, share: Share) -> torch.Tensor:
    """The tensor itself, which now says that it is a share."""
    setattr(tensor, _MARK, share)
    return tensor


def is_share(tensor: torch.Tensor) -> bool:
    """Does the tensor say that it is a share?"""
    return hasattr(tensor, _MARK)


def shares_in(output: Any) -> list[tuple[tuple[Any, ...], Share]]:
    """The paths of all marked tensors in what a model returns."""
    found = ((path, getattr(tensor, _MARK, None)) for path, tensor in flatten_tensors(output))
    return [(path, share) for path, share in found if share is not None]
