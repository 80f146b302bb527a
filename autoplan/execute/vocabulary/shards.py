"""Primitives on logits sharded over the vocabulary, and the losses computed with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard

from autoplan.common.errors import AutoplanError
from autoplan.common.layout import chunk
from autoplan.common.options import check_argument
from autoplan.common.stages import run_rounds
from autoplan.common.torch_internals import assert_async
from autoplan.execute.collectives import RankGroup, Ranks, all_reduce, copy_to_ranks

# Logits of which each rank holds some columns, and sums over a full row.
#
# The problem: a loss or a sampler needs only a number or two of a row of logits (its log-sum-exp, one element, a mean
# of elements), but a row is sharded over ranks. Gathering it costs tokens × vocabulary bytes on every rank, the largest
# tensor of a training step. Every such number is a sum over the ranks' columns, so only a few numbers per row need to
# be communicated.
#
# Columns are sharded by ceiling division, as DTensor does: the last ranks may have fewer, or none. Sums are float32 at
# least, a chunk of rows at a time if wanted, so that no second tensor of the logits' size is alive.

_CHUNK = 2**22  # elements that are widened at a time by default


@dataclass(frozen=True)
class Columns:
    """This rank's columns of logits [..., vocabulary]: a plain tensor, differentiable."""

    local: torch.Tensor
    group: RankGroup
    size: int

    @property
    def own(self) -> range:
        """Return the tokens of these columns."""
        return chunk(self.size, self.group.size, self.group.rank)

    @property
    def rows(self) -> torch.Tensor:
        """Return the columns as [tokens, columns]."""
        width = self.local.shape[-1]
        return self.local.reshape(-1, width) if width else self.local.reshape(self.local.shape[:-1].numel(), 0)


def columns_of(logits: torch.Tensor, group: Ranks | None = None, vocabulary: int | None = None) -> Columns:
    """Return the columns of logits as they leave a model (a DTensor or a plain tensor), or of a rank's with group and
    size."""
    check_argument("logits", logits, torch.Tensor, "pass logits as the model returns them, or one rank's columns")
    if not logits.ndim or not logits.is_floating_point():
        shown = f"logits of shape {list(logits.shape)} in {logits.dtype}"
        raise AutoplanError(shown, hint="pass floating-point numbers, [..., vocabulary]")
    if isinstance(logits, DTensor):
        split = [at for at, placed in enumerate(logits.placements) if placed == Shard(logits.dim() - 1)]
        others = [placed for at, placed in enumerate(logits.placements) if at not in split]
        if len(split) > 1 or not all(placed.is_replicate() for placed in others):
            raise AutoplanError(
                f"logits have placements {logits.placements}: only the vocabulary may be sharded, over one mesh dim",
                hint="pass logits.to_local() with group= and vocabulary=; the result then covers these rows",
            )
        of_dim = RankGroup.of(logits.device_mesh.get_group(split[0])) if split else RankGroup("", 1, 0)
        return Columns(logits.to_local(), of_dim, logits.shape[-1])
    if vocabulary is None and group is None:
        return Columns(logits, RankGroup("", 1, 0), logits.shape[-1])
    if group is None or vocabulary is None:
        raise AutoplanError(
            f"plain logits of shape {list(logits.shape)} with only one of group= and vocabulary=",
            hint="pass both for one rank's columns, neither for full logits",
        )
    ranks = RankGroup.of(group)
    wanted = len(chunk(vocabulary, ranks.size, ranks.rank))
    if logits.shape[-1] != wanted:
        raise AutoplanError(
            f"rank {ranks.rank} of {ranks.size} holds {wanted} of {vocabulary} columns, but the logits have "
            f"{logits.shape[-1]}",
            hint="vocabulary= is the size over all ranks; columns are sharded by ceiling, as DTensor does",
        )
    return Columns(logits, ranks, vocabulary)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return token ids as a plain tensor; they may come as a DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums."""
    return torch.promote_types(dtype, torch.float32)


def row_sums(
    columns: Columns,
    tokens: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
    floor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each row's log-sum-exp, the logit of its token, and the sum of its logits times `weight` (zeros without).

    `tokens` are flat, one per row; a token outside the vocabulary has the logit 0. `weight` has an element per column
    of this rank. Logits below their row's `floor` count as minus infinity; all are divided by `temperature`.
    """
    local = columns.local
    if weight is not None:
        weight = weight.to(local.device, wide(local.dtype))
    step = chunk_size(chunk_tokens, columns.rows.shape[1])
    sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    sums = _RowSums.apply(columns.rows, tokens, weight, columns.group, columns.own.start, step, temperature, floor)
    return sums


