"""What a hook does along the sequence: one of the moves, under the true length of the sequence that it is about."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoplan.common.errors import IndivisibleError
from autoplan.execute.hooks.running import Running
from autoplan.execute.hooks.sequence_shards import Share, mark_share
from autoplan.execute.sequence.moves import gather_sum, gather_whole, reduce_scatter, scatter
from autoplan.values import HookSite

__all__ = ["SEQUENCE_ACTIONS", "sequence_action", "zeros_of_a_share"]

SEQUENCE_ACTIONS = ("scatter", "gather_whole", "gather_sum", "reduce_scatter", "share")


def sequence_action(site: HookSite, running: Running) -> Callable[[torch.Tensor], torch.Tensor]:
    """One of the moves along a sequence, whose true length the scatter notes."""
    group, dim, name = running.group, site.dim, site.layout
    assert dim is not None and name is not None
    flat, name = name.endswith("*"), name.removesuffix("*")

    def cut(x: torch.Tensor) -> torch.Tensor:
        length = running.lengths.get(name, x.size(dim)) if flat else x.size(dim)
        if length % group.size and running.sequence_padding == "error" and torch.is_grad_enabled():
            raise IndivisibleError(
                f"a sequence of {length} does not divide over {group.size} ranks",
                hint=f"pad it to {-(-length // group.size) * group.size}, or pass sequence_padding='pad'",
            )
        running.lengths[name] = length
        return scatter(x, dim, group)

    def move(x: torch.Tensor) -> torch.Tensor:
        if site.action == "scatter":
            return cut(x)
        if site.action == "reduce_scatter":
            return reduce_scatter(x, dim, group)
        gather = gather_sum if site.action == "gather_sum" else gather_whole
        return gather(x, dim, running.lengths[name], group)

    def move_flattened(x: torch.Tensor) -> torch.Tensor:
        """Batch times sequence in one dim: the sequence is its minor part."""
        length = running.lengths[name]
        shared = site.action in ("gather_sum", "gather_whole")
        held = -(-length // group.size) if shared else length
        at = dim % x.dim()
        apart = x.unflatten(at, (-1, held)).movedim(at + 1, -1)
        together = move_last(apart, length)
        return together.movedim(-1, at + 1).flatten(at, at + 1)

    def move_last(x: torch.Tensor, length: int) -> torch.Tensor:
        if site.action == "scatter":
            return scatter(x, -1, group)
        if site.action == "reduce_scatter":
            return reduce_scatter(x, -1, group)
        return (gather_sum if site.action == "gather_sum" else gather_whole)(x, -1, length, group)

    def mark(x: torch.Tensor) -> torch.Tensor:
        return mark_share(x if site.action == "share" else run(x), Share(dim, str(site.layout)))

    run = move_flattened if flat else move
    return mark if site.action in ("scatter", "share") else run


def zeros_of_a_share(site: HookSite, running: Running) -> Callable[[torch.Tensor], torch.Tensor]:
    """Zeros of the size that a whole value has once it is cut; of the value's own size where nothing is cut."""

    def zeros(x: torch.Tensor) -> torch.Tensor:
        if site.dim is None or site.layout is None:
            return torch.zeros_like(x)
        length = running.lengths[site.layout.removesuffix("*")]
        shape = list(x.shape)
        shape[site.dim] = shape[site.dim] // length * -(-length // running.group.size)
        return x.new_zeros(shape)

    return zeros
