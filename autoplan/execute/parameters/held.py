"""The record that a module keeps of each of its sharded parameters and buffers.

The problem: a sharded parameter must be able to tell which rows of the checkpoint a rank holds, and in which order.
torch's `Shard(dim)` describes consecutive rows only. A packed weight (q, k and v in one matrix) is therefore kept in
*rank order*: the rows of rank 0, then those of rank 1, and so on. To DTensor that is an ordinary `Shard(dim)`, which
FSDP2 may shard further; the checkpoint's order is restored wherever tensors leave the model. A row that several ranks
hold appears once per rank, so the size in rank order may exceed the checkpoint's. Where ranks hold unequal numbers of
rows in a way that `Shard(dim)` does not support, each has room for as many as the first: the spare room is zero, and no
code of the model sees it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autoplan.common.layout import Layout, chunk
from autoplan.common.torch_internals import local_part, own_parameters, storage_id
from autoplan.execute.collectives import (
    Linear,
    RankGroup,
    Recorded,
    all_reduce,
    copy_rows,
    copy_to_ranks,
    linear,
    part_of_sum,
    scale_gradient,
    sum_over_ranks,
    take_rows,
    whole_order,
)

FREE = "_autoplan_free"  # an attribute of a model that FSDP2 shards: a function that frees what is gathered
_ATTRIBUTE = "_autoplan"
_MARK = "_autoplan_held"
_WRAPPERS = frozenset(("_checkpoint_wrapped_module", "_orig_mod"))  # not part of a checkpoint's names


@dataclass(frozen=True)
class SharedRows:
    """Rows with several holders: their local positions, their places among all such rows, and the number of those."""

    positions: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    count: int = 0


@dataclass(frozen=True)
class Held:
    """The placement of one tensor of the checkpoint (its `shape`). `dim` and `layout` are None if it is replicated."""

    shape: tuple[int, ...]
    group: RankGroup
    dim: int | None = None
    layout: str | None = None
    gradient: Literal["local", "sum", "shared"] = "local"
    divide: bool = False
    read: Held | None = None  # of a replicated tensor: the part that the model's code reads
    averaged: bool = False  # whether FSDP2 averages its gradient over the ranks
    shared: SharedRows = field(init=False, default=SharedRows())  # computed eagerly: traced code reads it

    def __post_init__(self) -> None:
        if self.dim is not None and self.gradient != "local":
            holders = Counter(row for held in self.rows for row in held)
            places = {row: place for place, row in enumerate(sorted(row for row, n in holders.items() if n > 1))}
            own = [(position, places[row]) for position, row in enumerate(self.rows[self.group.rank]) if row in places]
            shared = SharedRows(tuple(position for position, _ in own), tuple(place for _, place in own), len(places))
            object.__setattr__(self, "shared", shared)

    @property
    def is_summed(self) -> bool:
        """Return whether a replicated tensor, of which code reads a part, gets a partial gradient on each rank."""
        read = self.read
        return read is not None and (read.gradient != "local" or read.dim is not None)

    @cached_property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Return, for each rank, the checkpoint rows it holds along `dim`, in its order."""
        assert self.layout is not None
        return Layout.parse(self.layout).rows_of_all(self.group.size)

    @cached_property
    def own(self) -> int:
        """Return the number of rows that this rank holds."""
        return len(self.rows[self.group.rank])

    @cached_property
    def room(self) -> tuple[int, ...]:
        """Return the number of rows that each rank's parameter has room for."""
        counts = [len(rows) for rows in self.rows]
        usual = [len(chunk(sum(counts), len(counts), rank)) for rank in range(len(counts))]
        return tuple(counts) if counts == usual else (max(counts),) * len(counts)

    @cached_property
    def has_spare_room(self) -> bool:
        """Return whether a parameter has room for more rows than some rank holds."""
        return self.dim is not None and sum(self.room) > sum(map(len, self.rows))

    @cached_property
    def in_rank_order(self) -> bool:
        """Return whether concatenating the ranks' shards does not give the checkpoint's tensor."""
        return self.dim is not None and (whole_order(self.rows) is not None or self.has_spare_room)

    def roomy(self, piece: torch.Tensor) -> torch.Tensor:
        """Return a rank's rows padded with zeros to the room of its parameter."""
        if not self.has_spare_room or piece.size(self.dim or 0) == self.room[0]:
            return piece
        assert self.dim is not None
        wide = piece.new_zeros([self.room[0] if dim == self.dim else n for dim, n in enumerate(piece.shape)])
        wide.narrow(self.dim, 0, piece.size(self.dim)).copy_(piece)
        return wide

    def held_of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the rows of a local parameter that are rows of the checkpoint, as a view."""
        if not self.has_spare_room or self.own == self.room[0]:
            return local
        assert self.dim is not None
        return local.narrow(self.dim, 0, self.own)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the checkpoint's tensor, as a new tensor; `whole` itself if it is replicated."""
        return whole if self.dim is None else take_rows(whole, self.dim, self.rows[self.group.rank])

    def buffer(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a buffer, which holds no more than its code reads."""
        return self.cut(whole) if self.read is None else self.read.cut(self.cut(whole))

    def to_checkpoint_order(self, ranked: torch.Tensor) -> torch.Tensor:
        """Reorder a tensor from rank order to the checkpoint's; a row with several holders is taken from the first."""
        if self.dim is None:
            return ranked
        if self.has_spare_room and ranked.size(self.dim) == sum(self.room):
            counts = [len(rows) for rows in self.rows]
            pieces = [ranked.narrow(self.dim, r * self.room[0], count) for r, count in enumerate(counts)]
            ranked = torch.cat(pieces, self.dim)
        order = whole_order(self.rows)
        return ranked if order is None else take_rows(ranked, self.dim, order)


UNITS_ALONE = RankGroup("", 1, 0)  # the group of a parameter that FSDP2 shards and tensor parallelism does not


def units_of(x: DTensor, held: Held | None) -> int:
    """Return the number of mesh dims over which FSDP2 shards a tensor: they come first."""
    return x.device_mesh.ndim - (held is None or held.group != UNITS_ALONE)


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that tensors with the same storage share. No data pointer is read: a fake tensor has none."""
    return storage_id(local_part(tensor) if isinstance(tensor, DTensor) else tensor)


def is_local_of(tensor: torch.Tensor, parameter: Any) -> bool:
    """Return whether a plain tensor is this rank's local tensor of a parameter: the same memory."""
    if not isinstance(parameter, DTensor) or isinstance(tensor, DTensor):
        return False
    local = local_part(parameter)
    same = (tensor.shape, tensor.stride()) == (local.shape, local.stride())
    return same and memory_of(tensor) == memory_of(local)


@lru_cache(maxsize=4096)
def fsdp_placements(placements: Sequence[Placement], held: Held | None) -> Sequence[Placement]:
    """Return the placements that FSDP2 made: its mesh dims come before the one of tensor parallelism."""
    return placements if held is None or held.dim is None else placements[:-1]


@dataclass
class Reading:
    """The reading state of one model: whether its code is running (`inside`), so that parameters read as local tensors.
    `guard`: is notified of each outermost call of a module (a `PathGuard`). `new_forward`: whether a library replaced
    the forward of the called module. `summed`: records of modules that read parameters whose gradients are summed
    together at the end. `gathered`: what FSDP2 left gathered after a forward, with its parameters (gradients.py)."""

    inside: bool = False
    guard: Any = None
    new_forward: bool = False
    summing: bool = False  # whether any gradients are summed so
    summed: list[ModuleRecord] = field(default_factory=list)
    gathered: Any = None


@dataclass
class ModuleRecord:
    """The record of one module: how its own parameters and split buffers are held, by their names in the module.
    `summed`: parameters whose gradients are summed together at the end, each with what its code reads of it."""

    reading: Reading
    original: type  # the module's own class; `local_views` gives it a subclass
    parameters: dict[str, Held] = field(default_factory=dict)
    buffers: dict[str, Held] = field(default_factory=dict)
    summed: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def attach(self, module: nn.Module) -> None:
        module.__dict__[_ATTRIBUTE] = self

    @staticmethod
    def detach(module: nn.Module) -> None:
        module.__dict__.pop(_ATTRIBUTE, None)


def record_of(module: nn.Module) -> ModuleRecord | None:
    """Return the record of a module; None if it holds no parameters on ranks."""
    return module.__dict__.get(_ATTRIBUTE)


@dataclass(frozen=True)
class Mark:
    """The record on a parameter itself, for code that gets parameters and no model. `kept`: an object that lives as
    long as marked parameters do."""

    held: Held
    kept: Any

    def put(self, parameter: torch.Tensor) -> None:
        setattr(parameter, _MARK, self)


def mark_of(parameter: torch.Tensor) -> Mark | None:
    """Return a parameter's mark; None if tensor parallelism has not touched it."""
    return getattr(parameter, _MARK, None)


def held_by(parameter: torch.Tensor) -> Held | None:
    """Return how a parameter is held; None if tensor parallelism has not touched it."""
    mark = mark_of(parameter)
    return mark.held if mark is not None else None


def held_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Held | None]]:
    """Yield (checkpoint name, parameter, how it is held or None) for every name (tied parameters repeat)."""
    if FREE in vars(model):
        vars(model)[FREE]()
    for path, module in model.named_modules(remove_duplicate=False):
        record = record_of(module)
        for name, parameter in own_parameters(module).items():
            if parameter is not None:
                held = record.parameters.get(name) if record is not None else None
                yield plain_name(f"{path}.{name}" if path else name), parameter, held


