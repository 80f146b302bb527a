"""Fused calls carried out on a shard: multi-head attention and recurrent networks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from autoplan.common.layout import Layout
from autoplan.execute.collectives import RankGroup, copy_to_ranks, gather_over_ranks, sum_over_ranks, take_rows
from autoplan.execute.executors import At, executes
from autoplan.values import AttentionCall, CellCall, RecurrentCall

# `multi_head_attention_forward` on one rank's heads: the same mathematics, with the last sum taken over ranks.

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
    arguments = bound.arguments
    width = arguments["query"].shape[-1] // arguments["num_heads"]
    batched = arguments["query"].dim() == 3
    q, k, v = _projected(arguments, width)
    scores = (q * math.sqrt(1.0 / width)) @ k.transpose(-2, -1)
    # What is added to the scores: positions hidden from all, keys hidden by row, the future
    keys = arguments["key"].shape[0]  # of what stands behind them nothing is hidden
    total = scores.new_zeros((1, 1, scores.shape[-2], keys))
    if arguments["attn_mask"] is not None:
        total = total + _added(arguments["attn_mask"], scores)
    elif arguments["is_causal"]:
        total = total + _added(torch.ones_like(total[0, 0], dtype=torch.bool).triu(1), scores)
    if arguments["key_padding_mask"] is not None:
        total = total + _added(arguments["key_padding_mask"].reshape(-1, 1, 1, keys), scores)
    attention = (scores + F.pad(total, (0, scores.shape[-1] - keys))).softmax(-1)
    if arguments["training"] and arguments["dropout_p"] > 0:
        attention = dropped(attention, arguments["dropout_p"])
    mixed = (attention @ v).permute(2, 0, 1, 3).flatten(2)
    out = sum_over_ranks(F.linear(mixed, arguments["out_proj_weight"]), group)
    out = out if arguments["out_proj_bias"] is None else out + arguments["out_proj_bias"]
    out = out if batched else out.squeeze(1)
    if not arguments["need_weights"]:
        return out, None
    average = sum_over_ranks(attention.sum(1), group) / arguments["num_heads"]
    return out, average if batched else average.squeeze(0)


def _projected(given: dict[str, Any], width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of this rank's heads: batch, heads, positions, width. What is learnt besides (`bias_k`,
    `bias_v`) and a zero are keys and values behind all others."""
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


def _added(mask: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, -math.inf)


# Recurrent networks on ranks: a call of all steps with gathered weights, a cell's step on a rank's hidden units.
#
# A step needs all of the state before it, so something must be gathered. Where one call runs all steps (one kernel,
# where there is one), that is the weights, once. Where the model's own Python makes the steps, it is the new state of
# each.

Run = Callable[[Any, Any, Any], Any]  # of the torch function, its args, its kwargs


@executes(RecurrentCall)
def _all_steps(planned: RecurrentCall, at: At) -> Run:
    group = at.group
    weights = [(weight.path[1:], Layout.parse(weight.layout).rows_of_all(group.size)) for weight in planned.weights]

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        given = list(args)
        for (place, item), rows in weights:
            several = list(given[place])
            several[item] = gather_over_ranks(several[item], group, 0, rows)
            given[place] = several
        return func(*given, **kwargs)

    return run


@executes(CellCall)
def _one_step(planned: CellCall, at: At) -> Run:
    group, step, layout = at.group, _STEPS[planned.site.function], Layout.parse(planned.layout)
    rows = layout.rows_of_all(group.size)
    units = layout.parts[-1].rows_of_all(group.size) if "*" in planned.layout else rows

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        x, state, of_input, of_state, *biases = args
        first, second = biases or (None, None)
        before = (state,) if isinstance(state, torch.Tensor) else tuple(state)
        from_x = F.linear(copy_to_ranks(x, group), of_input, first)
        from_state = F.linear(copy_to_ranks(before[0], group), of_state, second)
        if planned.by_unit:
            before = tuple(take_rows(copy_to_ranks(one, group), -1, units[group.rank]) for one in before)
            made = tuple(gather_over_ranks(one, group, -1, units) for one in step(from_x, from_state, *before))
        else:
            gates = (gather_over_ranks(one, group, -1, rows) for one in (from_x, from_state))
            made = step(*gates, *before)
        return made if len(made) > 1 else made[0]

    return run


def _lstm(x: torch.Tensor, h: torch.Tensor, _: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, ...]:
    enter, forget, new, leave = (x + h).chunk(4, -1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru(x: torch.Tensor, h: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor]:
    (reset, update, new), (reset_h, update_h, new_h) = x.chunk(3, -1), h.chunk(3, -1)
    new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return ((before - new) * (update + update_h).sigmoid() + new,)


def _plain(
    activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, h: torch.Tensor, _: torch.Tensor
) -> Any:
    return (activation(x + h),)


_STEPS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "lstm_cell": _lstm,
    "gru_cell": _gru,
    "rnn_tanh_cell": partial(_plain, torch.tanh),
    "rnn_relu_cell": partial(_plain, torch.relu),
}
