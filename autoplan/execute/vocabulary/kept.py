"""Which tokens of a row top-k and top-p keep, when each rank holds some columns of the row only.

The problem: both rules speak of a row sorted from the likeliest token down, and nobody holds a whole row. But what they
keep is told by one number a row: its floor, the lowest logit that is kept. Top-k's floor is among every rank's best k,
which are few. Top-p's is found by bisection: each rank sorts its own columns once, says how much mass lies above a
guess, and the sum over ranks says whether to guess higher or lower. Guesses are halved over the floating point numbers
themselves, so the floor is exactly one of the logits.

Tokens with equal logits are kept or left out together: which of them a sampler drew does not depend on how it sorts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from autoplan.common.errors import AutoplanError
from autoplan.common.layout import chunk
from autoplan.common.options import check_argument
from autoplan.execute.collectives import RankGroup, all_gather_rows, all_reduce
from autoplan.execute.vocabulary.shards import Columns, chunk_size, chunks, wide

__all__ = ["check_filters", "floor_of", "top_columns"]


def check_filters(temperature: float, top_k: int | None, top_p: float | None, vocabulary: int) -> None:
    """Refuse what keeps nothing."""
    check_argument("temperature", temperature, (int, float), "give a positive number")
    if top_k is not None:
        check_argument("top-k", top_k, int, f"give a whole number from 1 to {vocabulary}, the vocabulary")
    if top_p is not None:
        check_argument("top-p", top_p, (int, float), "give a number above 0, up to 1, which keeps all")
    if not temperature > 0:
        raise AutoplanError(f"temperature={temperature}", hint="give a positive number; argmax is its limit")
    if top_k is not None and not 1 <= top_k <= vocabulary:
        raise AutoplanError(f"top_k={top_k}", hint=f"give a whole number from 1 to {vocabulary}, the vocabulary")
    if top_p is not None and not 0 < top_p <= 1:
        raise AutoplanError(f"top_p={top_p}", hint="give a number above 0, up to 1, which keeps all")


@torch.no_grad()
def floor_of(
    columns: Columns, temperature: float, top_k: int | None, top_p: float | None, chunk_tokens: int | None = None
) -> torch.Tensor | None:
    """The lowest logit of each row that is kept; None where all are. Top-p works on what top-k has left."""
    top_p = None if top_p == 1 else top_p
    top_k = None if top_k == columns.size else top_k
    if top_k is None and top_p is None:
        return None
    rows = columns.rows.detach()
    widest = len(chunk(columns.size, columns.group.size, 0))  # as many chunks on each rank, for each communicates
    floors = [
        _floor(columns, rows[at].to(wide(rows.dtype)), temperature, top_k, top_p)
        for at in chunks(rows, chunk_size(chunk_tokens, widest))
    ]
    return torch.cat(floors) if floors else rows.new_zeros(0, dtype=wide(rows.dtype))


def _floor(
    columns: Columns, rows: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None
) -> torch.Tensor:
    floor = rows.new_full(rows.shape[:1], -float("inf"))
    if top_k is not None:
        floor = top_columns(columns, rows, top_k)[0][:, -1]
        rows = rows.masked_fill(rows < floor[:, None], -float("inf"))
    return floor if top_p is None else _floor_of_mass(columns.group, rows, temperature, top_p)


def top_columns(columns: Columns, rows: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest logits of each row and their tokens, on every rank the same: each rank's best come together.

    `rows` are this rank's columns of some rows. Of equal logits on different ranks the first rank's come first.
    """
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
    """The lowest logit above which less than `top_p` of the mass lies."""
    peak = rows.amax(-1) if rows.shape[1] else rows.new_full(rows.shape[:1], -float("inf"))
    peak = _over(ranks, peak, "max")
    falling = rows.sort(dim=-1, descending=True).values
    mass = torch.exp((falling - peak[:, None]) / temperature).cumsum(-1, dtype=torch.float64)
    mass, rising = F.pad(mass, (1, 0)), -falling
    wanted = top_p * _over(ranks, mass[:, -1], "sum")
    low, high = _ordered(torch.full_like(peak, -float("inf"))), _ordered(peak)  # too low a floor, and high enough a one
    for _ in range(peak.element_size() * 8):
        guess = (low & high) + ((low ^ high) >> 1)  # the mean, without overflow
        above = torch.searchsorted(rising, -_ordered(guess).view(peak.dtype)[:, None])
        enough = _over(ranks, mass.gather(1, above)[:, 0], "sum") < wanted
        low, high = torch.where(enough, low, guess), torch.where(enough, guess, high)
    return _ordered(high).view(peak.dtype)


def _over(ranks: RankGroup, x: torch.Tensor, op: str) -> torch.Tensor:
    return x if ranks.size == 1 else all_reduce(x, ranks, op)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """The bits of floating point numbers as integers that are ordered as the numbers are; and back again."""
    kind = {4: torch.int32, 8: torch.int64}[x.element_size()]
    bits = x.view(kind)
    return torch.where(bits < 0, bits ^ torch.iinfo(kind).max, bits)
