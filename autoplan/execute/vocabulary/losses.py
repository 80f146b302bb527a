"""Losses on logits that are split over the vocabulary, without gathering them.

Logits leave a sharded model as a DTensor split in its last dim: every function here takes that, or one rank's columns
with `group=` and `vocabulary=`. Results are plain tensors, equal on every rank of the group; so are the gradients that
must come back. Any vocabulary size will do. (`vocabulary.py` has the sums; `split_logits.py` puts the cross-entropy in
the place of the one that a model computes from `labels=`.)

    loss = vocab_parallel_cross_entropy(model(ids).logits, ids, shift=True)
    logprobs = vocab_parallel_logprobs(model(ids).logits, ids)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from autoplan.common.errors import AutoplanError
from autoplan.execute.collectives import RankGroup, all_gather_rows, gather_over_ranks
from autoplan.execute.vocabulary.shards import Columns, Ranks, columns_of, plain, row_entropy, row_sums

__all__ = ["cross_entropy", "vocab_parallel_cross_entropy", "vocab_parallel_entropy", "vocab_parallel_logprobs"]


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    group: Ranks | None = None,
    vocabulary: int | None = None,
    shift: bool = False,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    num_items_in_batch: torch.Tensor | int | None = None,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` of logits [..., vocabulary] and token ids [...], in float32 at least.

    `shift` compares each position with the next token, as causal models in transformers do; with `num_items_in_batch`
    the sum is divided by it, as their losses do under gradient accumulation. `weight` has one element per token of the
    whole vocabulary. `chunk_tokens` rows are worked on at a time; by default as many as need little memory.
    """
    columns, target = columns_of(logits, group, vocabulary), plain(target)
    if shift:
        target = F.pad(target, (0, 1), value=ignore_index)[..., 1:]
    if target.shape != columns.local.shape[:-1]:
        raise AutoplanError(
            f"targets of shape {list(target.shape)} for logits of shape {list(logits.shape)}",
            hint="one token id for each row of logits, the vocabulary in the last dim",
        )
    if num_items_in_batch is not None:
        reduction = "sum"
    loss = cross_entropy(columns, target, weight, ignore_index, reduction, label_smoothing, chunk_tokens)
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def cross_entropy(
    columns: Columns,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """The loss of columns whose rows have one target each."""
    if reduction not in ("mean", "sum", "none"):
        raise AutoplanError(f"reduction={reduction!r}", hint="choose 'mean', 'sum' or 'none'")
    tokens = target.reshape(-1).to(columns.local.device)
    counted = tokens != ignore_index
    torch._assert_async(((tokens >= 0) & (tokens < columns.size) | ~counted).all(), "a target is not in the vocabulary")
    tokens = torch.where(counted, tokens, 0)
    smooth = _own_weights(columns, weight) if label_smoothing else None
    whole, chosen, weighted = row_sums(columns, tokens, weight=smooth, chunk_tokens=chunk_tokens)
    losses, share = whole - chosen, counted.to(whole.dtype)
    total: torch.Tensor | float = float(columns.size)
    if weight is not None:
        weight = plain(weight).to(whole)
        share, total = share * weight[tokens], weight.sum()
    losses = torch.where(counted, losses * share, 0.0)
    if label_smoothing:
        spread = torch.where(counted, whole * total - weighted, 0.0) / columns.size
        losses = (1 - label_smoothing) * losses + label_smoothing * spread
    if reduction == "none":
        return losses.view(target.shape)
    return losses.sum() if reduction == "sum" else losses.sum() / share.sum()


def _own_weights(columns: Columns, weight: torch.Tensor | None) -> torch.Tensor:
    if weight is None:
        return torch.ones(len(columns.own), device=columns.local.device)
    return plain(weight)[columns.own.start : columns.own.stop]


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    group: Ranks | None = None,
    vocabulary: int | None = None,
    shift: bool = True,
    sequence_index: torch.Tensor | None = None,
    sequence_group: Ranks | None = None,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """The log-probability of given tokens [batch, sequence] under logits [batch, sequence, vocabulary].

    With `shift` each position speaks of the next token, and the result is [batch, sequence - 1]; without, of its own.

    Context parallelism: `tokens` is the whole sequence, the logits are those of the positions in `sequence_index` (one
    dim, as many on each rank), and the result those positions' ([batch, positions], 0 where no next token is). With
    `sequence_group` all positions come together, in order, and the result is the same as without context parallelism.
    """
    columns, tokens = columns_of(logits, group, vocabulary), plain(tokens).to(logits.device)
    length = tokens.shape[-1]
    wanted = F.pad(tokens, (0, 1))[..., 1:] if shift else tokens
    if sequence_index is not None:
        wanted = wanted[..., sequence_index.to(wanted.device)]
    if wanted.shape != columns.local.shape[:-1]:
        raise AutoplanError(
            f"tokens of shape {list(wanted.shape)} for logits of shape {list(logits.shape)}",
            hint="one token id per row of logits; with sequence_index, tokens of the whole sequence",
        )
    whole, chosen, _ = row_sums(columns, wanted.reshape(-1), chunk_tokens=chunk_tokens)
    logprobs = (chosen - whole).view(wanted.shape)
    if sequence_index is None:
        return logprobs[..., :-1] if shift else logprobs
    if sequence_group is not None:
        logprobs = _in_order(logprobs, sequence_index, RankGroup.of(sequence_group))
        return logprobs[..., :-1] if shift else logprobs
    return logprobs.masked_fill(sequence_index.to(logits.device) == length - 1, 0.0) if shift else logprobs


def _in_order(mine: torch.Tensor, positions: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """Every rank's positions, put in order. Every rank goes on with all of them alike, so backward takes the own."""
    count = positions.numel()
    rows = [range(rank * count, (rank + 1) * count) for rank in range(group.size)]
    everything = gather_over_ranks(mine, group, mine.dim() - 1, rows)
    where = all_gather_rows(positions.to(mine.device), group, 0, [count] * group.size) if group.size > 1 else positions
    return everything.index_select(-1, torch.argsort(where.to(mine.device)))


def vocab_parallel_entropy(
    logits: torch.Tensor,
    *,
    group: Ranks | None = None,
    vocabulary: int | None = None,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """The entropy, in nats, of the distribution that each row of logits [..., vocabulary] stands for."""
    columns = columns_of(logits, group, vocabulary)
    return row_entropy(columns, chunk_tokens=chunk_tokens).view(columns.local.shape[:-1])
