"""Choose tokens from logits that are split over the vocabulary, without gathering them; every rank chooses the same.

A draw is by the inverse of the distribution: one uniform number per row, the same on all ranks (the first rank's), says
which rank's columns and then which column. So the chance of a token does not depend on how many ranks there are, and
one generator state means one text.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autoplan.common.errors import AutoplanError
from autoplan.execute.collectives import RankGroup, all_gather_rows, all_reduce
from autoplan.execute.vocabulary.kept import check_filters, floor_of, top_columns
from autoplan.execute.vocabulary.shards import Columns, Ranks, columns_of, wide

__all__ = ["vocab_parallel_argmax", "vocab_parallel_sample"]


@torch.no_grad()
def vocab_parallel_argmax(
    logits: torch.Tensor, *, group: Ranks | None = None, vocabulary: int | None = None
) -> torch.Tensor:
    """The most likely token of each row of logits [..., vocabulary]; the first, where several are."""
    columns = columns_of(logits, group, vocabulary)
    rows, ranks = columns.rows.to(wide(logits.dtype)), columns.group
    if rows.shape[1]:
        best = rows.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=-float("inf")).amax(-1)
        position = rows.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=-float("inf")) == best[:, None]
        token = position.int().argmax(-1) + columns.own.start
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
    """A token drawn from each row of logits [..., vocabulary], among its `top_k` most likely ones if given.

    With `top_p`, among the likeliest that together reach this share of the mass (of what top-k has left). Of whole
    logits, `group` says which ranks draw the same.
    """
    columns = columns_of(logits, *_of_columns(logits, group, vocabulary))
    check_filters(temperature, top_k, top_p, columns.size)
    rows = columns.rows.to(wide(logits.dtype))
    if top_p is not None:
        floor, top_k = floor_of(columns, temperature, top_k, top_p), None
        rows = rows if floor is None else rows.masked_fill(rows < floor[:, None], -float("inf"))
    rows = rows / temperature
    together = columns.group if group is None or columns.group.size > 1 else RankGroup.of(group)
    uniform = _uniform(rows, together, generator)
    token = _draw(columns, rows, uniform) if top_k is None else _draw_top(columns, rows, uniform, top_k)
    return token.view(columns.local.shape[:-1])


def _of_columns(logits: torch.Tensor, group: Ranks | None, vocabulary: int | None) -> tuple[Ranks | None, int | None]:
    """`group` and `vocabulary` where they describe columns; refuses whole logits that each rank would draw from."""
    if isinstance(logits, DTensor) or vocabulary is not None:
        return group, vocabulary
    if group is None and dist.is_initialized() and dist.get_world_size() > 1:
        raise AutoplanError(
            f"from whole logits of shape {list(logits.shape)} each of {dist.get_world_size()} ranks would draw its own "
            "tokens",
            hint="pass group=, the ranks that draw the same, or keep the logits split: "
            "`with autoplan.gather_logits(model, False)`",
        )
    return None, None


def _uniform(rows: torch.Tensor, ranks: RankGroup, generator: torch.Generator | None) -> torch.Tensor:
    """One number in [0, 1) per row: the first rank's draw."""
    device = rows.device if generator is None else generator.device
    drawn = torch.rand(rows.shape[0], dtype=torch.float64, device=device, generator=generator).to(rows.device)
    if ranks.size == 1:
        return drawn
    return all_reduce(drawn if ranks.rank == 0 else torch.zeros_like(drawn), ranks)


def _draw(columns: Columns, rows: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    ranks = columns.group
    peak = rows.amax(-1) if rows.shape[1] else rows.new_full(rows.shape[:1], -float("inf"))
    peak = peak if ranks.size == 1 else all_reduce(peak, ranks, "max")
    mass = torch.exp(rows - peak[:, None]).cumsum(-1, dtype=torch.float64)
    mine = mass[:, -1] if rows.shape[1] else uniform.new_zeros(uniform.shape)
    everyone = mine[None] if ranks.size == 1 else all_gather_rows(mine[None], ranks, 0, [1] * ranks.size)
    ends = everyone.cumsum(0)  # [ranks, rows]: where each rank's share of the mass ends
    place = uniform * ends[-1]
    holder = _at(ends.T, place)
    token = torch.zeros_like(holder)
    if rows.shape[1]:
        start = torch.where(holder > 0, ends.T.gather(1, (holder - 1).clamp(min=0)[:, None])[:, 0], 0.0)
        token = _at(mass, place - start) + columns.own.start
    if ranks.size == 1:
        return token
    return all_reduce(torch.where(holder == ranks.rank, token, 0), ranks)


def _draw_top(columns: Columns, rows: torch.Tensor, uniform: torch.Tensor, top_k: int) -> torch.Tensor:
    """Each rank's best few come together: they are all that is needed, on every rank."""
    best, token = top_columns(columns, rows, top_k)
    mass = torch.softmax(best, -1, dtype=torch.float64).cumsum(-1)
    return token.gather(1, _at(mass, uniform * mass[:, -1])[:, None])[:, 0]


def _at(mass: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """For each row, the first index whose cumulated mass exceeds the place: never one without mass of its own."""
    found = torch.searchsorted(mass.contiguous(), place[:, None].contiguous(), right=True)[:, 0]
    last = (mass < mass[:, -1:]).sum(-1)  # rounding may put the place at the very end
    return torch.minimum(found, last)