def plain_name(fqn: str) -> str:
    """Return the checkpoint's name, without the levels that activation checkpointing and torch.compile insert.

    >>> plain_name("layers.0._checkpoint_wrapped_module.weight")
    'layers.0.weight'
    """
    return ".".join(part for part in fqn.split(".") if part not in _WRAPPERS)


# Context parallelism: the part of replicated weights that a rank reads, and the sum of their gradients.
#
# Weights are replicated, and so is the gradient that an optimizer sees. A rank uses a weight on its own positions, or
# its own heads of it on all positions: either way its gradient is partial. The sum is made once, at the end of a
# backward, for all parameters of the module that was called: in backward ranks may reach parameters in another order,
# or not at all, since an expert without tokens of a rank is not read there.


def part_of_whole(part: torch.Tensor, whole: Held, summed: torch.Tensor | None) -> torch.Tensor:
    """Return the part of a replicated parameter (or of a tp rank's shard) that a rank of context parallelism reads; its
    gradient is summed over ranks. `summed`: the same, where the sum is made at the end of the backward."""
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


def sum_together(module: nn.Module, reading: Reading, view: Callable[[nn.Parameter, Held], torch.Tensor]) -> None:
    """Let the modules inside read what `_CopyAll` returns of parameters whose gradients are summed at the end of the
    backward of the called module. `view`: returns a rank's local tensor of one."""
    if not reading.summing or not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    views: dict[int, torch.Tensor] = {}
    readers: list[tuple[ModuleRecord, str, torch.Tensor]] = []
    for inner in module.modules():
        if (record := record_of(inner)) is None:
            continue
        for name, parameter in own_parameters(inner).items():
            held = record.parameters.get(name)
            if parameter is None or not parameter.requires_grad or held is None or held.read is None:
                continue
            if held.is_summed:
                readers.append((record, name, parameter))
                group = held.read.group
                if id(parameter) not in views:  # tied ones are read as one
                    views[id(parameter)] = view(parameter, held)
    if views:
        copies = dict(zip(views, _CopyAll.apply(group, *views.values()), strict=True))
        reading.summed = [record for record, _, _ in readers]
        for record, name, parameter in readers:
            record.summed[name] = parameter, copies[id(parameter)]


