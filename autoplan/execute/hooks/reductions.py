"""Calls carried out on a shard: reductions over a sharded dim, fused attention, recurrent networks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from autoplan.common.layout import Layout, chunk
from autoplan.execute.collectives import RankGroup, copy_to_ranks, gather_over_ranks, sum_over_ranks, take_rows
from autoplan.execute.executors import At, other_branch, runs
from autoplan.execute.random_streams import kept_state
from autoplan.execute.vocabulary.own_positions import on_own_rows
from autoplan.ops import call_record
from autoplan.ops.convolutions import GROUPED, of_own_groups
from autoplan.values import (
    AttentionCall,
    CellCall,
    DrawOnShards,
    EmbeddingCall,
    EqualPieces,
    GatherCall,
    LengthCall,
    MeanCall,
    NormCall,
    RecurrentCall,
    RewriteCall,
    RowCall,
    SumCall,
    VarianceCall,
)

# Calls that combine the shards of ranks, and calls that only differ per rank.
_OPERANDS = ("input", "mat1", "batch1", "mat2", "batch2")  # of addmm and baddbmm, in order


@runs(RewriteCall)
def _unchanged(planned: RewriteCall, at: At, func: Any, args: Any, kwargs: Any) -> Any:
    return func(*args, **kwargs)


@runs(SumCall, MeanCall)
def _reduced(planned: SumCall | MeanCall, at: At, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    group, mean = at.group, isinstance(planned, MeanCall)
    product = call_record(planned.site.function).product
    bias = None
    if product is not None and product.bias == 2:
        bias = args[2] if len(args) > 2 else kwargs.get("bias")
        args, kwargs = (*args[:2], None, *args[3:]), {k: v for k, v in kwargs.items() if k != "bias"}
        if bias is not None and not product.of_rows:  # of a convolution: along the channels
            bias = bias.view(-1, *[1] * (args[0].dim() - 2))
    elif product is not None and product.bias == 0:
        added, left, right = tuple(args) + tuple(kwargs[name] for name in _OPERANDS if name in kwargs)
        bias, alpha, kwargs = added * kwargs.get("beta", 1), kwargs.get("alpha", 1), {}
        func, args = (torch.mm if left.dim() == 2 else torch.bmm), (left if alpha == 1 else left * alpha, right)
    result = sum_over_ranks(func(*args, **kwargs), group)
    result = result / group.size if mean else result
    return result if bias is None else result + bias


@runs(EmbeddingCall)
def _looked_up(planned: EmbeddingCall, at: At, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Look up ids in the local rows of a table; foreign ids give zeros, so that the sum over ranks is the row."""
    group = at.group
    own = chunk(planned.rows, group.size, group.rank)
    table = 0 if args[0].is_floating_point() else 1  # aten's own embedding takes the table first
    ids, padding = args[1 - table], args[2] if len(args) > 2 else kwargs.get("padding_idx")
    foreign = (ids < own.start) | (ids >= own.stop)
    local = padding - own.start if padding is not None and padding in own else None
    own_ids = (ids - own.start).masked_fill(foreign, 0)
    local = -1 if local is None and table == 0 else local
    args = (*((args[0], own_ids) if table == 0 else (own_ids, args[1])), local, *args[3:])
    looked_up = func(*args, **{name: value for name, value in kwargs.items() if name != "padding_idx"})
    return sum_over_ranks(looked_up.masked_fill(foreign.unsqueeze(-1), 0), group)


