"""Values that are a rank's shard of the positions, known wherever they turn up again.

Under sequence parallelism what blocks take in and return are shards. transformers collects just these tensors for a
caller that asks for hidden states, the first one behind our hook, and the plan may never have seen it. So the hooks
mark the tensors that they cut, and whatever marked leaves the model is gathered there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from autoplan.common.nested import flatten_tensors
from autoplan.values import SequenceName

__all__ = ["SequenceShard", "is_shard", "mark_shard", "shards_in"]

_MARK = "_autoplan_shard"


class SequenceShard(NamedTuple):
    """Along which dim a value is cut, and which sequence that is."""

    dim: int
    sequence: SequenceName


def mark_shard(tensor: torch.Tensor, shard: SequenceShard) -> torch.Tensor:
    """The tensor itself, which now says that it is a shard."""
    setattr(tensor, _MARK, shard)
    return tensor


def is_shard(tensor: torch.Tensor) -> bool:
    """Does the tensor say that it is a shard?"""
    return hasattr(tensor, _MARK)


def shards_in(output: Any) -> list[tuple[tuple[Any, ...], SequenceShard]]:
    """The paths of all marked tensors in what a model returns."""
    found = ((path, getattr(tensor, _MARK, None)) for path, tensor in flatten_tensors(output))
    return [(path, shard) for path, shard in found if shard is not None]