def is_made_of_summed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor was made of what code reads of parameters whose gradients are summed at the end."""
    nodes, seen = [tensor.grad_fn], set[Any]()
    for node in nodes:  # they grow
        if node is not None and node not in seen:
            if node.name() == f"{_CopyAll.__name__}Backward":
                return True
            seen.add(node)
            nodes += [above for above, _ in node.next_functions]
    return False


_MESSAGE = 1 << 22  # numbers; a larger gradient is summed by itself


class _CopyAll(Recorded):
    """Copies of many tensors, whose gradients are summed over ranks together, at the end of a backward: a missing
    gradient counts as zeros, and a gradient that no rank has is not summed."""

    @staticmethod
    def forward(ctx: Any, group: RankGroup, *many: torch.Tensor) -> Any:
        ctx.group, ctx.like = group, [(x.shape, x.dtype, x.device) for x in many]
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in many)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        present = torch.tensor([gradient is not None for gradient in gradients], device=ctx.like[0][2])
        anywhere = all_reduce(present.to(torch.int32), ctx.group, "max").tolist()
        parts = [
            torch.zeros(shape, dtype=dtype, device=device) if gradient is None and wanted else gradient
            for gradient, (shape, dtype, device), wanted in zip(gradients, ctx.like, anywhere, strict=True)
        ]
        summed: list[torch.Tensor | None] = [None] * len(parts)
        for places in _messages(parts):
            together = [part for part in (parts[place] for place in places) if part is not None]
            if len(together) == 1:  # perhaps a large one: no copy
                summed[places[0]] = sum_over_ranks(together[0], ctx.group)
                continue
            whole = sum_over_ranks(torch.cat([part.flatten() for part in together]), ctx.group)
            pieces = whole.split([part.numel() for part in together])
            for place, piece, part in zip(places, pieces, together, strict=True):
                summed[place] = piece.view(part.shape)
        return None, *summed


def _messages(parts: Sequence[torch.Tensor | None]) -> Iterator[list[int]]:
    """Yield the places of those that are summed in one message."""
    waiting: dict[torch.dtype, list[int]] = {}
    sizes = Counter[torch.dtype]()
    for place, part in enumerate(parts):
        if part is not None:
            if sizes[part.dtype] + part.numel() > _MESSAGE and part.dtype in waiting:
                yield waiting.pop(part.dtype)
                sizes[part.dtype] = 0
            waiting.setdefault(part.dtype, []).append(place)
            sizes[part.dtype] += part.numel()
    yield from waiting.values()


def _summed_rows(
    x: torch.Tensor, group: RankGroup, dim: int, positions: tuple[int, ...], places: tuple[int, ...], count: int
) -> torch.Tensor:
    """Sum each row with several holders over them."""
    shape = list(x.shape)
    shape[dim] = count
    parts, summed = x.new_zeros(shape), x.clone()
    copy_rows(parts, places, x, positions, dim)
    copy_rows(summed, positions, all_reduce(parts, group), places, dim)
    return summed


_sum_rows = linear("SumRows", _summed_rows, lambda gradient, _, *how: sum_shared_rows(gradient, *how))
# Identity; the gradient of each row with several holders is summed over them.
sum_shared_rows: Linear[[RankGroup, int, tuple[int, ...], tuple[int, ...], int]]
sum_shared_rows = linear("SumSharedRows", lambda x, *_: x.detach(), lambda gradient, _, *how: _sum_rows(gradient, *how))
