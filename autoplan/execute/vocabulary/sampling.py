"""Choose tokens from sharded logits: top-k, argmax, sampling."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from autoplan.common.errors import AutoplanError
from autoplan.common.layout import chunk
from autoplan.common.options import check_argument
from autoplan.common.torch_internals import assert_async
from autoplan.execute.collectives import RankGroup, all_gather_rows, all_reduce, sum_over_ranks
from autoplan.execute.vocabulary.shards import Columns, Ranks, chunk_size, chunks, columns_of, plain, wide

# Top-k and top-p of a row of which each rank holds some columns.
#
# The problem: both rules sort a row from the likeliest token down, and no rank holds a full row. But what they keep is
# determined by one number per row: its floor, the lowest logit that is kept. Top-k's floor is among every rank's best
# k, which are few. Top-p's is found by bisection: each rank sorts its own columns once and computes the mass above a
# guess; the sum over ranks decides whether to guess higher or lower. The bisection runs over the bit patterns of
# floats, so the floor is exactly one of the logits.
#
# Tokens with equal logits are kept or left out together, so that the result does not depend on how ties are sorted.


def check_filters(temperature: float, top_k: int | None, top_p: float | None, vocabulary: int) -> None:
    """Raise if the filters are malformed or keep nothing."""
    check_argument("temperature", temperature, (int, float), "pass a positive number")
    if top_k is not None:
        check_argument("top-k", top_k, int, f"pass an integer from 1 to {vocabulary}, the vocabulary size")
    if top_p is not None:
        check_argument("top-p", top_p, (int, float), "pass a number above 0, up to 1, which keeps all")
    if not temperature > 0:
        raise AutoplanError(f"temperature={temperature}", hint="pass a positive number; use argmax for 0")
    if top_k is not None and not 1 <= top_k <= vocabulary:
        raise AutoplanError(f"top_k={top_k}", hint=f"pass an integer from 1 to {vocabulary}, the vocabulary size")
    if top_p is not None and not 0 < top_p <= 1:
        raise AutoplanError(f"top_p={top_p}", hint="pass a number above 0, up to 1, which keeps all")


@torch.no_grad()
def floor_of(
    columns: Columns, temperature: float, top_k: int | None, top_p: float | None, chunk_tokens: int | None = None
) -> torch.Tensor | None:
    """Return the lowest kept logit of each row; None if all are kept. Top-p works on what top-k has left."""
    top_p = None if top_p == 1 else top_p
    top_k = None if top_k == columns.size else top_k
    if top_k is None and top_p is None:
        return None
    rows = columns.rows.detach()
    widest = len(chunk(columns.size, columns.group.size, 0))  # as many chunks on each rank: each communicates
    floors = []
    for at in chunks(rows, chunk_size(chunk_tokens, widest)):
        some = rows[at].to(wide(rows.dtype))
        if top_k is not None:
            floor = top_columns(columns, some, top_k)[0][:, -1]
            some = some.masked_fill(some < floor[:, None], -float("inf"))
        floors.append(floor if top_p is None else _floor_of_mass(columns.group, some, temperature, top_p))
    return torch.cat(floors) if floors else rows.new_zeros(0, dtype=wide(rows.dtype))


def top_columns(columns: Columns, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the `count` largest logits of each row and their tokens, replicated: each rank's best are gathered. `rows`
    are this rank's columns of some rows. On equal logits lower ranks come first."""
    ranks = columns.group
    sizes = [min(count, len(chunk(columns.size, ranks.size, rank))) for rank in range(ranks.size)]
    best, token = rows.topk(sizes[ranks.rank], dim=-1)
    token = token + columns.own.start
    if ranks.size == 1:
        return best, token
    best, token = (all_gather_rows(part, ranks, 1, sizes) for part in (best, token))
    best, order = best.sort(dim=-1, descending=True, stable=True)
    return best[:, :count], token.gather(1, order[:, :count])


