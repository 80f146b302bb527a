"""What is done to a tensor where it enters or leaves a module, but for the moves along a sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from autoplan.common.layout import Layout
from autoplan.execute.collectives import copy_to_ranks, gather_over_ranks, scale_gradient, sum_over_ranks
from autoplan.execute.executors import Around, At, execute, executes
from autoplan.execute.sequence.apply import zeros_of_a_shard
from autoplan.values import (
    AllGather,
    AllReduce,
    AllReduceGradient,
    JoinPartial,
    MeanOverRanks,
    ParallelBlock,
    ReduceScatterSequence,
    ScaleGradient,
    WithholdPartial,
)

__all__: list[str] = []

Change = Callable[[torch.Tensor], torch.Tensor]


@executes(AllReduceGradient)
def _copy(planned: AllReduceGradient, at: At) -> Change:
    group = at.group
    return lambda x: copy_to_ranks(x, group)


@executes(AllReduce)
def _sum(planned: AllReduce, at: At) -> Change:
    group = at.group
    return lambda x: sum_over_ranks(x, group)


@executes(MeanOverRanks)
def _mean(planned: MeanOverRanks, at: At) -> Change:
    group = at.group
    return lambda x: sum_over_ranks(x, group) / group.size


@executes(ScaleGradient)
def _scale(planned: ScaleGradient, at: At) -> Change:
    size, dim = at.group.size, planned.dim
    if planned.layout is None or dim is None:
        return lambda x: scale_gradient(x, 1.0 / size)
    scale = [1.0 if carried else 1.0 / size for carried in Layout.parse(planned.layout).carried(size)]
    return lambda x: scale_gradient(x, scale, dim)


@executes(AllGather)
def _gather(planned: AllGather, at: At) -> Change:
    group, layout = at.group, Layout.parse(planned.layout)
    rows = tuple(layout.rows(rank, group.size) for rank in range(group.size))
    return lambda x: gather_over_ranks(x, group, planned.dim, rows)


@executes(WithholdPartial)
def _withhold(planned: WithholdPartial, at: At) -> Change:
    place = planned.pattern, planned.side, planned.path
    alone = execute(
        AllReduce(*place)
        if planned.dim is None or planned.sequence is None
        else ReduceScatterSequence(*place, planned.dim, planned.sequence),
        at,
    )
    zeros = zeros_of_a_shard(planned, at.running)
    return lambda x: at.running.branches.withhold(x, alone, zeros)


@executes(JoinPartial)
def _join(planned: JoinPartial, at: At) -> Change:
    return at.running.branches.join


@executes(ParallelBlock)
def _block(planned: ParallelBlock, at: At) -> Around:
    branches = at.running.branches
    return Around(begin=branches.enter, end=partial(branches.leave, at.name))
