"""Logits of a rank's own positions that behave as those of all positions: a loss needs no others.

Under context parallelism each rank has the logits of its positions, and all labels. A loss, the model's own or a
caller's, casts, shifts and flattens them and calls `cross_entropy`. That is done on a rank's rows, with the labels of
its own positions; sums are over all ranks, and the count is that of all labels. Any other reader gets all logits,
gathered at that moment.

With tensor parallelism too, a rank has some columns of its rows. Then the rows are `SplitLogits`, whose rules apply to
the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.layout import chunk
from autoplan.execute.collectives import RankGroup, gather_over_ranks, sum_over_ranks
from autoplan.execute.executors import At, Running, executes
from autoplan.execute.vocabulary.split_logits import (
    ARITHMETIC,
    FLATTENED,
    INSPECTED,
    LOSS,
    OF_ELEMENTS,
    TRANSPOSED,
    VIEWS,
    ShownWhole,
    SplitLogits,
    as_kind,
    by_function,
    gathered,
    part_of,
    plain_part,
    split_class,
    transpose,
    whole_columns,
    whole_shape,
)
from autoplan.values import LogitsOfPositions

_NEW = "create a new tensor instead"
Bounds = tuple[tuple[int, int], ...]  # of each rank's positions


class PositionLogits(ShownWhole):
    """A rank's rows, sharded over the positions. See `_class`."""

    bounds: Bounds
    length: int
    batch: int  # number of sequences flattened into the sharded dim
    base: Kind
    in_place = (
        "{name} changes logits in place, of which each rank holds only its own positions",
        "create a new tensor instead, or request full ones: autoplan.gather_logits(model, True)",
    )

    @classmethod
    def whole(cls, part: torch.Tensor) -> torch.Tensor:
        """Return all positions, for readers that every rank runs alike."""
        rows = tuple(tuple(range(start, stop)) for start, stop in cls.bounds)
        own = whole_columns(part)
        if cls.batch > 1:  # the sequences of a batch get a dim of their own, before that of the positions
            own = own.unflatten(cls.dim_from_end, (cls.batch, -1))
        whole = gather_over_ranks(own, cls.group, cls.dim_from_end, rows)
        return whole.flatten(cls.dim_from_end - 1, cls.dim_from_end) if cls.batch > 1 else whole

    @classmethod
    def like(
        cls, part: torch.Tensor, dim: int | None = None, batch: int | None = None, bounds: Bounds | None = None
    ) -> torch.Tensor:
        """Return a result of own rows as logits of all positions again. `dim`, `batch` and `bounds` (of the positions
        that are left) are given where they differ from those of `cls`."""
        dim, batch = cls.dim_from_end if dim is None else dim, cls.batch if batch is None else batch
        length = cls.length if bounds is None else max(0, *(stop for _, stop in bounds))
        bounds = cls.bounds if bounds is None else bounds
        kind = _class(cls.base, _columns(part), cls.group, bounds, length, dim, batch)  # type: ignore[arg-type]
        return as_kind(plain_part(part), kind)

    @classmethod
    def loss(
        cls, part: torch.Tensor, classes: int, target: torch.Tensor, *, weight: Any, reduction: str, **how: Any
    ) -> Any:
        """Sum the loss of own rows over all ranks; the mean is over all labels that count."""
        at = cls.dim_from_end % part.dim()
        if at == classes:
            return NotImplemented
        own = _own(target, cls, at - (at > classes))
        wanted = "none" if reduction == "none" else "sum"
        loss = F.cross_entropy(part, own, weight, reduction=wanted, **how)
        if reduction == "none":
            return whole_logits(cls.like(loss, at - (at > classes) - loss.dim()))
        total = sum_over_ranks(loss, cls.group)
        if reduction == "sum":
            return total
        counted = target[target != how["ignore_index"]]
        return total / (len(counted) if weight is None else weight[counted].sum())


