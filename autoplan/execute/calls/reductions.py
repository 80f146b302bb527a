"""Calls that reduce over a sharded dim: softmax and its like, norms, variances, vector norms."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from autoplan.common.layout import Layout, chunk
from autoplan.execute.collectives import RankGroup, copy_to_ranks, gather_over_ranks, sum_over_ranks
from autoplan.execute.executors import At, executes, other_branch
from autoplan.execute.random_streams import kept_state
from autoplan.ops import call_record
from autoplan.values import (
    DrawOnShards,
    EmbeddingCall,
    EqualPieces,
    GatherCall,
    LengthCall,
    MeanCall,
    NormCall,
    RewriteCall,
    RowCall,
    SumCall,
    VarianceCall,
)

# Calls that put together what ranks hold parts of, and those that only go their own way on a rank.

Run = Callable[[Any, Any, Any], Any]  # of the torch function, its args, its kwargs


@executes(RewriteCall)
def _as_written(planned: RewriteCall, at: At) -> Run:
    return lambda func, args, kwargs: func(*args, **kwargs)


@executes(SumCall, MeanCall)
def _reduced(planned: SumCall | MeanCall, at: At) -> Run:
    group, mean = at.group, isinstance(planned, MeanCall)
    product = call_record(planned.site.function).product

    def run(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        bias = None
        if product is not None and product.bias == 2:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            args, kwargs = (*args[:2], None, *args[3:]), {k: v for k, v in kwargs.items() if k != "bias"}
            if bias is not None and not product.of_rows:  # of a convolution: along the channels
                bias = bias.view(-1, *[1] * (args[0].dim() - 2))
        elif product is not None and product.bias == 0:
            bias, args = args[0] * kwargs.get("beta", 1), args[1:]
            func, kwargs = (torch.mm if args[0].dim() == 2 else torch.bmm), {}
        result = sum_over_ranks(func(*args, **kwargs), group)
        if mean:
            result = result / group.size
        return result if bias is None else result + bias

    return run


@executes(EmbeddingCall)
def _looked_up(planned: EmbeddingCall, at: At) -> Run:
    """Rows of a table of which this rank holds a piece: foreign ids give zeros, and the sum is the row."""
    group = at.group
    own = chunk(planned.rows, group.size, group.rank)

    def run(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        table = 0 if args[0].is_floating_point() else 1  # aten's own embedding takes the table first
        ids, padding = args[1 - table], args[2] if len(args) > 2 else kwargs.get("padding_idx")
        foreign = (ids < own.start) | (ids >= own.stop)
        local = padding - own.start if padding is not None and padding in own else None
        own_ids = (ids - own.start).masked_fill(foreign, 0)
        local = -1 if local is None and table == 0 else local
        args = (*((args[0], own_ids) if table == 0 else (own_ids, args[1])), local, *args[3:])
        found = func(*args, **{name: value for name, value in kwargs.items() if name != "padding_idx"})
        return sum_over_ranks(found.masked_fill(foreign.unsqueeze(-1), 0), group)

    return run


@executes(RowCall)
def _row(planned: RowCall, at: At) -> Run:
    """table[number] or table[number, …]: the rank that has the row gives it, the others zeros."""
    group = at.group
    own = chunk(planned.rows, group.size, group.rank)

    def run(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        table, index = args
        several = isinstance(index, tuple)
        number = (index[0] if several else index) % planned.rows
        table = table if number in own else table.new_zeros(1, *table.shape[1:])
        local = number - own.start if number in own else 0
        return sum_over_ranks(func(table, (local, *index[1:]) if several else local), group)

    return run


@executes(GatherCall)
def _gathered(planned: GatherCall, at: At) -> Run:
    group = at.group
    rows = Layout.parse(planned.layout).rows_of_all(group.size)
    return lambda func, args, kwargs: gather_over_ranks(func(*args, **kwargs), group, planned.dim, rows)


@executes(EqualPieces)
def _pieces(planned: EqualPieces, at: At) -> Run:
    """Pieces that are equally long on the whole model, and not on a rank that holds a part of some of them."""
    dim, lengths = planned.dim, planned.pieces[at.group.rank]

    def run(func: Any, args: Any, kwargs: Any) -> tuple[torch.Tensor, ...]:
        x = args[0] if args else kwargs["input"]
        if x.shape[dim] != sum(lengths):
            raise other_branch(
                f"{at.where}: {planned.site} parts {x.shape[dim]} where the plan was made for {sum(lengths)}"
            )
        return x.split(lengths, dim)

    return run


@executes(DrawOnShards)
def _drawn(planned: DrawOnShards, at: At) -> Run:
    """A call that is told sizes may be told the whole ones: then all ranks draw alike, and each keeps its part."""
    running, module = at.running, at.module
    whole_sizes = [(cut.dim, Layout.parse(cut.layout).size) for cut in planned.cuts]

    def draw(func: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(kwargs.get("generator"), torch.Generator):
            with running.randomness.split_of(kwargs["generator"]) as own:
                return func(*args, **{**kwargs, "generator": own})
        if not (running.may_draw(module) or whole_sizes):
            return func(*args, **kwargs)
        with running.randomness.split():
            return func(*args, **kwargs)

    def draw_by_size(func: Any, args: Any, kwargs: Any) -> Any:
        with kept_state(kwargs.get("generator")) as put_back:
            result = func(*args, **kwargs)
            if all(result.shape[dim] == size for dim, size in whole_sizes):
                return result
            put_back()
        return draw(func, args, kwargs)

    return draw_by_size if whole_sizes else draw


# layer_norm and rms_norm whose statistic spans all ranks: sums are reduced forward and backward.


@executes(NormCall)
def _norm(planned: NormCall, at: At) -> Callable[[Any, Any, Any], torch.Tensor]:
    group, count, layer = at.group, planned.count, planned.statistics == 2
    dims = tuple(range(-planned.dims, 0))

    def run(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
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

    return run


def _statistic(x: torch.Tensor, dims: tuple[int, ...], group: RankGroup) -> torch.Tensor:
    return copy_to_ranks(sum_over_ranks(x.sum(dims, keepdim=True), group), group)


# A variance over an axis of which every rank holds a part.
#
# The mean and the spread of each rank's part say all that the whole needs: the variance is the average spread plus that
# of the means. Ranks gather those two numbers and put them together, each for itself. So one small all-gather serves
# forward, and backward needs nothing: every rank has the whole gradient and keeps what belongs to its own two numbers.
# Summing x and x² instead would be as cheap, and lose digits.


@executes(VarianceCall)
def _variance(planned: VarianceCall, at: At) -> Callable[[Any, Any, Any], torch.Tensor]:
    group = at.group
    return lambda func, args, kwargs: _over_ranks(planned, args[0] if args else kwargs["input"], group)


def _over_ranks(planned: VarianceCall, x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """`var` or `std` of the whole of which x is this rank's part."""
    dims, held = planned.dims, planned.held
    wide = x.float() if x.dtype.itemsize < 4 else x
    spread, mean = torch.var_mean(wide, dims, correction=0, keepdim=True)
    own = torch.stack((mean, spread)).unsqueeze(0)
    ranks = tuple((rank,) for rank in range(group.size))
    means, spreads = gather_over_ranks(own, group, 0, ranks).unbind(1)
    parts = wide.new_tensor(held).div(sum(held)).view(-1, *[1] * x.dim())
    whole = (parts * means).sum(0)
    count = prod(x.size(dim) for dim in dims) * sum(held) / held[group.rank]
    variance = (parts * (spreads + (means - whole).square())).sum(0) * count / max(count - planned.correction, 0)
    result = variance.sqrt() if planned.site.function == "std" else variance
    return (result if planned.keepdim else result.squeeze(dims)).to(x.dtype)


