"""A halo: the last positions of the rank before, in front of a rank's own.

    with_before      own positions → those before, own      backward: returned
    returned         the reverse, where those before are    backward: with_before
                     added to what the rank before has

Where a module begins (the first rank) nothing comes before, so what it does at its own edge is done there alone. What
the other ranks compute at theirs is dropped.
"""

from __future__ import annotations

from typing import Any

import torch

from autoplan.common.nested import change_input, change_output
from autoplan.execute.collectives import RankGroup, Recorded
from autoplan.execute.executors import Around, At, executes
from autoplan.execute.guard.marks import as_given, looking_on
from autoplan.execute.hooks.exchange import exchanged, pad, positions_of_a_rank
from autoplan.execute.hooks.sequence import SequenceShard, gather_sum, mark_shard
from autoplan.values import Halo


def _passed(rows: torch.Tensor, many: int, step: int, group: RankGroup) -> torch.Tensor:
    """Send rows to the rank `step` away, if there is one, and return the `many` rows from the other side."""
    to, come = group.rank + step, group.rank - step
    sent = [rows.numel() if rank == to else 0 for rank in range(group.size)]
    received = [many * rows.shape[1:].numel() if rank == come else 0 for rank in range(group.size)]
    flat = (rows if 0 <= to < group.size else rows[:0]).reshape(-1)
    return exchanged(flat, received, sent, group).view(many, *rows.shape[1:])


class _WithBefore(Recorded):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, before: int, group: RankGroup) -> torch.Tensor:
        ctx.how = dim, before, group
        rows = x.movedim(dim, 0)
        come = _passed(rows[-before:], before if group.rank else 0, 1, group)
        return torch.cat([come, rows]).movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Returned.apply(gradient, *ctx.how), None, None, None


class _Returned(Recorded):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dim: int, before: int, group: RankGroup) -> torch.Tensor:
        ctx.how = dim, before, group
        rows = x.movedim(dim, 0)
        first, last = group.rank == 0, group.rank == group.size - 1
        own = rows[0 if first else before :].clone()
        come = _passed(rows[: 0 if first else before], 0 if last else before, -1, group)
        own[len(own) - len(come) :] += come
        return own.movedim(0, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _WithBefore.apply(gradient, *ctx.how), None, None, None


@executes(Halo)
def _halo(planned: Halo, at: At) -> Around:
    """Run the module on a rank's own positions and those before; on all of them where it is given anything else (a
    mask, a cache), which has all positions, or where a rank has fewer than it reads."""
    running, group, dim, before, names = at.running, at.group, planned.dim, planned.before, at.names
    shard = SequenceShard(planned.output_dim, planned.sequence)
    fronts: list[int] = []  # the number of positions in front of own ones in the run that goes on

    def marked(x: torch.Tensor) -> torch.Tensor:
        return x if torch.compiler.is_compiling() or looking_on() is None else as_given(planned, x)

    def enter(args: Any, kwargs: Any) -> tuple[Any, Any]:
        length = running.lengths[planned.sequence.name]
        given = dict(zip(names, args, strict=False)) | kwargs
        del given[planned.path[0]]
        alone = len(args) <= len(names) and all(isinstance(x, bool | str | None) for x in given.values())
        piece = positions_of_a_rank(length, group)
        whole = not alone or before > piece
        fronts.append(group.rank * piece if whole else before if group.rank else 0)

        def take(x: torch.Tensor) -> torch.Tensor:
            return marked(gather_sum(x, dim, length, group) if whole else _WithBefore.apply(x, dim, before, group))

        return change_input(args, kwargs, names, planned.path, take, at.where)

    def leave(output: Any) -> Any:
        front, piece = fronts.pop(), positions_of_a_rank(running.lengths[planned.sequence.name], group)

        def keep(x: torch.Tensor) -> torch.Tensor:
            rows = x.movedim(planned.output_dim, 0)
            rows = pad(rows, max(len(rows), front + piece), True).narrow(0, front, piece)
            return marked(mark_shard(rows.movedim(0, planned.output_dim).contiguous(), shard))

        return change_output(output, planned.output, keep, at.where)

    return Around(enter, leave)