class OwnStream(PositionLogits):
    """A rank's positions of a stream, padded to equal shards, that behave as the full one: a mixer's code reads its
    sizes and passes it to projections. Other readers each run a part: the gradients of what they gather are summed."""

    in_place = "{name} changes a stream in place, of which each rank holds only its own positions", _NEW
    gather: ClassVar[Callable[[torch.Tensor, int, int, RankGroup], torch.Tensor]]

    @classmethod
    def whole(cls, part: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():  # while an input is read, where ranks would wait for each other
            raise PlanMismatchError("compiled code is given a stream of which each rank holds its own positions")
        return cls.gather(part, cls.dim_from_end, cls.length, cls.group)


Kind = type[PositionLogits]


@cache
def _class(
    base: Kind,
    columns: type[SplitLogits] | None,
    group: RankGroup,
    bounds: Bounds,
    length: int,
    dim: int,
    batch: int = 1,
) -> Kind:
    names = {"group": group, "bounds": bounds, "length": length, "dim_from_end": dim, "full_size": batch * length}
    return type(base.__name__, (base,), {**names, "batch": batch, "base": base, "columns": columns})


def position_logits(
    local: torch.Tensor, dim: int, length: int, group: RankGroup, base: Kind = PositionLogits
) -> torch.Tensor:
    """Return a rank's (padded) shard along `dim`, from the end, as logits of `length` positions."""
    pieces = (chunk(length, group.size, rank) for rank in range(group.size))
    bounds = tuple((piece.start, piece.stop) for piece in pieces)
    kind = _class(base, _columns(local), group, bounds, length, dim)  # type: ignore[arg-type]
    start, stop = kind.bounds[group.rank]
    return as_kind(plain_part(local).narrow(dim, 0, stop - start), kind)


def on_own_rows(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Change a tensor in which each position is by itself: of position logits, own rows."""
    return type(x).like(change(part_of(x))) if isinstance(x, PositionLogits) else change(x)


def with_columns(x: PositionLogits, group: RankGroup, vocabulary: int, dim: int) -> torch.Tensor:
    """Return the same logits where a rank has only some columns of its rows."""
    return type(x).like(as_kind(plain_part(x), split_class(group, vocabulary, dim)))


def _columns(x: torch.Tensor) -> type[SplitLogits] | None:
    return type(x) if isinstance(x, SplitLogits) else None


def own_stream(own: torch.Tensor, dim: int, length: int, group: RankGroup) -> torch.Tensor:
    """Return a rank's (padded) shard along `dim`, from the end, as a stream of `length` positions."""
    return as_kind(own, _class(OwnStream, None, group, (), length, dim))


class Own(NamedTuple):
    """A rank's shard of a stream, and the global number of positions."""

    own: torch.Tensor
    length: int


def own_of(x: torch.Tensor) -> Own | None:
    """Return a rank's shard, padded as `own_stream` expects it, with the full length; None for a plain tensor."""
    if not isinstance(x, PositionLogits):
        return None
    kind, own = type(x), whole_columns(part_of(x))
    piece = -(-kind.length // kind.group.size)
    if not isinstance(x, OwnStream) and own.size(kind.dim_from_end) < piece:
        rows = own.movedim(kind.dim_from_end, 0)
        own = torch.cat([rows, rows.new_zeros(piece - len(rows), *rows.shape[1:])]).movedim(0, kind.dim_from_end)
    return Own(own, kind.length)


def whole_logits(x: torch.Tensor) -> torch.Tensor:
    """Return the logits of all positions."""
    whole: torch.Tensor = gathered(type(x), x) if isinstance(x, PositionLogits) else x
    return whole


def _own(whole: torch.Tensor, kind: Kind, dim: int) -> torch.Tensor:
    """Return this rank's positions of a full tensor."""
    start, stop = kind.bounds[kind.group.rank]
    if kind.batch == 1:
        return whole.narrow(dim, start, stop - start)
    first = dim if dim >= 0 else dim - 1  # of the two dims of a batch of sequences
    return whole.unflatten(dim, (kind.batch, -1)).narrow(first + 1, start, stop - start).flatten(first, first + 1)


# The rules for what can be done on own rows.


def _each_element(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply casts, and arithmetic with numbers and with tensors that are the same for every position."""
    own = []
    for x in args:
        plain = isinstance(x, torch.Tensor) and not isinstance(x, PositionLogits)
        if plain and x.dim() >= -cls.dim_from_end and x.shape[cls.dim_from_end] != 1:
            return NotImplemented
        own.append(part_of(x))
    if kwargs.get("out") is not None or any(isinstance(x, PositionLogits) and type(x) is not cls for x in args):
        return NotImplemented
    return cls.like(func(*own, **kwargs))


def _multiplied(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply each position by a matrix (a head that is tied to the embedding): its gradient is of own rows."""
    others = (*args[1:], *kwargs.values())
    plain = bool(args) and cls.columns is None and not any(isinstance(x, PositionLogits) for x in others)
    if not plain or cls.dim_from_end == -1 or others[0].dim() != 2:
        return NotImplemented
    return cls.like(func(part_of(args[0]), *args[1:], **kwargs))


def _view(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """View with the same shape, or with the positions merged into the dims before them."""
    x, shape = args[0], args[1:] or (kwargs.get("shape"),)
    shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    whole = list(whole_shape(cls, x))
    if not all(isinstance(size, int) for size in shape):
        return NotImplemented
    sizes = [size if size != -1 else prod(whole) // max(1, -prod(shape)) for size in shape]
    if sizes == whole:
        return x
    at = cls.dim_from_end % len(whole)
    return _merged(cls, x) if sizes == [prod(whole[: at + 1]), *whole[at + 1 :]] else NotImplemented


def _flatten(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    x, rest = args[0], dict(zip(("start_dim", "end_dim"), args[1:], strict=False)) | kwargs
    dims = part_of(x).dim()
    span = (rest.get("start_dim", 0) % dims, rest.get("end_dim", -1) % dims)
    return _merged(cls, x) if span == (0, cls.dim_from_end % dims) else NotImplemented


def _merged(cls: Kind, x: torch.Tensor) -> torch.Tensor:
    raw = part_of(x)
    at = cls.dim_from_end % raw.dim()
    return cls.like(raw.flatten(0, at), batch=cls.batch * prod(raw.shape[:at]))


def _item(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """Index by slices that take all of the other dims, and one run of positions."""
    x, index = args
    items = list(index) if isinstance(index, tuple) else [index]
    dims = part_of(x).dim()
    if any(not (isinstance(item, slice) or item is Ellipsis) for item in items) or cls.batch > 1:
        return NotImplemented
    if Ellipsis in items:
        at = items.index(Ellipsis)
        items[at : at + 1] = [slice(None)] * (dims - len(items) + 1)
    items += [slice(None)] * (dims - len(items))
    positions = items.pop(cls.dim_from_end % dims)
    if any(item != slice(None) for item in items) or positions.step not in (None, 1):
        return NotImplemented
    first, last, _ = positions.indices(cls.length)
    bounds = tuple((min(max(a, first), last) - first, min(max(b, first), last) - first) for a, b in cls.bounds)
    before, (start, stop) = cls.bounds[cls.group.rank], bounds[cls.group.rank]
    begin = start + first - before[0] if stop > start else 0
    index = [slice(None)] * (cls.dim_from_end % dims) + [slice(begin, begin + stop - start)]
    return cls.like(part_of(x)[tuple(index)], bounds=bounds)


def _transpose(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    return NotImplemented if cls.batch > 1 else transpose(cls, func, args, kwargs)


_T = torch.Tensor
_ELEMENTWISE = by_function({(*OF_ELEMENTS, *ARITHMETIC, _T.view_as): _each_element})
OwnStream.rules = INSPECTED | _ELEMENTWISE
PositionLogits.rules = {**INSPECTED, **LOSS, **_ELEMENTWISE} | by_function({
    (_T.matmul, _T.__matmul__, torch.matmul, F.linear): _multiplied,
    VIEWS: _view,
    FLATTENED: _flatten,
    (_T.__getitem__,): _item,
    TRANSPOSED: _transpose,
})  # fmt: skip


# Where these logits are made.


@executes(LogitsOfPositions)
def _at_the_head(planned: LogitsOfPositions, at: At) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make position logits at the head, where the model itself goes on to a loss."""
    running, dim, name = at.running, planned.dim, planned.sequence.name

    def change(x: torch.Tensor) -> torch.Tensor:
        if not running.loss or running.picks:
            return x
        own = position_logits(x, dim, running.lengths[name], running.sequence)
        return whole_logits(own) if torch.compiler.is_compiling() else own

    return change


def leave_positions(x: torch.Tensor, dim: int, length: int, running: Running) -> torch.Tensor:
    """Return the model's logits of own positions: gathered where that is requested or no gradient is computed,
    unchanged where they were gathered before some positions were selected."""
    if running.picks or (running.loss and torch.compiler.is_compiling()):
        return x
    logits = x if isinstance(x, PositionLogits) else position_logits(x, dim, length, running.sequence)
    return whole_logits(logits) if running.returns_whole_logits or torch.compiler.is_compiling() else logits


# A batch of which each rank has its own positions, for a model that expects all of them.
#
# The model sees the full length. Token ids, labels and masks are small, so they are gathered where they are read. This
# saves loading: a rank need not have the tokens of the others.

_Batch = TypeVar("_Batch")


class OwnBatch(PositionLogits):
    """A rank's own positions of a tensor of a batch. Without the other ranks only the full length is known."""

    rules = OwnStream.rules
    in_place = "{name} changes tensors of a batch in place, of which each rank holds only its own positions", _NEW


def shard_batch(batch: _Batch, mesh: DeviceMesh, *, length: int | None = None, dim: int = 1) -> _Batch:
    """Return this rank's own positions, by the mesh dim "cp", of every tensor in `batch` that has the dim `dim`.

    Pass the result to a model that was parallelised with `plan(cp_size=N)`, as you would pass a full batch (which such
    a model takes as well: then shard nothing). Each tensor is marked as a shard, so that the model does not take it for
    the full one. With `length` the batch holds this rank's positions already, of sequences of that length. Tensors with
    fewer dims are left as they are.
    """
    dims = (mesh.mesh_dim_names or ()) if isinstance(mesh, DeviceMesh) else ()
    if "cp" not in dims:
        raise PlanMismatchError(
            f"the mesh has no dim named 'cp' (dims: {list(dims)})",
            hint='pass the mesh on which the model was parallelised, with a dim "cp"',
        )
    group = RankGroup.of(mesh["cp"])
    lengths: dict[int, str] = {}

    def own(value: Any, path: str) -> Any:
        if isinstance(value, PositionLogits):
            raise AutoplanError(f"{path or 'the batch'} is already sharded", hint="shard it once, before the model")
        if isinstance(value, Mapping):
            return type(value)({key: own(item, f"{path}.{key}".strip(".")) for key, item in value.items()})  # type: ignore[call-arg]
        if type(value) in (tuple, list):
            return type(value)(own(item, f"{path}.{place}".strip(".")) for place, item in enumerate(value))
        if not isinstance(value, torch.Tensor) or value.dim() <= dim:
            return value
        lengths.setdefault(value.shape[dim], path)
        if len(lengths) > 1:
            (size, first), (other, second) = lengths.items()
            raise AutoplanError(
                f"dim {dim} has size {size} in {first or 'the batch'}, but {other} in {second}",
                hint="shard only tensors along one sequence; pass the others to the model unchanged",
            )
        whole = value.shape[dim] if length is None else length
        mine = chunk(whole, group.size, group.rank)
        if length is not None and value.shape[dim] != len(mine):
            raise AutoplanError(
                f"{path or 'the batch'} has {value.shape[dim]} positions, but rank {group.rank} of "
                f"{group.size} has {len(mine)} of {length}",
                hint="omit length if the batch is not sharded",
            )
        part = value if length is not None else value.narrow(dim, mine.start, len(mine)).contiguous()
        return position_logits(part, dim - value.dim(), whole, group, OwnBatch)

    result: _Batch = own(batch, "")
    return result