# Lengths of vectors of which every rank holds a part: the squares are summed over ranks, then the root is taken.
#
# A call may return the lengths themselves (`norm`), or what it divides by them (`normalize`, `_weight_norm`): there
# each rank knows only its part of a length's gradient, so those parts are summed in backward.


@executes(LengthCall)
def _lengths_of(planned: LengthCall, at: At) -> Callable[[Any, Any, Any], Any]:
    group = at.group
    return lambda func, args, kwargs: _scaled(planned, args, kwargs, group)


def _scaled(planned: LengthCall, args: tuple[Any, ...], kwargs: dict[str, Any], group: RankGroup) -> Any:
    """What `planned`, a call that takes lengths over an axis of which x is this rank's part, returns on this rank."""
    name = planned.site.function
    given = dict(zip(_SIGNATURES.get(name, ("x",)), args, strict=False)) | kwargs
    x = next(iter(given.values()))
    x = x if kwargs.get("dtype") is None else x.to(kwargs["dtype"])
    # Over `dims`, which stay as dims of 1. Where everything is zero the gradient is zero, as torch has it.
    wide = x.float() if x.dtype.itemsize < 4 else x
    squares = sum_over_ranks(wide.square().sum(planned.dims, keepdim=True), group)
    lengths = torch.where(squares > 0, squares, 1.0).sqrt().mul(squares > 0).to(x.dtype)
    if name == "normalize":
        return x / copy_to_ranks(lengths, group).clamp_min(given.get("eps", 1e-12))
    if name == "_weight_norm":
        return x * (given["g"] / copy_to_ranks(lengths, group))
    return lengths if planned.keepdim else lengths.squeeze(planned.dims)


_SIGNATURES = {"normalize": ("input", "p", "dim", "eps"), "_weight_norm": ("v", "g", "dim")}
