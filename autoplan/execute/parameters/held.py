"""What a module remembers about each of its parameters and buffers once they lie on ranks.

The problem: a sharded parameter must still be able to say which rows of the checkpoint a rank holds, and in which
order. torch's `Shard(dim)` can say it for consecutive rows only. A packed weight (q, k and v in one matrix) is
therefore kept in *rank order*: the rows of rank 0, then those of rank 1, and so on. To DTensor that is an ordinary
`Shard(dim)`, which FSDP2 may cut further; the checkpoint's order is restored wherever tensors leave the model. A row
that several ranks hold appears once per rank, so the size in rank order may exceed the checkpoint's. Where ranks hold
unequal numbers of rows in a way that `Shard(dim)` does not know, each has room for as many as the first: the room that
is left over is zero, and no code of the model sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autoplan.common.layout import Layout, chunk
from autoplan.execute.collectives import (
    RankGroup,
    copies_to_ranks,
    copy_to_ranks,
    part_of_sum,
    scale_gradient,
    take_rows,
    whole_order,
)

_ATTRIBUTE = "_autoplan"
_MARK = "_autoplan_held"
_WRAPPERS = frozenset(("_checkpoint_wrapped_module", "_orig_mod"))  # not part of a checkpoint's names


@dataclass(frozen=True)
class SharedRows:
    """Rows with several holders: where this rank has them, which of all such rows those are, how many there are."""

    positions: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    count: int = 0


@dataclass(frozen=True)
class Held:
    """How one tensor of the checkpoint (its `shape`) lies on ranks. `dim` and `layout` are None when it is whole."""

    shape: tuple[int, ...]
    group: RankGroup
    dim: int | None = None
    layout: str | None = None
    gradient: Literal["local", "sum", "shared"] = "local"
    divide: bool = False
    read: Held | None = None  # of a tensor that lies whole on each rank, and of which code of the model reads this part
    averaged: bool = False  # its gradient is averaged over the ranks elsewhere, by FSDP2
    shared: SharedRows = field(init=False, default=SharedRows())  # eager: traced code reads it

    def __post_init__(self) -> None:
        if self.dim is not None and self.gradient != "local":
            object.__setattr__(self, "shared", _shared(self.rows, self.group.rank))

    @property
    def is_summed(self) -> bool:
        """Does a whole tensor, of which code reads a part, get a part of its gradient on each rank?"""
        read = self.read
        return read is not None and (read.gradient != "local" or read.dim is not None)

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """For each rank, the checkpoint rows it holds along `dim`, in the order it holds them."""
        assert self.layout is not None
        return Layout.parse(self.layout).rows_of_all(self.group.size)

    @cached_property
    def own(self) -> int:
        """How many rows this rank holds."""
        return len(self.rows[self.group.rank])

    @cached_property
    def room(self) -> tuple[int, ...]:
        """For how many rows each rank's parameter has room."""
        counts = [len(rows) for rows in self.rows]
        usual = [len(chunk(sum(counts), len(counts), rank)) for rank in range(len(counts))]
        return tuple(counts) if counts == usual else (max(counts),) * len(counts)

    @cached_property
    def has_spare_room(self) -> bool:
        """Has a parameter room for more rows than some rank holds?"""
        return self.dim is not None and sum(self.room) > sum(map(len, self.rows))

    @cached_property
    def in_rank_order(self) -> bool:
        """Is it packed, so that concatenating the ranks' pieces does not give the checkpoint's tensor?"""
        return self.dim is not None and (whole_order(self.rows) is not None or self.has_spare_room)

    def roomy(self, piece: torch.Tensor) -> torch.Tensor:
        """A rank's rows with zeros in the room that its parameter has left over."""
        if not self.has_spare_room or piece.size(self.dim or 0) == self.room[0]:
            return piece
        assert self.dim is not None
        sizes = list(piece.shape)
        sizes[self.dim] = self.room[0]
        wide = piece.new_zeros(sizes)
        wide.narrow(self.dim, 0, piece.size(self.dim)).copy_(piece)
        return wide

    def held_of(self, local: torch.Tensor) -> torch.Tensor:
        """The rows of a local parameter that stand for rows of the checkpoint, as a view."""
        if not self.has_spare_room or self.own == self.room[0]:
            return local
        assert self.dim is not None
        return local.narrow(self.dim, 0, self.own)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the checkpoint's tensor, as a new tensor; `whole` itself when it is not split."""
        return whole if self.dim is None else take_rows(whole, self.dim, self.rows[self.group.rank])

    def buffer(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's piece of a buffer, of which it holds no more than its code reads."""
        return self.cut(whole) if self.read is None else self.read.cut(self.cut(whole))

    def to_checkpoint_order(self, ranked: torch.Tensor) -> torch.Tensor:
        """The inverse; a row that several ranks hold is taken from the first."""
        if self.dim is None:
            return ranked
        if self.has_spare_room and ranked.size(self.dim) == sum(self.room):
            counts = [len(rows) for rows in self.rows]
            pieces = [ranked.narrow(self.dim, r * self.room[0], count) for r, count in enumerate(counts)]
            ranked = torch.cat(pieces, self.dim)
        order = whole_order(self.rows)
        return ranked if order is None else take_rows(ranked, self.dim, order)


def memory_of(tensor: torch.Tensor) -> int:
    """The same number for tensors that share a storage. No pointer to data is read: a fake tensor has none."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()._cdata


@lru_cache(maxsize=4096)
def fsdp_placements(placements: Sequence[Placement], held: Held | None) -> Sequence[Placement]:
    """Those that FSDP2 made: its mesh dims come before the one over which a tensor was cut already."""
    return placements if held is None or held.dim is None else placements[:-1]


def _shared(rows: tuple[tuple[int, ...], ...], rank: int) -> SharedRows:
    holders = Counter(row for held in rows for row in held)
    places = {row: place for place, row in enumerate(sorted(row for row, n in holders.items() if n > 1))}
    here = [(position, places[row]) for position, row in enumerate(rows[rank]) if row in places]
    return SharedRows(tuple(position for position, _ in here), tuple(place for _, place in here), len(places))


@dataclass
class Reading:
    """One per model: is code of the model running, so that reading a parameter gives the local tensor? `guard`: what is
    told of each outermost call of one of its modules (a `PathGuard`). `new_forward`: has a library set a forward on one
    of them? `summed`: by id, parameters of the module that runs, whose gradients are summed together at the end."""

    inside: bool = False
    guard: Any = None
    new_forward: bool = False
    summing: bool = False  # are there any?
    summed: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class ModuleRecord:
    """One per module: how its own parameters and split buffers are held, by their names in the module."""

    reading: Reading
    original: type  # the module's own class; `local_views` gives it a subclass
    parameters: dict[str, Held] = field(default_factory=dict)
    buffers: dict[str, Held] = field(default_factory=dict)

    def attach(self, module: nn.Module) -> None:
        module.__dict__[_ATTRIBUTE] = self

    @staticmethod
    def detach(module: nn.Module) -> None:
        module.__dict__.pop(_ATTRIBUTE, None)


def record_of(module: nn.Module) -> ModuleRecord | None:
    """What is remembered about a module; None for one that holds no parameters on ranks."""
    return module.__dict__.get(_ATTRIBUTE)


@dataclass(frozen=True)
class Mark:
    """What a parameter itself knows, for those who get parameters and no model: how it lies on ranks. `kept`: what
    lives as long as marked parameters do."""

    held: Held
    kept: Any

    def put(self, parameter: torch.Tensor) -> None:
        setattr(parameter, _MARK, self)


def mark_of(parameter: torch.Tensor) -> Mark | None:
    """None for a parameter that tensor parallelism has not touched."""
    return getattr(parameter, _MARK, None)


def held_by(parameter: torch.Tensor) -> Held | None:
    """How a parameter lies on ranks; None for one that tensor parallelism has not touched."""
    mark = mark_of(parameter)
    return mark.held if mark is not None else None


def held_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Held | None]]:
    """Every parameter under every name it has (tied ones repeat), with checkpoint names; None: not on ranks."""
    for path, module in model.named_modules(remove_duplicate=False):
        record = record_of(module)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                held = record.parameters.get(name) if record is not None else None
                yield plain_name(f"{path}.{name}" if path else name), parameter, held


def plain_name(fqn: str) -> str:
    """The checkpoint's name: without the levels that activation checkpointing and torch.compile put in between.

    >>> plain_name("layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


# What a rank of context parallelism reads of whole weights, and the sum of their gradients.
#
# Weights are whole on each rank, and so is the gradient that an optimizer sees. A rank uses a weight on its own
# positions, or its own heads of it on all positions: either way its gradient is one part of a sum. The sum is made
# once, at the end of a backward, for all parameters of the module that was called: on their way back ranks may meet
# parameters in another order, or not at all, since experts that get no token of a rank are not read there.

NOTHING: Mapping[int, torch.Tensor] = MappingProxyType({})


def part_of_whole(part: torch.Tensor, whole: Held, summed: torch.Tensor | None) -> torch.Tensor:
    """What a rank of context parallelism reads of a parameter, or of what its rank of another split holds of it, and
    whose gradient is the sum over ranks. `summed`: the same, where the sum is made at the end of the backward."""
    held = whole.read
    if held is None or held.group.size == 1:
        return part
    size = held.group.size
    if whole.is_summed and summed is not None:
        part = summed
    elif whole.is_summed:
        part = scale_gradient(part, float(size)) if held.averaged else copy_to_ranks(part, held.group)
    if held.dim is not None and held.layout is not None:
        part = take_rows(part, held.dim, held.rows[held.group.rank])
        layout = Layout.parse(held.layout)
        if held.gradient == "local" and not layout.all_carried():
            part = scale_gradient(part, [1.0 if carried else 1.0 / size for carried in layout.carried(size)], held.dim)
    return part_of_sum(part, size) if held.divide else part


def summed_together(module: nn.Module, view: Callable[[nn.Parameter, Held], torch.Tensor]) -> dict[int, torch.Tensor]:
    """Of the parameters of a module that is called: those whose gradients ranks sum, at the end of its backward.
    `view`: what a rank holds of one."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return {}
    found: dict[int, torch.Tensor] = {}
    groups = set[RankGroup]()
    for inner in module.modules():
        record = record_of(inner)
        for name, parameter in inner._parameters.items() if record is not None else ():
            held = record.parameters.get(name) if record is not None else None
            if parameter is None or not parameter.requires_grad or held is None or held.read is None:
                continue
            if held.is_summed and id(parameter) not in found:
                found[id(parameter)] = view(parameter, held)
                groups.add(held.read.group)
    if not found:
        return {}
    copies = copies_to_ranks(list(found.values()), groups.pop())
    return dict(zip(found, copies, strict=True))
