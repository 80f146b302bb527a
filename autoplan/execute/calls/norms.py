"""layer_norm and rms_norm whose statistic spans all ranks: sums are reduced forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoplan.execute.collectives import RankGroup, copy_to_ranks, sum_over_ranks
from autoplan.execute.executors import At, executes
from autoplan.values import NormCall

__all__: list[str] = []


@executes(NormCall)
def _norm(planned: NormCall, at: At) -> Callable[[Any, Any, Any], torch.Tensor]:
    group, count, layer = at.group, planned.count, planned.statistics == 2
    dims = tuple(range(-planned.dims, 0))

    def run(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        def given(position: int, key: str) -> Any:
            return args[position] if len(args) > position else kwargs.get(key)

        x = args[0]
        weight, bias = given(2, "weight"), given(3, "bias") if layer else None
        eps = given(4 if layer else 3, "eps")
        if eps is None:
            eps = 1e-5 if layer else torch.finfo(x.dtype).eps
        if layer:
            x = x - _statistic(x, dims, group) / count
        x = x * torch.rsqrt(_statistic(x.pow(2), dims, group) / count + eps)
        if weight is not None:
            x = x * weight
        return x if bias is None else x + bias

    return run


def _statistic(x: torch.Tensor, dims: tuple[int, ...], group: RankGroup) -> torch.Tensor:
    return copy_to_ranks(sum_over_ranks(x.sum(dims, keepdim=True), group), group)
