"""A variance over an axis of which every rank holds a part.

The mean and the spread of each rank's part say all that the whole needs: the variance is the average spread plus that
of the means. Ranks gather those two numbers and put them together, each for itself. So one small all-gather serves
forward, and backward needs nothing: every rank has the whole gradient and keeps what belongs to its own two numbers.
Summing x and x² instead would be as cheap, and lose digits.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from autoplan.execute.collectives import RankGroup, gather_over_ranks
from autoplan.execute.executors import At, executes
from autoplan.values import VarianceCall

__all__: list[str] = []


@executes(VarianceCall)
def _variance(planned: VarianceCall, at: At) -> Callable[[Any, Any, Any], torch.Tensor]:
    group = at.group
    return lambda func, args, kwargs: _over_ranks(planned, args[0] if args else kwargs["input"], group)


def _over_ranks(planned: VarianceCall, x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """`var` or `std` of the whole of which x is this rank's part."""
    dims, held = planned.dims, planned.held
    wide = x.float() if x.dtype.itemsize < 4 else x
    spread, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    own = torch.stack((mean, spread)).unsqueeze(0)
    ranks = tuple((rank,) for rank in range(group.size))
    means, spreads = gather_over_ranks(own, group, 0, ranks).unbind(1)
    parts = wide.new_tensor(held).div(sum(held)).view(-1, *[1] * x.dim())
    whole = (parts * means).sum(0)
    count = prod(x.size(dim) for dim in dims) * sum(held) / held[group.rank]
    variance = (parts * (spreads + (means - whole).square())).sum(0) * count / max(count - planned.correction, 0)
    result = variance.sqrt() if planned.site.function == "std" else variance
    return (result if planned.keepdim else result.squeeze(dims)).to(x.dtype)
