"""The few communications of a sharded model, each differentiable and each a no-op on one rank.

The problem: a collective in the middle of a model needs the backward that is right *for what the value means*, and
torch's functional collectives leave that open. These meanings suffice:

    copy_to_ranks     a replicated value enters a split      identity forward, sum of the gradients backward
    sum_over_ranks    partial sums leave a split region      sum forward, identity backward
    gather_over_ranks shards become a replicated value       concatenate forward, own shard backward
    scale_gradient    a replicated value whose gradient      identity forward, a part of the gradient backward
                      will be summed over ranks
    part_of_sum       a replicated value that ranks add up   a part forward, identity backward

Where two of them are each other's backward, second derivatives are right too. They call the functional ops that
`torch.compile` traces. An identity returns a detached alias: the input object itself, or `view_as` of it, would make
every later in-place op on the result an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Concatenate, ParamSpec, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoplan.common.layout import chunk
from autoplan.common.torch_internals import (
    collectives_by_name,
    is_wrapped,
    outside_of_vmap,
    transforms_are_active,
    unwrapped,
)

How = ParamSpec("How")
_FEW_RUNS = 32  # more runs than that are selected by an index
_FEW_OPS = 16  # between a value and its reader
_NAMED = collectives_by_name


@dataclass(frozen=True)
class RankGroup:
    """The ranks that share one split, as plain data: traceable, comparable, and copied with the model that holds it."""

    name: str
    size: int
    rank: int

    @staticmethod
    def of(ranks: RankGroup | DeviceMesh | dist.ProcessGroup) -> RankGroup:
        """Return the group of a 1-D mesh or a process group."""
        if isinstance(ranks, RankGroup):
            return ranks
        group = ranks.get_group() if isinstance(ranks, DeviceMesh) else ranks
        return RankGroup(group.group_name, group.size(), group.rank())


def like(local: torch.Tensor, other: DTensor) -> DTensor:
    """Return a DTensor of this rank's local tensor, laid out like `other`. (`from_local` would assume even shards.)"""
    layout: Any = {"run_check": False, "shape": other.shape, "stride": other.stride()}
    return DTensor.from_local(local, other.device_mesh, other.placements, **layout)


def with_sums(x: DTensor) -> DTensor:
    """Return a DTensor with the sums over ranks made that it waits for; itself if there are none."""
    if not any(placed.is_partial() for placed in x.placements):
        return x
    return x.redistribute(placements=[Replicate() if placed.is_partial() else placed for placed in x.placements])


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return the device on which this rank computes."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


Ranks: TypeAlias = RankGroup | DeviceMesh | dist.ProcessGroup


# Not recorded by autograd.


def sent(collective: Any, *args: Any) -> torch.Tensor:
    """Return the waited-for result of one of torch's functional collectives. It is called below autograd: the check
    that nothing is to be recorded would take longer than everything else here."""
    if torch.compiler.is_compiling():
        return _NAMED.wait_tensor(collective(*args))
    with torch._C._AutoDispatchBelowAutograd():
        return _NAMED.wait_tensor.default(collective.default(*args))


def all_reduce(x: torch.Tensor, group: RankGroup, op: str = "sum") -> torch.Tensor:
    """Return the sum (or "max", "min") of x over ranks, as a new tensor. It is not differentiable by itself."""
    if x.is_complex():
        return torch.view_as_complex(all_reduce(torch.view_as_real(x), group, op))
    return sent(_NAMED.all_reduce, x.contiguous(), op, group.name)


def all_reduce_over(x: torch.Tensor, mesh: DeviceMesh, op: str = "sum") -> torch.Tensor:
    """All-reduce x along every dim of a mesh."""
    for dim in range(mesh.ndim):
        group = RankGroup.of(mesh.get_group(dim))
        x = all_reduce(x, group, op) if group.size > 1 else x
    return x