@runs(RowCall)
def _row(planned: RowCall, at: At, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Compute table[number], table[number, …] or table[ids]: the rank that has a row returns it, the others zeros."""
    group = at.group
    own = chunk(planned.rows, group.size, group.rank)
    (table, index), is_tuple = args, isinstance(args[1], tuple)
    number = (index[0] if is_tuple else index) % planned.rows
    if isinstance(number, torch.Tensor):
        foreign = (number < own.start) | (number >= own.stop)
        local_rows = (number - own.start).masked_fill(foreign, 0)
        picked = func(table, (local_rows,) if is_tuple else local_rows)
        return sum_over_ranks(picked.masked_fill(foreign.unsqueeze(-1), 0), group)
    table = table if number in own else table.new_zeros(1, *table.shape[1:])
    local = number - own.start if number in own else 0
    return sum_over_ranks(func(table, (local, *index[1:]) if is_tuple else local), group)


@runs(GatherCall)
def _gathered(planned: GatherCall, at: At, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Gather a product. A convolution in groups: of the rank's own groups, on their channels of a full input."""
    group, layout = at.group, Layout.parse(planned.layout)
    rows, own = layout.rows_of_all(group.size), layout.rows(group.rank, group.size)
    if planned.site.function in GROUPED:
        args, kwargs = of_own_groups(args, kwargs, own, layout.size)
    return on_own_rows(func(*args, **kwargs), lambda x: gather_over_ranks(x, group, planned.dim, rows))


@runs(EqualPieces)
def _pieces(planned: EqualPieces, at: At, func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...]:
    """Split into pieces that are equal in the full model, but not on a rank that holds parts of some of them."""
    dim, lengths = planned.dim, planned.pieces[at.group.rank]
    x = args[0] if args else kwargs["input"]
    if x.shape[dim] != sum(lengths):
        place = f"{at.where}: {planned.site}"
        raise other_branch(f"{place} splits {x.shape[dim]}, but the plan was made for {sum(lengths)}")
    return x.split(lengths, dim)


@runs(DrawOnShards)
def _drawn(planned: DrawOnShards, at: At, func: Any, args: Any, kwargs: Any) -> Any:
    """Draw per rank; a call that got global sizes draws alike on all ranks, and each keeps its shard."""
    randomness, generator = at.running.randomness, kwargs.get("generator")
    if planned.cuts:
        with kept_state(generator) as put_back:
            result = func(*args, **kwargs)
            if all(result.shape[cut.dim] == Layout.parse(cut.layout).size for cut in planned.cuts):
                return result
            put_back()
    if isinstance(generator, torch.Generator):
        with randomness.split_of(generator) as own:
            return func(*args, **{**kwargs, "generator": own})
    if not (at.running.may_draw(at.module) or planned.cuts):
        return func(*args, **kwargs)
    with randomness.split():
        return func(*args, **kwargs)


# layer_norm and rms_norm whose statistic spans all ranks: sums are reduced forward and backward.


@runs(NormCall)
def _norm(planned: NormCall, at: At, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    group, count, layer = at.group, planned.count, planned.statistics == 2
    dims = tuple(range(-planned.dims, 0))

    def given(position: int, key: str) -> Any:
        return args[position] if len(args) > position else kwargs.get(key)

    x = args[0]
    weight, bias = given(2, "weight"), given(3, "bias") if layer else None
    eps = given(4 if layer else 3, "eps")
    if eps is None:
        eps = 1e-5 if layer else torch.finfo(x.dtype).eps
    if layer:
        x = x - _statistic(x, dims, group) / count
    x = x * torch.rsqrt(_statistic(x.pow(2), dims, group) / count + eps)
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _statistic(x: torch.Tensor, dims: tuple[int, ...], group: RankGroup) -> torch.Tensor:
    return copy_to_ranks(sum_over_ranks(x.sum(dims, keepdim=True), group), group)


# A variance over a sharded axis.
#
# The global variance follows from each rank's mean and variance: it is the average variance plus the variance of the
# means. Ranks all-gather those two numbers and combine them locally. Backward needs no communication: every rank has
# the full gradient and keeps that of its own two numbers. Summing x and x² instead would be as cheap, and lose digits.


@runs(VarianceCall)
def _variance(planned: VarianceCall, at: At, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute `var` or `std` of the global tensor, and its mean if the call returns it."""
    group, dims, counts = at.group, planned.dims, planned.held
    name, _, with_mean = planned.site.function.partition("_")
    x = args[0] if args else kwargs["input"]
    wide = x.float() if x.dtype.itemsize < 4 else x
    spread, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    own = torch.stack((mean, spread)).unsqueeze(0)
    ranks = tuple((rank,) for rank in range(group.size))
    means, spreads = gather_over_ranks(own, group, 0, ranks).unbind(1)
    parts = wide.new_tensor(counts).div(sum(counts)).view(-1, *[1] * x.dim())
    whole = (parts * means).sum(0)
    count = math.prod(x.size(dim) for dim in dims) * sum(counts) / counts[group.rank]
    variance = (parts * (spreads + (means - whole).square())).sum(0) * count / max(count - planned.correction, 0)
    results = (variance.sqrt() if name == "std" else variance, whole)[: 2 if with_mean else 1]
    shaped = tuple((result if planned.keepdim else result.squeeze(dims)).to(x.dtype) for result in results)
    return shaped if with_mean else shaped[0]


# Lengths of sharded vectors: the squares are summed over ranks, then the root is taken.
#
# A call may return the lengths themselves (`norm`), or divide by them (`normalize`, `_weight_norm`): then each rank has
# a partial gradient of a length, which is all-reduced in backward.


@runs(LengthCall)
def _lengths_of(planned: LengthCall, at: At, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute a call that takes lengths over an axis of which x is the local shard."""
    group, name = at.group, planned.site.function
    signatures = {"normalize": ("input", "p", "dim", "eps", "out"), "_weight_norm": ("v", "g", "dim")}
    names = signatures.get(name, ("x",))
    arguments = dict(zip(names, args, strict=False)) | kwargs
    x = next(iter(arguments.values()))
    x = x if kwargs.get("dtype") is None else x.to(kwargs["dtype"])
    # Where everything is zero the gradient is zero, as in torch.
    wide = x.float() if x.dtype.itemsize < 4 else x
    squares = sum_over_ranks(wide.square().sum(planned.dims, keepdim=True), group)
    lengths = torch.where(squares > 0, squares, 1.0).sqrt().mul(squares > 0).to(x.dtype)
    if name == "normalize":
        normalized = x / copy_to_ranks(lengths, group).clamp_min(arguments.get("eps", 1e-12))
        return normalized if arguments.get("out") is None else arguments["out"].copy_(normalized)
    if name == "_weight_norm":
        return x * (arguments["g"] / copy_to_ranks(lengths, group))
    return lengths if planned.keepdim else lengths.squeeze(planned.dims)


# Fused calls carried out on a shard: multi-head attention and recurrent networks.
#
# `multi_head_attention_forward` on one rank's heads: the same mathematics, with the last sum taken over ranks.

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@runs(AttentionCall)
def _attention(planned: AttentionCall, at: At, func: Any, args: Any, kwargs: Any) -> Any:
    """Compute attention of this rank's heads, positions before batch; weights, packed or not, are local rows."""
    group, randomness = at.group, at.running.randomness
    own = Layout.parse(planned.layout).rows(group.rank, group.size) if planned.layout else ()
    bound = _SIGNATURE.bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    width = arguments["query"].shape[-1] // arguments["num_heads"]
    batched = arguments["query"].dim() == 3
    q, k, v = _projected(arguments, width)
    scores = (q * math.sqrt(1.0 / width)) @ k.transpose(-2, -1)
    # The mask is added to the scores: masked positions, masked keys of each row, the future.
    keys = arguments["key"].shape[0]  # those appended after them are never masked
    total = scores.new_zeros((1, 1, scores.shape[-2], keys))
    if arguments["attn_mask"] is not None:
        mask = arguments["attn_mask"]
        if mask.dim() == 3:  # of all heads of each sample
            if not own:
                raise other_branch(f"{at.where}: {planned.site} got a mask for each head, but the plan has none")
            mask = mask.unflatten(0, (-1, arguments["num_heads"]))[:, [row // width for row in own[::width]]]
        total = total + _added(mask, scores)
    elif arguments["is_causal"]:
        total = total + _added(torch.ones_like(total[0, 0], dtype=torch.bool).triu(1), scores)
    if arguments["key_padding_mask"] is not None:
        total = total + _added(arguments["key_padding_mask"].reshape(-1, 1, 1, keys), scores)
    attention = (scores + F.pad(total, (0, scores.shape[-1] - keys))).softmax(-1)
    if arguments["training"] and arguments["dropout_p"] > 0:
        with randomness.split():  # each rank draws for its own heads
            attention = F.dropout(attention, arguments["dropout_p"])
    mixed = (attention @ v).permute(2, 0, 1, 3).flatten(2)
    out = sum_over_ranks(F.linear(mixed, arguments["out_proj_weight"]), group)
    out = out if arguments["out_proj_bias"] is None else out + arguments["out_proj_bias"]
    out = out if batched else out.squeeze(1)
    if not arguments["need_weights"]:
        return out, None
    average = sum_over_ranks(attention.sum(1), group) / arguments["num_heads"]
    return out, average if batched else average.squeeze(0)


def _projected(arguments: dict[str, Any], width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values of this rank's heads: batch, heads, positions, width. The learnt `bias_k` and
    `bias_v` and a zero are appended to keys and values."""
    apart = [arguments[f"{name}_proj_weight"] for name in "qkv"]
    weights = apart if arguments["use_separate_proj_weight"] else arguments["in_proj_weight"].chunk(3)
    biases = (None,) * 3 if arguments["in_proj_bias"] is None else arguments["in_proj_bias"].chunk(3)
    inputs = [x if x.dim() == 3 else x.unsqueeze(1) for x in (arguments["query"], arguments["key"], arguments["value"])]
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (-1, width)).permute(1, 2, 0, 3)
        for x, w, b in zip(inputs, weights, biases, strict=True)
    )
    if arguments["bias_k"] is not None and arguments["bias_v"] is not None:
        k, v = (
            torch.cat([x, more.unflatten(-1, (-1, width)).permute(1, 2, 0, 3).expand(x.shape[0], -1, -1, -1)], 2)
            for x, more in ((k, arguments["bias_k"]), (v, arguments["bias_v"]))
        )
    if arguments["add_zero_attn"]:
        k, v = (torch.cat([x, x.new_zeros((*x.shape[:2], 1, width))], 2) for x in (k, v))
    return q, k, v


def _added(mask: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(scores.dtype)
    return torch.zeros_like(mask, dtype=scores.dtype).masked_fill(mask, -math.inf)


# Recurrent networks: a call of all steps with gathered weights, a cell's step on this rank's hidden units.
#
# A step needs the full previous state, so something must be gathered. Where one call runs all steps (in one kernel, if
# there is one), the weights are gathered once. Where the model's own Python runs the steps, each new state is gathered.


@runs(RecurrentCall)
def _all_steps(planned: RecurrentCall, at: At, func: Any, args: Any, kwargs: Any) -> Any:
    group = at.group
    weights = [(weight.path[1:], Layout.parse(weight.layout).rows_of_all(group.size)) for weight in planned.weights]
    gathered = list(args)
    for (place, item), rows in weights:
        several = list(gathered[place])
        several[item] = gather_over_ranks(several[item], group, 0, rows)
        gathered[place] = several
    return func(*gathered, **kwargs)


@runs(CellCall)
def _one_step(planned: CellCall, at: At, func: Any, args: Any, kwargs: Any) -> Any:
    group, step, layout = at.group, _STEPS[planned.site.function], Layout.parse(planned.layout)
    rows = layout.rows_of_all(group.size)
    units = layout.parts[-1].rows_of_all(group.size) if "*" in planned.layout else rows
    x, state, of_input, of_state, *biases = args
    first, second = biases or (None, None)
    before = (state,) if isinstance(state, torch.Tensor) else tuple(state)
    from_x = F.linear(copy_to_ranks(x, group), of_input, first)
    from_state = F.linear(copy_to_ranks(before[0], group), of_state, second)
    if planned.by_unit:
        before = tuple(take_rows(copy_to_ranks(part, group), -1, units[group.rank]) for part in before)
        new_state = tuple(gather_over_ranks(part, group, -1, units) for part in step(from_x, from_state, *before))
    else:
        gates = (gather_over_ranks(part, group, -1, rows) for part in (from_x, from_state))
        new_state = step(*gates, *before)
    return new_state if len(new_state) > 1 else new_state[0]


def _lstm(x: torch.Tensor, h: torch.Tensor, _: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, ...]:
    enter, forget, new, leave = (x + h).chunk(4, -1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru(x: torch.Tensor, h: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor]:
    (reset, update, new), (reset_h, update_h, new_h) = x.chunk(3, -1), h.chunk(3, -1)
    new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return ((before - new) * (update + update_h).sigmoid() + new,)


_STEPS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "lstm_cell": _lstm,
    "gru_cell": _gru,
    "rnn_tanh_cell": lambda x, h, _: (torch.tanh(x + h),),
    "rnn_relu_cell": lambda x, h, _: (torch.relu(x + h),),
}
