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

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from autoplan.common.layout import Layout, chunk
from autoplan.common.torch_internals import local_part, own_parameters, storage_id
from autoplan.execute.collectives import RankGroup, take_rows, whole_order

FREE = "_autoplan_free"  # an attribute of a model that FSDP2 shards: a function that frees what is gathered
_ATTRIBUTE = "_autoplan"
_MARK = "_autoplan_held"
_OF_TORCH_AND_OURS = (_MARK, "_is_param")
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
    together at the end. `views`: what the call that runs has read of parameters, by the id of the local tensor and the
    grad mode: both tensors, how it is held, and what was read. `gathered`: what FSDP2 left gathered after a forward,
    with its parameters (lost.py)."""

    inside: bool = False
    guard: Any = None
    new_forward: bool = False
    summing: bool = False  # whether any gradients are summed so
    summed: list[ModuleRecord] = field(default_factory=list)
    views: dict[tuple[int, bool], tuple[Any, torch.Tensor, Held | None, Any]] = field(default_factory=dict)
    gathered: Any = None

    def forget_views(self) -> None:
        """Forget what the call that ends has read. Parameters get the attributes that its code has set on them."""
        if torch.compiler.is_compiling():  # compiled code reads parameters anew
            return
        for _, parameter, _, view in self.views.values():
            if view is not parameter and vars(view):
                vars(parameter).update(attributes_of(view))
        self.views.clear()


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """Return what others have set on a parameter (`weight.multiplier = 0.5`), or on a view of it."""
    return {name: value for name, value in vars(parameter).items() if name not in _OF_TORCH_AND_OURS}


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


# Modules of models on ranks, found from tensors: code outside of the model has no model.

_marked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules that own marked parameters


def note_marked(model: nn.Module) -> None:
    """Note the modules of a model that own marked parameters."""
    for module in model.modules():
        if any(held_by(parameter) is not None for parameter in parameters_of([module])):
            _marked.add(module)


def marked_modules() -> list[nn.Module]:
    """Return the live modules that own marked parameters."""
    return list(_marked)


def modules_on(mesh: DeviceMesh) -> list[nn.Module]:
    """Return those with parameters on this mesh; not those of another rank that is a thread."""

    def is_here(parameter: DTensor) -> bool:
        other = parameter.device_mesh
        return other == mesh and other.get_coordinate() == mesh.get_coordinate()

    return [module for module in list(_marked) if any(map(is_here, parameters_of([module])))]


def parameters_of(owners: Iterable[nn.Module]) -> Iterator[DTensor]:
    """Yield the parameters of modules that lie on ranks; where FSDP2 has gathered one, the sharded one too."""
    for module in owners:
        record = record_of(module)
        sharded = record.reading.gathered.sharded if record is not None and record.reading.gathered is not None else {}
        for name, parameter in own_parameters(module).items():
            other = sharded.get((module, name), parameter)
            yield from (p for p in (parameter, other)[: 1 + (other is not parameter)] if isinstance(p, DTensor))


def held_of_memory(x: DTensor) -> Held | None:
    """Return how a tensor is held, if it is a marked parameter, its gradient, or the same memory under another name."""
    own = None if x.is_meta else held_by(x)
    if own is not None or x.is_meta or x.grad_fn is not None:
        return own
    place = _place(x)
    for parameter in parameters_of(list(_marked)):
        held = held_by(parameter)
        for candidate in (parameter, parameter.grad) if held is not None else ():
            if isinstance(candidate, DTensor) and _place(candidate) == place:
                return held
    return None


def _place(x: DTensor) -> Any:
    return memory_of(x), local_part(x).storage_offset(), x.shape, x.device_mesh, x.placements


def with_mark(parameter: DTensor, same: Any) -> Any:
    """Mark `parameter.data` like its parameter."""
    mark = mark_of(parameter)
    if isinstance(mark, Mark) and isinstance(same, DTensor):
        mark.put(same)
    return same
