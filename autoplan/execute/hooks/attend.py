"""Fused attention of a rank's own queries, with the keys and values of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right

from autoplan.common.conventions import conventions
from autoplan.common.torch_internals import is_fake, outside_of_modes
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
                f"{where} gets {given} positions, and a rank has {own} of {length} (a cache? "
                f"{conventions().cache_switch}=False)"
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
            options |= _causal_of_the_last(count, end, query)
        seen = func(query[..., :count, :], key, value, **options)
        return pad(seen.movedim(-2, 0), own, values=True).movedim(0, -2)

    return run


def _causal_of_the_last(count: int, end: int, query: torch.Tensor) -> dict[str, Any]:
    """Return the options for the last `count` of `end` positions. Kernels for GPUs need no mask in memory."""
    compiling = torch.compiler.is_compiling()
    if not compiling and (query.is_meta or is_fake(query)):  # no values are computed
        return {"is_causal": True}
    if not query.is_cuda:
        mask = torch.ones(count, end, dtype=torch.bool, device=query.device).tril(end - count)
    elif compiling:
        mask = causal_lower_right(count, end)
    else:  # a tensor of a class that cannot be made under a mode
        with outside_of_modes():
            mask = causal_lower_right(count, end)
    return {"attn_mask": mask, "is_causal": False}
