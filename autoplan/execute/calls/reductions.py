"""Calls that put together what ranks hold parts of, and those that only go their own way on a rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoplan.common.layout import Layout, chunk
from autoplan.execute.collectives import gather_over_ranks, sum_over_ranks
from autoplan.execute.executors import At, executes, other_branch
from autoplan.execute.randomness.streams import kept_state
from autoplan.ops import call_record
from autoplan.values import (
    DrawOnShards,
    EmbeddingCall,
    EqualPieces,
    GatherCall,
    MeanCall,
    RewriteCall,
    RowCall,
    SumCall,
)

__all__: list[str] = []

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
    group, layout = at.group, Layout.parse(planned.layout)
    rows = tuple(layout.rows(rank, group.size) for rank in range(group.size))
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
