"""Some logits of each row, told by their tokens, out of rows that are split: those of given tokens, the largest ones.

What a teacher sends to a student in distillation: a few logits and their tokens instead of a row of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from autoplan.common.errors import AutoplanError
from autoplan.common.layout import chunk
from autoplan.common.options import check_argument
from autoplan.execute.collectives import sum_over_ranks
from autoplan.execute.vocabulary.kept import top_columns
from autoplan.execute.vocabulary.shards import Columns, Ranks, chunk_size, chunks, columns_of, plain, wide

__all__ = ["TopLogits", "vocab_parallel_gather", "vocab_parallel_topk"]


class TopLogits(NamedTuple):
    """The largest logits of each row [..., k], the largest first, and their tokens in the whole vocabulary."""

    values: torch.Tensor
    tokens: torch.Tensor


def vocab_parallel_gather(
    logits: torch.Tensor, tokens: torch.Tensor, *, group: Ranks | None = None, vocabulary: int | None = None
) -> torch.Tensor:
    """The logits [..., n] of given tokens [..., n], out of logits [..., vocabulary]."""
    columns = columns_of(logits, group, vocabulary)
    check_argument("tokens", tokens, torch.Tensor, "give token ids, any number of them for each row of logits")
    tokens = plain(tokens).to(logits.device)
    if tokens.shape[:-1] != columns.local.shape[:-1]:
        raise AutoplanError(
            f"tokens of shape {list(tokens.shape)} for logits of shape {list(logits.shape)}",
            hint="any number of tokens for each row of logits, in the last dim",
        )
    torch._assert_async(((tokens >= 0) & (tokens < columns.size)).all(), "a token is not in the vocabulary")
    return _gathered(columns, tokens.reshape(-1, tokens.shape[-1])).view(tokens.shape)


def vocab_parallel_topk(
    logits: torch.Tensor,
    k: int,
    *,
    group: Ranks | None = None,
    vocabulary: int | None = None,
    chunk_tokens: int | None = None,
) -> TopLogits:
    """The `k` largest logits of each row of logits [..., vocabulary], with gradients, and their tokens."""
    columns = columns_of(logits, group, vocabulary)
    check_argument("k", k, int, f"give a whole number from 1 to {columns.size}, the vocabulary")
    if not 1 <= k <= columns.size:
        raise AutoplanError(f"k={k}", hint=f"give a whole number from 1 to {columns.size}, the vocabulary")
    rows = columns.rows.detach()
    widest = len(chunk(columns.size, columns.group.size, 0))
    steps = chunks(rows, chunk_size(chunk_tokens, widest))
    best = [top_columns(columns, rows[at].to(wide(rows.dtype)), k)[1] for at in steps]
    tokens = torch.cat(best) if best else torch.zeros(0, k, dtype=torch.long, device=rows.device)
    shape = (*columns.local.shape[:-1], k)
    return TopLogits(_gathered(columns, tokens).view(shape), tokens.view(shape))


def _gathered(columns: Columns, tokens: torch.Tensor) -> torch.Tensor:
    """One rank has each; the others add zero, which is exact."""
    rows = columns.rows if columns.local.shape[-1] else F.pad(columns.rows, (0, 1))
    own = (tokens >= columns.own.start) & (tokens < columns.own.stop)
    picked = rows.gather(1, torch.where(own, tokens - columns.own.start, 0))
    return sum_over_ranks(torch.where(own, picked, 0.0), columns.group)
