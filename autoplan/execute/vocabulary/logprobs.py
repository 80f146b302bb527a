"""Log-probabilities of sharded logits, and the choice of how logits leave the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from autoplan.common.errors import AutoplanError
from autoplan.common.options import check_argument, check_count
from autoplan.execute.collectives import RankGroup, all_gather_rows, copy_to_ranks, gather_over_ranks
from autoplan.execute.executors import Running
from autoplan.execute.parameters.held import record_of
from autoplan.execute.parameters.views import local_view
from autoplan.execute.tensor_parallel import applied
from autoplan.execute.vocabulary.own_positions import whole_logits
from autoplan.execute.vocabulary.sampling import check_filters, floor_of
from autoplan.execute.vocabulary.shards import Columns, Ranks, columns_of, plain, row_sums

# Gathered or sharded logits: changes what a sharded model returns, after it was sharded.
#
# By default a model returns sharded logits where gradients are computed, since a loss takes them so, and gathered ones
# elsewhere: `generate()`, evaluation and search expect the full vocabulary.


class gather_logits:  # noqa: N801 - called as a function, as torch.no_grad is
    """Return logits gathered (True), sharded (False), or sharded only where gradients are computed (None).

    It takes effect at the call, or only inside the block in a `with` statement. `model` may be wrapped or compiled.

        with torch.no_grad(), autoplan.gather_logits(model, False):
            logprobs = autoplan.vocab_parallel_logprobs(model(ids).logits, ids)
    """

    def __init__(self, model: nn.Module, gather: bool | None = True) -> None:
        if gather not in (None, True, False):
            raise AutoplanError(f"gather={gather!r}", hint="choose True, False or None")
        check_argument("model", model, nn.Module, "pass the model itself, an nn.Module")
        records = [record_found for module in model.modules() if (record_found := applied(module)) is not None]
        if not records:
            raise AutoplanError(f"{type(model).__name__} was not sharded", hint="call autoplan.parallelize first")
        self._before: list[tuple[Running, bool | None]] = []
        for record in records:
            if record.running is not None:  # else nothing is sharded, logits included
                self._before.append((record.running, record.running.gather_logits))
                record.running.gather_logits = gather

    def __enter__(self) -> gather_logits:
        return self

    def __exit__(self, *_: object) -> None:
        for running, before in self._before:
            running.gather_logits = before


# Log-probabilities of given tokens from sharded logits, as reinforcement learning and distillation need them.
#
# Beyond a plain log-softmax they need four things: the distribution that a sampler drew from (temperature, top-k,
# top-p); packed sequences; sequences sharded over ranks; and hidden states with the head in place of logits, since
# [tokens, vocabulary] is the largest tensor of a step.


def vocab_parallel_logprobs(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    *,
    group: Ranks | None = None,
    vocabulary: int | None = None,
    shift: bool = True,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    sequence_index: torch.Tensor | None = None,
    sequence_group: Ranks | None = None,
    chunk_tokens: int | None = None,
) -> torch.Tensor:
    """Return the log-probability of given tokens [batch, sequence] under logits [batch, sequence, vocabulary].

    With `shift` each position predicts the next token, and the result is [batch, sequence - 1]; without, its own token.

    `temperature`, then `top_k`, then `top_p`: those of the sampler. A token that they exclude has minus infinity;
    tokens with equal logits are kept or excluded together.

    Packed sequences: `cu_seqlens` (the start of each in the last dim, and the end of the last) or `position_ids` (which
    restart with each). The last token of a sequence predicts nothing, and has 0; so has padding after `cu_seqlens`.

    Context parallelism: `tokens` is the full sequence, the logits are those of the positions in `sequence_index` (one
    dim, as many on each rank), and the result those positions' ([batch, positions], 0 without a next token). With
    `sequence_group` all positions are gathered in order, and the result is the same as without context parallelism.
    """
    logits = whole_logits(logits)  # a rank of a plan with cp_size has those of its positions
    columns = columns_of(logits, group, vocabulary)
    check_argument("tokens", tokens, torch.Tensor, "pass token ids [batch, sequence]")
    tokens = plain(tokens).to(logits.device)
    check_filters(temperature, top_k, top_p, columns.size)
    rows = _Rows(tokens, shift, _last_tokens(tokens, shift, cu_seqlens, position_ids), sequence_index, sequence_group)
    wanted = rows.wanted(columns.local.shape[:-1], "logits", list(logits.shape))
    logprobs = _row_logprobs(columns, wanted.reshape(-1), temperature, top_k, top_p, chunk_tokens)
    return rows.result(logprobs.view(wanted.shape))


def vocab_parallel_logprobs_from_hidden(
    hidden: torch.Tensor,
    head: nn.Module | torch.Tensor,
    tokens: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    group: Ranks | None = None,
    vocabulary: int | None = None,
    change: Callable[[torch.Tensor], torch.Tensor] | None = None,
    shift: bool = True,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    sequence_index: torch.Tensor | None = None,
    sequence_group: Ranks | None = None,
    chunk_tokens: int = 1024,
) -> torch.Tensor:
    """Return `vocab_parallel_logprobs` of hidden states [batch, sequence, width], which are replicated.

    `head` is the model's own (`model.lm_head`, as `parallelize` left it), or its weight [vocabulary, width] (a DTensor,
    the full weight, or this rank's rows with `group` and `vocabulary`). Only the logits of `chunk_tokens` tokens are
    alive at a time: they are recomputed in the backward. `change` is what the model does to each logit after its head,
    element by element: `lambda x: 30 * torch.tanh(x / 30)`, a scale.
    """
    check_argument("hidden", hidden, torch.Tensor, "pass hidden states [batch, sequence, width]")
    check_argument("head", head, (nn.Module, torch.Tensor), "pass the model's head, or its weight [vocabulary, width]")
    check_argument("tokens", tokens, torch.Tensor, "pass token ids [batch, sequence]")
    check_count("chunk_tokens", chunk_tokens)
    weight, bias, ranks, size = _head_rows(head, bias, group, vocabulary)
    hidden, tokens = plain(hidden), plain(tokens).to(hidden.device)
    check_filters(temperature, top_k, top_p, size)
    rows = _Rows(tokens, shift, _last_tokens(tokens, shift, cu_seqlens, position_ids), sequence_index, sequence_group)
    wanted = rows.wanted(hidden.shape[:-1], "hidden states", list(hidden.shape))

    def some(states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        logits = F.linear(states, weight, bias)
        columns = Columns(logits if change is None else change(logits), ranks, size)
        return _row_logprobs(columns, ids, temperature, top_k, top_p, None)

    again = partial(checkpoint, some, use_reentrant=False, preserve_rng_state=False)
    states = copy_to_ranks(hidden, ranks).reshape(-1, hidden.shape[-1])
    pieces = zip(states.split(chunk_tokens), wanted.reshape(-1).split(chunk_tokens), strict=True)
    return rows.result(torch.cat([again(part, ids) for part, ids in pieces]).view(wanted.shape))


def _row_logprobs(
    columns: Columns,
    tokens: torch.Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    chunk_tokens: int | None,
) -> torch.Tensor:
    floor = floor_of(columns, temperature, top_k, top_p, chunk_tokens)
    whole, chosen, _ = row_sums(columns, tokens, chunk_tokens=chunk_tokens, temperature=temperature, floor=floor)
    return chosen - whole


def _head_rows(
    head: nn.Module | torch.Tensor, bias: torch.Tensor | None, group: Ranks | None, vocabulary: int | None
) -> tuple[torch.Tensor, torch.Tensor | None, RankGroup, int]:
    """Return this rank's rows of a head: weight and bias, the group, and the global number of rows."""
    alone = RankGroup("", 1, 0)
    if isinstance(head, nn.Module):
        weight, bias = head.get_parameter("weight"), getattr(head, "bias", None) if bias is None else bias
        record = record_of(head)
        held = record.parameters.get("weight") if record is not None else None
        if held is not None and held.dim == 0:
            weight, group, vocabulary = local_view(weight, held), held.group, held.shape[0]
            bias = local_view(bias, record.parameters.get("bias")) if record is not None else bias
    else:
        weight = head
    if isinstance(weight, DTensor):
        placed, mesh = weight.placements[0], weight.device_mesh
        if mesh.ndim != 1 or not (placed.is_replicate() or placed == Shard(0)):
            raise AutoplanError(
                f"the head's weight is placed {weight.placements} over the mesh dims {mesh.mesh_dim_names}",
                hint="only its rows may be sharded, over one mesh dim; if FSDP2 sharded it too, call this inside "
                "autoplan.unshard(model)",
            )
        group, vocabulary = (None, None) if placed.is_replicate() else (mesh.get_group(), weight.shape[0])
        weight = weight.to_local()
    bias = bias.to_local() if isinstance(bias, DTensor) else bias
    if weight.dim() != 2 or isinstance(weight, DTensor) or (group is None) != (vocabulary is None):
        raise AutoplanError(
            f"a head of shape {list(weight.shape)}, group={group!r}, vocabulary={vocabulary}",
            hint="pass the head itself, its weight [vocabulary, width], or a rank's rows with group= and vocabulary=",
        )
    ranks = alone if group is None else RankGroup.of(group)
    columns_of(weight.detach().T, None if group is None else ranks, vocabulary)  # checks the number of rows
    return weight, bias, ranks, weight.shape[0] if vocabulary is None else vocabulary


