"""`multi_head_attention_forward` on one rank's heads: the same mathematics, with the last sum taken over ranks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from autoplan.execute.collectives import RankGroup, sum_over_ranks
from autoplan.execute.executors import At, executes
from autoplan.values import AttentionCall

__all__: list[str] = []

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@executes(AttentionCall)
def _attention(planned: AttentionCall, at: At) -> Callable[[Any, Any, Any], Any]:
    group = at.group
    return lambda func, args, kwargs: _of_a_rank(group, args, kwargs)


def _of_a_rank(group: RankGroup, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Positions come first, then batch. The packed weight holds this rank's rows of queries, keys and values."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    width = given["query"].shape[-1] // given["num_heads"]
    weights = given["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    inputs = given["query"], given["key"], given["value"]
    batched = [x.dim() == 3 for x in inputs]
    q, k, v = (
        F.linear(x if three else x.unsqueeze(1), w, b).unflatten(-1, (-1, width)).permute(1, 2, 0, 3)
        for x, three, w, b in zip(inputs, batched, weights, biases, strict=True)
    )  # batch, heads, positions, width
    scores = (q * math.sqrt(1.0 / width)) @ k.transpose(-2, -1)
    attention = (scores + _mask(given, scores)).softmax(-1)
    mixed = (attention @ v).permute(2, 0, 1, 3).flatten(2)
    out = sum_over_ranks(F.linear(mixed, given["out_proj_weight"]), group)
    out = out if given["out_proj_bias"] is None else out + given["out_proj_bias"]
    out = out if batched[0] else out.squeeze(1)
    if not given["need_weights"]:
        return out, None
    average = sum_over_ranks(attention.sum(1), group) / given["num_heads"]
    return out, average if batched[0] else average.squeeze(0)


def _mask(given: dict[str, Any], scores: torch.Tensor) -> torch.Tensor:
    """What is added to the scores: positions hidden from all, keys hidden by row, the future."""
    total = scores.new_zeros((1, 1, *scores.shape[-2:]))
    if given["attn_mask"] is not None:
        total = total + _added(given["attn_mask"], scores)
    elif given["is_causal"]:
        total = total + _added(torch.ones_like(total[0, 0], dtype=torch.bool).triu(1), scores)
    if given["key_padding_mask"] is not None:
        total = total + _added(given["key_padding_mask"].reshape(-1, 1, 1, scores.shape[-1]), scores)
    return total


def _added(mask: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, -math.inf)