def all_gather_rows(x: torch.Tensor, group: RankGroup, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """Return every rank's x, concatenated along `dim` in rank order; `sizes` are the numbers of rows per rank."""
    if x.is_complex():
        real = all_gather_rows(torch.view_as_real(x), group, dim % x.dim(), sizes)
        return torch.view_as_complex(real.contiguous())
    if x.is_floating_point() and x.dtype.itemsize == 1:  # not every backend sends 8-bit floats; all send bytes
        return all_gather_rows(x.view(torch.uint8), group, dim, sizes).contiguous().view(x.dtype)
    rows, longest = x.movedim(dim, 0), max(sizes)
    if rows.size(0) < longest:  # all-gather takes equal shards only
        rows = torch.cat([rows, rows.new_zeros(longest - rows.size(0), *rows.shape[1:])])
    whole = sent(_NAMED.all_gather_into_tensor, rows.contiguous(), group.size, group.name)
    if min(sizes) < longest:
        whole = torch.cat([whole[rank * longest : rank * longest + size] for rank, size in enumerate(sizes)])
    return whole.movedim(0, dim)


@lru_cache(maxsize=4096)
def whole_order(rows: tuple[tuple[int, ...], ...]) -> tuple[int, ...] | None:
    """Return the position in rank order of each global row (at its first holder); None if the rows are already in
    order.

    >>> whole_order(((0, 2), (1, 2)))
    (0, 2, 1)
    """
    positions: dict[int, int] = {}
    for position, row in enumerate(row for of_rank in rows for row in of_rank):
        positions.setdefault(row, position)
    order = tuple(positions[row] for row in range(len(positions)))
    return None if order == tuple(range(sum(len(row) for row in rows))) else order


# Recorded by autograd; so is each backward, which a penalty on gradients differentiates again.


class Recorded(torch.autograd.Function):
    """A Function that skips the search for leftovers of torch.func transforms when none is active: that search is more
    than half of the cost of a call. `of_each`: it does the same to each element, and so can run inside of a vmap."""

    of_each = False

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        if transforms_are_active():
            if cls.of_each and not is_wrapped(unwrapped(args[0])):
                return outside_of_vmap(cls.apply, *args)
            return super().apply(*args, **kwargs)
        return super(torch.autograd.Function, cls).apply(*args, **kwargs)


Linear: TypeAlias = Callable[Concatenate[torch.Tensor, How], torch.Tensor]
_Rows: TypeAlias = tuple[Sequence[int], ...]  # of each rank


def linear(name: str, forth: Callable[..., torch.Tensor], back: Callable[..., torch.Tensor]) -> Any:
    """Return the linear function `forth(x, *how)` as one that autograd records; in a graph its node has this name.
    `back(gradient, shape of x, *how)` is its backward, which must be recorded too."""

    def forward(ctx: Any, x: torch.Tensor, *how: Any) -> torch.Tensor:
        ctx.shape, ctx.how = x.shape, how
        return forth(x, *how)

    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return back(gradient, ctx.shape, *ctx.how), *[None] * len(ctx.how)

    function: Any = type(name, (Recorded,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})
    return lambda x, *how: function.apply(x, *how)


def recorded_again() -> bool:
    """Return whether the running backward will itself be differentiated."""
    return torch.is_grad_enabled() or torch.compiler.is_compiling()


def in_backward() -> bool:
    """Return whether a backward runs in this thread; checkpointed code is recomputed there."""
    return torch._C._current_graph_task_id() != -1


class _Copy(Recorded):
    of_each = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Sum.apply(gradient, ctx.group) if recorded_again() else all_reduce(gradient, ctx.group), None


class _Sum(Recorded):
    of_each = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: RankGroup) -> torch.Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Copy.apply(gradient, ctx.group) if recorded_again() else gradient, None


def _gathered(x: torch.Tensor, group: RankGroup, dim: int, rows: _Rows) -> torch.Tensor:
    whole = all_gather_rows(x, group, dim, [len(row) for row in rows])
    order = None if isinstance(rows[0], range) else whole_order(rows)
    return take_rows(whole, dim, order) if order is not None else _writable(whole)


def _held(whole: torch.Tensor, group: RankGroup, dim: int, rows: _Rows) -> torch.Tensor:
    """Take this rank's rows of a global tensor."""
    return take_rows(whole, dim, rows[group.rank])


def _writable(whole: torch.Tensor) -> torch.Tensor:
    """Return a result that is not a view: an in-place add may follow. Traced code cannot ask, and always copies."""
    if torch.compiler.is_compiling() or whole._is_view():
        return whole.clone(memory_format=torch.contiguous_format)
    return whole


class _Scale(Recorded):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Part.apply(gradient, *ctx.saved_tensors), None


class _Part(Recorded):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Scale.apply(gradient, *ctx.saved_tensors), None


_gather: Linear[[RankGroup, int, _Rows]]
_take_held: Linear[[RankGroup, int, _Rows]]
_gather = linear("Gather", _gathered, lambda gradient, _, *how: _take_held(gradient, *how))
_take_held = linear("TakeHeld", _held, lambda gradient, _, *how: _gather(gradient, *how))


def copy_to_ranks(x: torch.Tensor, group: Ranks) -> torch.Tensor:
    """Return x; its gradient is summed over ranks. It is for a replicated value of which every rank uses a part."""
    group = RankGroup.of(group)
    return x if group.size == 1 or not _carries_gradient(x) else _Copy.apply(x, group)


def is_of_compiled_code(x: torch.Tensor) -> bool:
    """Return whether x was made by a compiled function, whose ops cannot be seen."""
    return any("CompiledFunction" in node.name() for node in _few_ops_above(x))


def gradient_is_summed(x: torch.Tensor) -> bool:
    """Return whether x was made from a result of `copy_to_ranks` by ops that read nothing else."""
    names = (node.name() for node in _few_ops_above(x))
    ours = (name for name in names if name in (f"{_Copy.__name__}Backward", f"{_Scale.__name__}Backward"))
    return next(ours, "").startswith(_Copy.__name__)