@dataclass(frozen=True)
class _Rows:
    """The tokens whose log-probabilities the rows of logits give, and the shape of the result."""

    tokens: torch.Tensor
    shift: bool
    last: torch.Tensor | None  # of packed sequences: marks tokens without a next one
    index: torch.Tensor | None
    group: Ranks | None

    def wanted(self, rows: torch.Size, what: str, shape: list[int]) -> torch.Tensor:
        wanted = F.pad(self.tokens, (0, 1))[..., 1:] if self.shift else self.tokens
        if self.index is not None:
            wanted = wanted[..., self.index.to(wanted.device)]
        if wanted.shape != rows:
            raise AutoplanError(
                f"tokens of shape {list(wanted.shape)} for {what} of shape {shape}",
                hint=f"one token id per row of {what}; with sequence_index, tokens of the whole sequence",
            )
        return wanted

    def result(self, logprobs: torch.Tensor) -> torch.Tensor:
        if self.index is None:
            logprobs = logprobs if self.last is None else logprobs.masked_fill(self.last, 0.0)
            return logprobs[..., :-1] if self.shift else logprobs
        index, last = self.index.to(logprobs.device), self.last
        if self.shift and self.group is None:
            ends = index == self.tokens.shape[-1] - 1
            return logprobs.masked_fill(ends if last is None else ends | last[..., index], 0.0)
        if last is not None:
            logprobs = logprobs.masked_fill(last[..., index], 0.0)
        if self.group is None:
            return logprobs
        # Gather every rank's positions in order. The result is replicated, so backward takes the own positions.
        group = RankGroup.of(self.group)
        count = index.numel()
        rows = [range(rank * count, (rank + 1) * count) for rank in range(group.size)]
        everything = gather_over_ranks(logprobs, group, logprobs.dim() - 1, rows)
        where = all_gather_rows(index, group, 0, [count] * group.size) if group.size > 1 else index
        logprobs = everything.index_select(-1, torch.argsort(where))
        return logprobs[..., :-1] if self.shift else logprobs


