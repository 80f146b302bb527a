"""Recurrent networks on ranks: a call of all steps with gathered weights, a cell's step on a rank's hidden units.

A step needs all of the state before it, so something must be gathered. Where one call runs all steps (one kernel, where
there is one), that is the weights, once. Where the model's own Python makes the steps, it is the new state of each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from autoplan.common.layout import Layout
from autoplan.execute.collectives import RankGroup, copy_to_ranks, gather_over_ranks, take_rows
from autoplan.execute.executors import At, executes
from autoplan.values import CellCall, RecurrentCall

__all__: list[str] = []

Run = Callable[[Any, Any, Any], Any]  # of the torch function, its args, its kwargs
Rows = tuple[tuple[int, ...], ...]


def _rows(layout: str, group: RankGroup) -> Rows:
    parsed = Layout.parse(layout)
    return tuple(parsed.rows(rank, group.size) for rank in range(group.size))


@executes(RecurrentCall)
def _all_steps(planned: RecurrentCall, at: At) -> Run:
    group = at.group
    weights = [(held.path[1:], _rows(held.layout, group)) for held in planned.weights]

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        given = list(args)
        for (place, item), rows in weights:
            several = list(given[place])
            several[item] = gather_over_ranks(several[item], group, 0, rows)
            given[place] = several
        return func(*given, **kwargs)

    return run


@executes(CellCall)
def _one_step(planned: CellCall, at: At) -> Run:
    group, step = at.group, _STEPS[planned.site.function]
    rows = _rows(planned.layout, group)
    units = _rows(str(Layout.parse(planned.layout).parts[-1]), group) if "*" in planned.layout else rows

    def run(func: Any, args: Any, kwargs: Any) -> Any:
        x, state, of_input, of_state, *biases = args
        first, second = biases or (None, None)
        before = (state,) if isinstance(state, torch.Tensor) else tuple(state)
        from_x = F.linear(copy_to_ranks(x, group), of_input, first)
        from_state = F.linear(copy_to_ranks(before[0], group), of_state, second)
        if planned.by_unit:
            before = tuple(take_rows(copy_to_ranks(one, group), -1, units[group.rank]) for one in before)
            made = tuple(gather_over_ranks(one, group, -1, units) for one in step(from_x, from_state, *before))
        else:
            gates = (gather_over_ranks(one, group, -1, rows) for one in (from_x, from_state))
            made = step(*gates, *before)
        return made if len(made) > 1 else made[0]

    return run


def _lstm(x: torch.Tensor, h: torch.Tensor, _: torch.Tensor, cell: torch.Tensor) -> tuple[torch.Tensor, ...]:
    enter, forget, new, leave = (x + h).chunk(4, -1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _gru(x: torch.Tensor, h: torch.Tensor, before: torch.Tensor) -> tuple[torch.Tensor]:
    (reset, update, new), (reset_h, update_h, new_h) = x.chunk(3, -1), h.chunk(3, -1)
    new = (new + (reset + reset_h).sigmoid() * new_h).tanh()
    return ((before - new) * (update + update_h).sigmoid() + new,)


def _plain(
    activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, h: torch.Tensor, _: torch.Tensor
) -> Any:
    return (activation(x + h),)


_STEPS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "lstm_cell": _lstm,
    "gru_cell": _gru,
    "rnn_tanh_cell": partial(_plain, torch.tanh),
    "rnn_relu_cell": partial(_plain, torch.relu),
}