def chunk_size(chunk_tokens: int | None, width: int) -> int | None:
    """Return the number of rows per chunk; None for all. Compiled code fuses what would need the memory, and would
    unroll a loop for one number of rows only."""
    if chunk_tokens is not None and chunk_tokens < 1:
        raise AutoplanError(f"chunk_tokens={chunk_tokens}", hint="pass an integer from 1, or None")
    if chunk_tokens is None and torch.compiler.is_compiling():
        return None
    return max(1, _CHUNK // max(1, width) if chunk_tokens is None else chunk_tokens)


def chunks(rows: torch.Tensor, step: int | None) -> Iterator[slice]:
    if step is None:
        return iter((slice(None),))
    return (slice(start, start + step) for start in range(0, rows.shape[0], step))


def _in_chunks(
    part: Callable[[slice], torch.Tensor], rows: torch.Tensor, step: int | None, *, numbers: bool = False
) -> torch.Tensor:
    """Compute a gradient for `rows`, or wide `numbers`, one per row, a chunk of rows at a time."""
    shape, dtype = (rows.shape[:1], wide(rows.dtype)) if numbers else (rows.shape, rows.dtype)
    if step is None or rows.shape[0] <= step:
        return part(slice(None)).to(dtype)
    result = rows.new_empty(shape, dtype=dtype)

    def fill(at: slice) -> None:
        result[at] = part(at)

    parts = list(chunks(rows, step))
    if torch.compiler.is_compiling():
        for at in parts:
            fill(at)
    else:
        run_rounds(fill, parts)
    return result


def _shaped(rows: torch.Tensor, at: slice, temperature: float = 1.0, floor: torch.Tensor | None = None) -> torch.Tensor:
    """Return some rows, widened, filtered and scaled as `row_sums` counts them."""
    x = rows[at].to(wide(rows.dtype))
    if floor is not None:
        x = x.masked_fill(x < floor[at, None], -float("inf"))
    return x if temperature == 1 else x / temperature


def _log_sum_exp(
    rows: torch.Tensor, step: int | None, temperature: float = 1.0, floor: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the log-sum-exp of this rank's columns; minus infinity where there are none."""
    return _in_chunks(lambda at: torch.logsumexp(_shaped(rows, at, temperature, floor), -1), rows, step, numbers=True)


def _over_ranks(local: torch.Tensor, *sums: torch.Tensor, group: RankGroup) -> tuple[torch.Tensor, ...]:
    """Reduce log-sum-exps and sums over ranks: two all-reduces of a few numbers per row."""
    if group.size == 1:
        return (local, *sums)
    peak = all_reduce(local, group, "max")
    total, *others = all_reduce(torch.stack([torch.exp(local - peak), *sums]), group).unbind()
    return (peak + torch.log(total), *others)


def _own(tokens: torch.Tensor, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a mask of the tokens whose column is local, and their local column (0 for the others)."""
    own = (tokens >= first) & (tokens < first + count)
    return own, torch.where(own, tokens - first, 0)


class _RowSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tokens: torch.Tensor, weight: torch.Tensor | None, *how: Any) -> Any:
        group, first, step, temperature, floor = how
        own, column = _own(tokens, first, rows.shape[1])
        chosen = torch.zeros(tokens.shape, dtype=wide(rows.dtype), device=rows.device)
        if rows.shape[1]:
            picked = _shaped(rows.gather(1, column[:, None]), slice(None), temperature, floor)[:, 0]
            chosen = torch.where(own, picked, chosen)
        weighted = torch.zeros_like(chosen)
        if weight is not None:
            weighted = _in_chunks(lambda at: _shaped(rows, at, temperature) @ weight, rows, step, numbers=True)
        own_sum = _log_sum_exp(rows, step, temperature, floor)
        whole, chosen, weighted = _over_ranks(own_sum, chosen, weighted, group=group)
        ctx.save_for_backward(rows, tokens, weight, whole, floor)
        ctx.group, ctx.first, ctx.step, ctx.temperature = group, first, step, temperature
        return whole, chosen, weighted

    @staticmethod
    def backward(ctx: Any, of_whole: torch.Tensor, of_chosen: torch.Tensor, of_weighted: torch.Tensor) -> Any:
        """Add the gradients through softmax, the token's column and the weights; every rank computes its own."""
        rows, tokens, weight, whole, floor = ctx.saved_tensors
        shared = (whole, of_whole, of_chosen, of_weighted)
        whole, of_whole, of_chosen, of_weighted = (copy_to_ranks(value, ctx.group) for value in shared)
        own, column = _own(tokens, ctx.first, rows.shape[1])
        if floor is not None and rows.shape[1]:  # filtered logits are constants
            own = own & (rows.detach().gather(1, column[:, None])[:, 0] >= floor)

        def part(at: slice) -> torch.Tensor:
            gradient = torch.exp(_shaped(rows, at, ctx.temperature, floor) - whole[at, None]) * of_whole[at, None]
            if rows.shape[1]:
                gradient = gradient.scatter_add(1, column[at, None], torch.where(own, of_chosen, 0.0)[at, None])
            gradient = gradient if weight is None else gradient + of_weighted[at, None] * weight
            return gradient if ctx.temperature == 1 else gradient / ctx.temperature

        return _in_chunks(part, rows, ctx.step), None, None, None, None, None, None, None


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: RankGroup, step: int | None) -> torch.Tensor:
        (whole,) = _over_ranks(_log_sum_exp(rows, step), group=group)
        entropy = _in_chunks(lambda at: _surprise(rows[at], whole[at]).sum(-1), rows, step, numbers=True)
        entropy = entropy if group.size == 1 else all_reduce(entropy, group)
        ctx.save_for_backward(rows, whole, entropy)
        ctx.step = step
        return entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Compute dH/dx = -p (log p + H)."""
        rows, whole, entropy = ctx.saved_tensors

        def part(at: slice) -> torch.Tensor:
            x = rows[at].to(whole.dtype)
            return (_surprise(x, whole[at]) - torch.exp(x - whole[at, None]) * entropy[at, None]) * gradient[at, None]

        return _in_chunks(part, rows, ctx.step), None, None


def _surprise(rows: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return -p log p; 0 where a logit is minus infinity."""
    log_p = rows.to(whole.dtype) - whole[:, None]
    return -(torch.exp(log_p) * log_p.clamp(min=torch.finfo(log_p.dtype).min))


# Losses on logits sharded over the vocabulary, without gathering them.
#
# Logits leave a sharded model as a DTensor sharded in its last dim: every function here takes that, or one rank's
# columns with `group=` and `vocabulary=`. Results are plain tensors, equal on every rank of the group; so must be their
# gradients. Any vocabulary size will do. (`split_logits.py` substitutes the cross-entropy for the one that a model
# computes from `labels=`.)
#
#     loss = vocab_parallel_cross_entropy(model(ids).logits, ids, shift=True)


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
    """Compute `torch.nn.functional.cross_entropy` of logits [..., vocabulary] and token ids [...], in float32 at least.

    `shift` compares each position with the next token, as causal models in transformers do; with `num_items_in_batch`
    the sum is divided by it, as their losses do under gradient accumulation. `weight` has one element per token of the
    full vocabulary. `chunk_tokens` rows are processed at a time; by default as many as need little memory.
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
    """Return the loss of columns whose rows have one target each."""
    if reduction not in ("mean", "sum", "none"):
        raise AutoplanError(f"reduction={reduction!r}", hint="choose 'mean', 'sum' or 'none'")
    tokens = target.reshape(-1).to(columns.local.device)
    counted = tokens != ignore_index
    assert_async(((tokens >= 0) & (tokens < columns.size) | ~counted).all(), "target outside the vocabulary")
    tokens = torch.where(counted, tokens, 0)
    smooth = torch.ones(len(columns.own), device=columns.local.device) if label_smoothing else None
    if smooth is not None and weight is not None:
        smooth = plain(weight)[columns.own.start : columns.own.stop]
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


def vocab_parallel_entropy(
    logits: torch.Tensor, *, group: Ranks | None = None, vocabulary: int | None = None, chunk_tokens: int | None = None
) -> torch.Tensor:
    """Return the entropy, in nats, of the distribution given by each row of logits [..., vocabulary]."""
    columns = columns_of(logits, group, vocabulary)
    rows = columns.rows
    entropy: torch.Tensor = _Entropy.apply(rows, columns.group, chunk_size(chunk_tokens, rows.shape[1]))
    return entropy.view(columns.local.shape[:-1])