def _last_tokens(
    tokens: torch.Tensor, shift: bool, cu_seqlens: torch.Tensor | None, position_ids: torch.Tensor | None
) -> torch.Tensor | None:
    """Return a mask of positions without a next token: the last of each packed sequence, and the padding after them."""
    if cu_seqlens is None and position_ids is None:
        return None
    for argument in (cu_seqlens, position_ids):
        if argument is not None:
            check_argument("packed sequence boundaries", argument, torch.Tensor, "pass an integer tensor")
    if not shift or (cu_seqlens is not None and position_ids is not None):
        raise AutoplanError(
            "cu_seqlens and position_ids mark where the next token belongs to another sequence"
            + ("" if shift else ", but with shift=False no row predicts the next token"),
            hint="pass one of them, without shift=False",
        )
    length = tokens.shape[-1]
    if cu_seqlens is not None:
        starts = plain(cu_seqlens).to(tokens.device)
        after = torch.arange(1, length + 1, device=tokens.device)
        return torch.isin(after, starts) | (after >= starts[-1])
    assert position_ids is not None
    positions = plain(position_ids).to(tokens.device)
    if positions.shape[-1] != length:
        raise AutoplanError(
            f"position_ids of shape {list(positions.shape)} for tokens of shape {list(tokens.shape)}",
            hint="one position for each token",
        )
    return F.pad(positions[..., 1:] <= positions[..., :-1], (0, 1), value=True)