def _floor_of_mass(ranks: RankGroup, rows: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Return the lowest logit above which less than `top_p` of the mass lies."""
    peak = _peak(ranks, rows)
    falling = rows.sort(dim=-1, descending=True).values
    mass = torch.exp((falling - peak[:, None]) / temperature).cumsum(-1, dtype=torch.float64)
    mass, rising = F.pad(mass, (1, 0)), -falling
    wanted = top_p * _over(ranks, mass[:, -1], "sum")
    low, high = _ordered(torch.full_like(peak, -float("inf"))), _ordered(peak)  # a floor too low, a floor high enough
    for _ in range(peak.element_size() * 8):
        guess = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        above = torch.searchsorted(rising, -_ordered(guess).view(peak.dtype)[:, None])
        enough = _over(ranks, mass.gather(1, above)[:, 0], "sum") < wanted
        low, high = torch.where(enough, low, guess), torch.where(enough, guess, high)
    return _ordered(high).view(peak.dtype)


def _peak(ranks: RankGroup, rows: torch.Tensor) -> torch.Tensor:
    """Return the largest logit of each row, over all ranks."""
    return _over(ranks, rows.amax(-1) if rows.shape[1] else rows.new_full(rows.shape[:1], -float("inf")), "max")


def _over(ranks: RankGroup, x: torch.Tensor, op: str) -> torch.Tensor:
    return x if ranks.size == 1 else all_reduce(x, ranks, op)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Map the bits of floats to integers in the same order, and back again."""
    kind = {4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.view(kind)
    return torch.where(bits < 0, bits ^ torch.iinfo(kind).max, bits)


# Some logits of each sharded row: those of given tokens, or the largest ones.
#
# In distillation a teacher sends these to a student: a few logits with their tokens instead of a full row.


class TopLogits(NamedTuple):
    """The largest logits of each row [..., k], largest first, and their tokens in the full vocabulary."""

    values: torch.Tensor
    tokens: torch.Tensor


def vocab_parallel_gather(
    logits: torch.Tensor, tokens: torch.Tensor, *, group: Ranks | None = None, vocabulary: int | None = None
) -> torch.Tensor:
    """Return the logits [..., n] of given tokens [..., n], out of logits [..., vocabulary]."""
    columns = columns_of(logits, group, vocabulary)
    check_argument("tokens", tokens, torch.Tensor, "pass token ids, any number for each row of logits")
    tokens = plain(tokens).to(logits.device)
    if tokens.shape[:-1] != columns.local.shape[:-1]:
        raise AutoplanError(
            f"tokens of shape {list(tokens.shape)} for logits of shape {list(logits.shape)}",
            hint="any number of tokens per row of logits, in the last dim",
        )
    assert_async(((tokens >= 0) & (tokens < columns.size)).all(), "a token id is outside the vocabulary")
    return _gathered(columns, tokens.reshape(-1, tokens.shape[-1])).view(tokens.shape)


def vocab_parallel_topk(
    logits: torch.Tensor,
    k: int,
    *,
    group: Ranks | None = None,
    vocabulary: int | None = None,
    chunk_tokens: int | None = None,
) -> TopLogits:
    """Return the `k` largest logits of each row of logits [..., vocabulary], with gradients, and their tokens."""
    columns = columns_of(logits, group, vocabulary)
    check_argument("k", k, int, f"pass an integer from 1 to {columns.size}, the vocabulary size")
    if not 1 <= k <= columns.size:
        raise AutoplanError(f"k={k}", hint=f"pass an integer from 1 to {columns.size}, the vocabulary size")
    rows = columns.rows.detach()
    steps = chunks(rows, chunk_size(chunk_tokens, len(chunk(columns.size, columns.group.size, 0))))
    best = [top_columns(columns, rows[at].to(wide(rows.dtype)), k)[1] for at in steps]
    tokens = torch.cat(best) if best else torch.zeros(0, k, dtype=torch.long, device=rows.device)
    shape = (*columns.local.shape[:-1], k)
    return TopLogits(_gathered(columns, tokens).view(shape), tokens.view(shape))


def _gathered(columns: Columns, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of given tokens; one rank has each, and the others add zero, which is exact."""
    rows = columns.rows if columns.local.shape[-1] else F.pad(columns.rows, (0, 1))
    own = (tokens >= columns.own.start) & (tokens < columns.own.stop)
    picked = rows.gather(1, torch.where(own, tokens - columns.own.start, 0))
    return sum_over_ranks(torch.where(own, picked, 0.0), columns.group)


# Choose tokens from sharded logits without gathering them; every rank chooses the same.
#
# Sampling inverts the distribution: one uniform number per row, the first rank's on all ranks, selects a rank's columns
# and then a column. So the probability of a token does not depend on the number of ranks, and a generator state
# determines the text.


@torch.no_grad()
def vocab_parallel_argmax(
    logits: torch.Tensor, *, group: Ranks | None = None, vocabulary: int | None = None
) -> torch.Tensor:
    """Return the most likely token of each row of logits [..., vocabulary]; the first one on a tie."""
    columns = columns_of(logits, group, vocabulary)
    rows, ranks = columns.rows.to(wide(logits.dtype)), columns.group
    if rows.shape[1]:
        rows = rows.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=-float("inf"))
        best = rows.amax(-1)
        token = (rows == best[:, None]).int().argmax(-1) + columns.own.start
    else:
        best, token = rows.new_full(rows.shape[:1], -float("inf")), torch.zeros_like(rows[:, :0].sum(-1).long())
        token = token + columns.size
    if ranks.size > 1:
        peak = all_reduce(best, ranks, "max")
        token = all_reduce(torch.where(best == peak, token, columns.size), ranks, "min")
    return token.view(columns.local.shape[:-1])


@torch.no_grad()
def vocab_parallel_sample(
    logits: torch.Tensor,
    *,
    group: Ranks | None = None,
    vocabulary: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return a token drawn from each row of logits [..., vocabulary], among its `top_k` most likely ones if given.

    With `top_p`, it is among the likeliest that together reach this share of the mass (of what top-k has left). For
    gathered logits, `group` is the ranks that draw the same.
    """
    if isinstance(logits, DTensor) or vocabulary is not None:
        columns = columns_of(logits, group, vocabulary)
    elif group is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise AutoplanError(
            f"from full logits of shape {list(logits.shape)} each of {dist.get_world_size()} ranks would draw "
            "its own tokens",
            hint="pass group=, the ranks that must draw the same, or keep the logits sharded: `with "
            "autoplan.gather_logits(model, False)`",
        )
    else:
        columns = columns_of(logits)
    check_filters(temperature, top_k, top_p, columns.size)
    rows = columns.rows.to(wide(logits.dtype))
    if top_p is not None:
        floor, top_k = floor_of(columns, temperature, top_k, top_p), None
        rows = rows if floor is None else rows.masked_fill(rows < floor[:, None], -float("inf"))
    rows = rows / temperature
    # One number in [0, 1) per row: the first rank's draw.
    ranks = columns.group if group is None or columns.group.size > 1 else RankGroup.of(group)
    device = rows.device if generator is None else generator.device
    uniform = torch.rand(rows.shape[0], dtype=torch.float64, device=device, generator=generator).to(rows.device)
    if ranks.size > 1:
        uniform = all_reduce(uniform if ranks.rank == 0 else torch.zeros_like(uniform), ranks)
    if top_k is None:
        return _draw(columns, rows, uniform).view(columns.local.shape[:-1])
    # Each rank's best few are gathered on every rank.
    best, tokens = top_columns(columns, rows, top_k)
    mass = torch.softmax(best, -1, dtype=torch.float64).cumsum(-1)
    return tokens.gather(1, _at(mass, uniform * mass[:, -1])[:, None])[:, 0].view(columns.local.shape[:-1])


def _draw(columns: Columns, rows: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    ranks = columns.group
    mass = torch.exp(rows - _peak(ranks, rows)[:, None]).cumsum(-1, dtype=torch.float64)
    mine = mass[:, -1] if rows.shape[1] else uniform.new_zeros(uniform.shape)
    everyone = mine[None] if ranks.size == 1 else all_gather_rows(mine[None], ranks, 0, [1] * ranks.size)
    ends = everyone.cumsum(0)  # [ranks, rows]: the cumulated mass after each rank
    place = uniform * ends[-1]
    holder = _at(ends.T, place)
    token = torch.zeros_like(holder)
    if rows.shape[1]:
        start = torch.where(holder > 0, ends.T.gather(1, (holder - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        token = _at(mass, place - start) + columns.own.start
    if ranks.size == 1:
        return token
    return all_reduce(torch.where(holder == ranks.rank, token, 0), ranks)


def _at(mass: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Return the first index of each row whose cumulated mass exceeds the place; it always has mass of its own."""
    index = torch.searchsorted(mass.contiguous(), place[:, None].contiguous(), right=True)[:, 0]
    last = (mass < mass[:, -1:]).sum(-1)  # rounding may put the place at the very end
    return torch.minimum(index, last)
