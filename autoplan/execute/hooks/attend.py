"""Fused attention of a rank's own queries, with the keys and values of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right

from autoplan.execute.collectives import take_rows
from autoplan.execute.executors import At, executes, other_branch
from autoplan.execute.hooks.exchange import pad, positions_of_a_rank
from autoplan.execute.hooks.sequence import gather_sum
from autoplan.values import AttendAcross

_AFTER_VALUES = ("attn_mask", "dropout_p", "is_causal")


@executes(AttendAcross)
def _attend(planned: AttendAcross, at: At) -> Callable[[Any, Any, Any], torch.Tensor]:
    running, group, name, where = at.running, at.group, planned.sequence.name, f"{at.where}: {planned.site}"

    def run(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        (query, key, value, *more), length = args, running.lengths[name]
        options: dict[str, Any] = dict(zip(_AFTER_VALUES, more, strict=False)) | kwargs
        own = positions_of_a_rank(length, group)
        given, mask = [x.size(-2) for x in (query, key, value)], options.get("attn_mask")
        if given != [own] * 3 or (mask is not None and mask.size(-2) not in (1, length)):
            given += [] if mask is None else [mask.size(-2)]
            raise other_branch(
                f"{where} gets {given} positions (of a cache, perhaps), and a rank has {own} of {length}"
            )
        if own == 1 < length:
            raise other_branch(f"{where}: a rank has one of {length} positions, which code often treats apart")
        end = min((group.rank + 1) * own, length)
        count = max(1, end - group.rank * own)  # without padding; a rank that has nothing else keeps one
        key, value = (gather_sum(x, -2, length, group) for x in (key, value))
        if mask is not None and mask.size(-2) != 1:
            options["attn_mask"] = take_rows(mask, -2, range(end - count, end))
        elif mask is None and options.get("is_causal"):  # later keys are seen by none of these
            key, value = key[..., :end, :], value[..., :end, :]
            options |= {"attn_mask": _lower_right(count, end, query), "is_causal": False}
        seen = func(query[..., :count, :], key, value, **options)
        return pad(seen.movedim(-2, 0), own, values=True).movedim(0, -2)

    return run


def _lower_right(count: int, end: int, like: torch.Tensor) -> Any:
    """Return the causal mask of the last `count` of `end` positions; kernels for GPUs need none in memory."""
    if like.is_cuda:
        return causal_lower_right(count, end)
    return torch.ones(count, end, dtype=torch.bool, device=like.device).tril(end - count)