def _few_ops_above(x: torch.Tensor) -> Iterator[Any]:
    """Yield the ops that made x, last first, for as long as they read a single value."""
    node = x.grad_fn
    for _ in range(_FEW_OPS):
        if node is None:
            return
        yield node
        above = [parent for parent, _ in node.next_functions if parent is not None]
        node = above[0] if len(above) == 1 else None


def sum_over_ranks(x: torch.Tensor, group: Ranks) -> torch.Tensor:
    """Return the sum of every rank's x; the gradient passes unchanged. It makes partial sums replicated."""
    group = RankGroup.of(group)
    return x if group.size == 1 else _Sum.apply(x, group)


def gather_over_ranks(x: torch.Tensor, group: Ranks, dim: int, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the global tensor of which rank r holds `rows[r]` (in that order) along `dim`; backward takes the own
    rows. Ranks may hold unequal numbers of rows. Where several hold the same row, that of the first one is taken."""
    group = RankGroup.of(group)
    if group.size == 1:
        return x
    pieces = all(isinstance(row, range) for row in rows)  # in order, and perhaps too many rows to list them
    return _gather(x, group, dim, tuple(row if pieces else tuple(row) for row in rows))


def gather_pieces(x: torch.Tensor, group: Ranks, dim: int, size: int) -> torch.Tensor:
    """Return the global dim of `size` rows whose shards were cut by ceiling division; backward takes the own shard."""
    group = RankGroup.of(group)
    return gather_over_ranks(x, group, dim, [chunk(size, group.size, rank) for rank in range(group.size)])


def scale_gradient(x: torch.Tensor, vector: Sequence[float] | float, dim: int = -1) -> torch.Tensor:
    """Return x; its gradient is multiplied by `vector` along `dim` (or by a number)."""
    if not _carries_gradient(x):
        return x
    real = x.real if x.is_complex() else x
    if not isinstance(vector, Sequence):
        scale = real.new_full((), vector)
    else:
        starts = [at for at, value in enumerate(vector) if not at or value != vector[at - 1]]
        sizes = [end - at for at, end in zip(starts, [*starts[1:], len(vector)], strict=True)]
        scale = torch.cat([real.new_full((n,), vector[at]) for at, n in zip(starts, sizes, strict=True)])
        shape = [1] * x.dim()
        shape[dim] = -1
        scale = scale.view(shape)
    return _Scale.apply(x, scale)


def part_of_sum(x: torch.Tensor, parts: int) -> torch.Tensor:
    """Return 1/n of a value that n ranks add up again; each rank has the full gradient, which passes unchanged."""
    return _Part.apply(x, x.new_full((), 1.0 / parts))


def take_rows(x: torch.Tensor, dim: int, rows: Sequence[int]) -> torch.Tensor:
    """Return these rows of x along `dim` as a new tensor; a few runs of consecutive rows are taken without an index."""
    piece = ((0, rows.start, len(rows)),) if isinstance(rows, range) else ()
    runs = piece or _runs_of_both(tuple(range(len(rows))), tuple(rows))
    if len(runs) == 1:
        return x.narrow(dim, *runs[0][1:]).clone(memory_format=torch.contiguous_format)
    if 1 < len(runs) <= _FEW_RUNS:
        return torch.cat([x.narrow(dim, row, count) for _, row, count in runs], dim)
    return x.index_select(dim, index_of(rows, x.device))


def copy_rows(into: torch.Tensor, places: tuple[int, ...], x: torch.Tensor, rows: tuple[int, ...], dim: int) -> None:
    """Copy rows of x to `places` of `into` along `dim`; a few runs of consecutive rows are copied without an index."""
    runs = _runs_of_both(places, rows)
    if len(runs) > _FEW_RUNS:
        into.index_copy_(dim, index_of(places, x.device), x.index_select(dim, index_of(rows, x.device)))
        return
    for place, row, count in runs:
        into.narrow(dim, place, count).copy_(x.narrow(dim, row, count))


@lru_cache(maxsize=4096)
def _runs_of_both(places: tuple[int, ...], rows: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """Return the first place, the first row and the length of each run.

    >>> _runs_of_both((4, 5, 0), (1, 2, 3))
    ((4, 1, 2), (0, 3, 1))
    """
    runs: list[tuple[int, int, int]] = []
    for place, row in zip(places, rows, strict=True):
        if runs and (place, row) == (sum(runs[-1][::2]), sum(runs[-1][1:])):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((place, row, 1))
    return tuple(runs)


def index_of(rows: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return rows as an index on a device. On a GPU it comes from pinned memory, so that the host does not wait."""
    if device.type == "cpu" or device.type == "meta" or torch.compiler.is_compiling():
        return torch.tensor(rows, dtype=torch.long, device=device)
    return torch.tensor(rows, dtype=torch.long).pin_memory().to(device, non_blocking=True)


def _carries_gradient(x: torch.Tensor) -> bool:
    inside = unwrapped(x) if transforms_are_active() else x
    return torch.is_grad_enabled() and inside.requires_grad
