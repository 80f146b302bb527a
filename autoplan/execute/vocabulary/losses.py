"""Losses on logits that are split over the vocabulary, without gathering them.

Logits leave a sharded model as a DTensor split in its last dim: every function here takes that, or one rank's columns
with `group=` and `vocabulary=`. Results are plain tensors, equal on every rank of the group; so are the gradients that
must come back. Any vocabulary size will do. (`shards.py` has the sums; `split_logits.py` puts the cross-entropy in the
place of the one that a model computes from `labels=`.)

    loss = vocab_parallel_cross_entropy(model(ids).logits, ids, shift=True)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from autoplan.common.errors import AutoplanError
from autoplan.execute.vocabulary.shards import Columns, Ranks, columns_of, plain, row_entropy, row_sums

__all__ = ["cross_entropy", "vocab_parallel_cross_entropy", "vocab_parallel_entropy"]


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
