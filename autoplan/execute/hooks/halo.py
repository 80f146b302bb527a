"""Halos, and fused attention of own queries, of ranks that hold pieces of a sequence.

    with_others      own positions → those before, own,     backward: returned
                     those after
    returned         the reverse, where those around are    backward: with_others
                     added to what the other ranks have

Where a sequence begins (the first rank) nothing comes before, and where it ends nothing comes after, so what a module
does at its own edges is done there alone. What ranks compute at the edges between them is dropped.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right

from autoplan.common.conventions import conventions
from autoplan.common.nested import change_at, change_input
from autoplan.common.torch_internals import is_fake, outside_of_modes
from autoplan.execute.collectives import Linear, RankGroup, linear, take_rows
from autoplan.execute.executors import Around, At, executes, other_branch, runs
from autoplan.execute.guard.marks import as_given, looking_on
from autoplan.execute.hooks.sequence import (
    SequenceShard,
    exchanged,
    gather_sum,
    mark_shard,
    pad,
    positions_of_a_rank,
)
from autoplan.ops import call_record
from autoplan.values import AttendAcross, Halo


class _Around(NamedTuple):
    """The positions of a rank: how many are its own and no padding, and how many of the ranks before and after it reads
    and they read of it."""

    own: int
    received: tuple[int, int]  # from the rank before, and from the one after
    sent: tuple[int, int]  # to the rank before, and to the one after


def _around(length: int, reach: tuple[int, int], group: RankGroup) -> _Around:
    piece = positions_of_a_rank(length, group)
    (before, after), first, last = reach, group.rank == 0, group.rank == group.size - 1
    received, sent = (0 if first else before, 0 if last else after), (0 if first else after, 0 if last else before)
    return _Around(min(piece, length - group.rank * piece), received, sent)


def _passed(parts: tuple[torch.Tensor, torch.Tensor], received: tuple[int, int], group: RankGroup) -> Any:
    """Send rows to the ranks before and after, and return those that came from them."""
    rest = parts[0].shape[1:]
    came, went = [0] * group.size, [0] * group.size
    for step, part, many in ((-1, parts[0], received[0]), (1, parts[1], received[1])):
        if len(part) or many:
            came[group.rank + step], went[group.rank + step] = many * rest.numel(), part.numel()
    flat = exchanged(torch.cat(parts).reshape(-1), came, went, group)
    return flat.view(sum(received), *rest).split(received)


def _with_others(x: torch.Tensor, dim: int, around: _Around, group: RankGroup) -> torch.Tensor:
    rows = x.movedim(dim, 0)[: around.own]
    parts = rows[: around.sent[0]], rows[len(rows) - around.sent[1] :]
    front, back = _passed(parts, around.received, group)
    return torch.cat([front, rows, back]).movedim(0, dim).contiguous()


def _returned(x: torch.Tensor, dim: int, around: _Around, piece: int, group: RankGroup) -> torch.Tensor:
    front, own, back = x.movedim(dim, 0).split((around.received[0], around.own, around.received[1]))
    of_first, of_last = _passed((front, back), around.sent, group)
    own = pad(own, piece, False).clone()
    own[: around.sent[0]] += of_first
    own[around.own - around.sent[1] : around.own] += of_last
    return own.movedim(0, dim).contiguous()


with_others: Linear[[int, _Around, RankGroup]]
returned: Linear[[int, _Around, int, RankGroup]]
with_others = linear("WithOthers", _with_others, lambda x, shape, d, a, group: returned(x, d, a, shape[d], group))
returned = linear("Returned", _returned, lambda x, _, d, around, piece, group: with_others(x, d, around, group))


@executes(Halo)
def _halo(planned: Halo, at: At) -> Around:
    """Run the module on a rank's own positions and those around; on all of them where it is given anything else (a
    mask, a cache), which has all positions, or where a rank has fewer than it reads."""
    running, group, dim, reach, names = at.running, at.group, planned.dim, (planned.before, planned.after), at.names
    shard = SequenceShard(planned.output_dim, planned.sequence)
    places: list[tuple[int, int]] = []  # where own positions begin, and how many there are, in the run that goes on

    def marked(x: torch.Tensor) -> torch.Tensor:
        return x if torch.compiler.is_compiling() or looking_on() is None else as_given(planned, x)

    def enter(args: Any, kwargs: Any) -> tuple[Any, Any]:
        length = running.lengths[planned.sequence.name]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        del arguments[planned.path[0]]
        alone = len(args) <= len(names) and all(isinstance(x, bool | str | None) for x in arguments.values())
        piece = positions_of_a_rank(length, group)
        fewest = length - piece * (group.size - 1)  # of the last rank
        whole, around = not alone or max(reach) > fewest, _around(length, reach, group)
        places.append((group.rank * piece, piece) if whole else (around.received[0], around.own))

        def take(x: torch.Tensor) -> torch.Tensor:
            return marked(gather_sum(x, dim, length, group) if whole else with_others(x, dim, around, group))

        return change_input(args, kwargs, names, planned.path, take, at.where)

    def leave(output: Any) -> Any:
        (front, many), piece = places.pop(), positions_of_a_rank(running.lengths[planned.sequence.name], group)

        def keep(x: torch.Tensor) -> torch.Tensor:
            rows = x.movedim(planned.output_dim, 0)
            rows = pad(pad(rows, max(len(rows), front + many), True).narrow(0, front, many), piece, True)
            return marked(mark_shard(rows.movedim(0, planned.output_dim).contiguous(), shard))

        return change_at(output, planned.output, keep, at.where)

    return Around(enter, leave)


# Fused attention of a rank's own queries, with the keys and values of all ranks.

_AFTER_VALUES = ("attn_mask", "dropout_p", "is_causal")
_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


@runs(AttendAcross)
def _attend(planned: AttendAcross, at: At, func: Any, args: Any, kwargs: Any) -> Any:
    running, group, name, where = at.running, at.group, planned.sequence.name, f"{at.where}: {planned.site}"
    fused = call_record(planned.site.function).causal is not None  # else it projects, and the batch comes second
    if fused:
        options: dict[str, Any] = dict(zip(_AFTER_VALUES, args[3:], strict=False)) | kwargs
    else:
        options = _SIGNATURE.bind(*args, **kwargs).arguments
    (query, key, value), length = args[:3], running.lengths[name]
    dim = -2 if fused or query.dim() == 2 else -3
    own = positions_of_a_rank(length, group)
    lengths, mask = [x.size(dim) for x in (query, key, value)], options.get("attn_mask")
    if lengths != [own] * 3 or (mask is not None and mask.size(-2) not in (1, length)):
        lengths += [] if mask is None else [mask.size(-2)]
        raise other_branch(
            f"{where} gets {lengths} positions, and a rank has {own} of {length} (a cache? "
            f"{conventions().cache_switch}=False)"
        )
    if own == 1 < length:
        raise other_branch(f"{where}: a rank has one of {length} positions, which code often treats apart")
    end = min((group.rank + 1) * own, length)
    count = max(1, end - group.rank * own)  # without padding; a rank that has nothing else keeps one
    keys = gather_sum(key, dim, length, group)
    values = keys if value is key else gather_sum(value, dim, length, group)
    query = query.narrow(dim, 0, count)
    if mask is not None and mask.size(-2) != 1:
        options |= {"attn_mask": take_rows(mask, -2, range(end - count, end)), "is_causal": False}
    elif fused and mask is None and options.get("is_causal"):  # later keys are seen by none of these
        keys, values = keys[..., :end, :], values[..., :end, :]
        options |= _causal_of_the_last(count, end, query)
    if fused:
        seen, more = func(query, keys, values, **options), ()
    else:
        seen, *more = func(**options | {"query": query, "key": keys, "value": values})
    padded = pad(seen.movedim(dim, 0), own, values=True).movedim(0, dim)
    return padded if fused else (padded, *more)


def _causal_of_the_last(count: int, end: int, query: torch.Tensor) -> dict[str, Any]:
    """Return the options for the last `count` of `end` positions. Kernels for GPUs need no mask in memory."""
    compiling = torch.compiler.is_compiling()
    if not compiling and (query.is_meta or is_fake(query)):  # no values are computed
        return {"is_causal": True}
    if not query.is_cuda:
        mask = torch.ones(count, end, dtype=torch.bool, device=query.device).tril(end - count)
    elif compiling:
        mask = causal_lower_right(count, end)
    else:  # a tensor of a class that cannot be made under a mode
        with outside_of_modes():
            mask = causal_lower_right(count, end)
    return {"attn_mask": mask, "is_causal": False}
