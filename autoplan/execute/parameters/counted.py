"""Rows of a gradient that several ranks hold, each counted once: by us, and by torch's own norms.

The problem: where K/V heads are fewer than ranks, a DTensor is cut into more rows than the checkpoint has, and a norm
of it counts some of them twice. Of our own parameters we know which; torch's `clip_grad_norm_` has gradients alone. So
those who own parameters with such rows are noted here, and before torch takes a norm, zeros stand where another rank
answers.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autoplan.common.layout import chunk
from autoplan.execute.collectives import index_of
from autoplan.execute.parameters.held import Held, held_by

__all__ = ["answered_for", "count_once", "note_repeating", "repeats"]

_Owner: TypeAlias = nn.Module | Optimizer  # no parameters themselves: torch swaps none to which a weak reference leads
_owners: weakref.WeakSet[_Owner] = weakref.WeakSet()


def note_repeating(owner: _Owner) -> None:
    """Have `count_once` know the gradients of those parameters of a model, or in an optimizer, whose rows repeat."""
    if isinstance(owner, Optimizer):
        if any(True for _ in _repeating(owner)):
            _owners.add(owner)
        return
    for module in owner.modules():
        if any(True for _ in _repeating(module)):
            _owners.add(module)


def _repeating(owner: _Owner) -> Iterator[tuple[torch.Tensor, Held]]:
    if isinstance(owner, Optimizer):
        given: Iterable[Any] = chain.from_iterable(group["params"] for group in owner.param_groups)
    else:
        given = owner._parameters.values()
    for parameter in given:
        held = held_by(parameter) if parameter is not None else None
        if held is not None and repeats(held):
            yield parameter, held


def count_once(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same gradients with zeros in rows of which another rank answers for the value."""
    known = {id(parameter.grad): held for owner in list(_owners) for parameter, held in _repeating(owner)}
    return [_own_rows(one, known[id(one)]) if id(one) in known else one for one in gradients]


def _own_rows(gradient: torch.Tensor, held: Held) -> torch.Tensor:
    assert isinstance(gradient, DTensor) and held.dim is not None
    local = gradient.to_local()
    rows = index_of(answered_for(held, gradient), local.device)
    own = torch.zeros_like(local).index_copy(held.dim, rows, local.index_select(held.dim, rows))
    return DTensor.from_local(
        own, gradient.device_mesh, gradient.placements, run_check=False, shape=gradient.shape, stride=gradient.stride()
    )


def repeats(held: Held) -> bool:
    """Does any row have several holders?"""
    return held.dim is not None and sum(map(len, held.rows)) > held.shape[held.dim]


def answered_for(held: Held, gradient: DTensor) -> list[int]:
    """Which of its local rows this rank holds first among the tp ranks, within its FSDP2 shard."""
    before = {row for rows in held.rows[: held.group.rank] for row in rows}
    mine = [row not in before for row in held.rows[held.group.rank]]
    mesh = gradient.device_mesh
    for mesh_dim, placement in enumerate(gradient.placements[:-1]):
        if getattr(placement, "dim", None) == held.dim:
            shard = chunk(len(mine), mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
            mine = mine[shard.start : shard.stop]
    return [place for place, wanted in enumerate(mine) if wanted]
