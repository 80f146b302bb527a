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

Dropped = Callable[[torch.Tensor, float], torch.Tensor]
_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@executes(AttentionCall)
def _attention(planned: AttentionCall, at: At) -> Callable[[Any, Any, Any], Any]:
    group, randomness = at.group, at.running.randomness

    def dropped(attention: torch.Tensor, rate: float) -> torch.Tensor:
        """Each rank draws for its own heads."""
        with randomness.split():
            return F.dropout(attention, rate)

    return lambda func, args, kwargs: _of_a_rank(group, dropped, args, kwargs)


def _of_a_rank(group: RankGroup, dropped: Dropped, args: Any, kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Positions come first, then batch. Weights, packed or not, hold this rank's rows of queries, keys and values."""
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    width = given["query"].shape[-1] // given["num_heads"]
    batched = given["query"].dim() == 3
    q, k, v = _projected(given, width)
    scores = (q * math.sqrt(1.0 / width)) @ k.transpose(-2, -1)
    attention = (scores + _mask(given, scores)).softmax(-1)
    if given["training"] and given["dropout_p"] > 0:
        attention = dropped(attention, given["dropout_p"])
    mixed = (attention @ v).permute(2, 0, 1, 3).flatten(2)
    out = sum_over_ranks(F.linear(mixed, given["out_proj_weight"]), group)
    out = out if given["out_proj_bias"] is None else out + given["out_proj_bias"]
    out = out if batched else out.squeeze(1)
    if not given["need_weights"]:
        return out, None
    average = sum_over_ranks(attention.sum(1), group) / given["num_heads"]
    return out, average if batched else average.squeeze(0)


def _projected(given: dict[str, Any], width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of this rank's heads: batch, heads, positions, width.

    What is learnt besides (`bias_k`, `bias_v`) and a zero are keys and values behind all others.
    """
    apart = [given[f"{name}_proj_weight"] for name in "qkv"]
    weights = apart if given["use_separate_proj_weight"] else given["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    inputs = [x if x.dim() == 3 else x.unsqueeze(1) for x in (given["query"], given["key"], given["value"])]
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (-1, width)).permute(1, 2, 0, 3)
        for x, w, b in zip(inputs, weights, biases, strict=True)
    )
    if given["bias_k"] is not None and given["bias_v"] is not None:
        k, v = (
            torch.cat([x, more.unflatten(-1, (-1, width)).permute(1, 2, 0, 3).expand(x.shape[0], -1, -1, -1)], 2)
            for x, more in ((k, given["bias_k"]), (v, given["bias_v"]))
        )
    if given["add_zero_attn"]:
        k, v = (torch.cat([x, x.new_zeros((*x.shape[:2], 1, width))], 2) for x in (k, v))
    return q, k, v


def _mask(given: dict[str, Any], scores: torch.Tensor) -> torch.Tensor:
    """What is added to the scores: positions hidden from all, keys hidden by row, the future."""
    keys = given["key"].shape[0]  # of what stands behind them nothing is hidden
    total = scores.new_zeros((1, 1, scores.shape[-2], keys))
    if given["attn_mask"] is not None:
        total = total + _added(given["attn_mask"], scores)
    elif given["is_causal"]:
        total = total + _added(torch.ones_like(total[0, 0], dtype=torch.bool).triu(1), scores)
    if given["key_padding_mask"] is not None:
        total = total + _added(given["key_padding_mask"].reshape(-1, 1, 1, keys), scores)
    return F.pad(total, (0, scores.shape[-1] - keys))


def _added(mask: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, -math.inf)
