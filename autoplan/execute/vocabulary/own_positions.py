"""Logits of a rank's own positions that behave as those of all positions: a loss needs no others.

Under context parallelism each rank has the logits of its positions, and all labels. A loss, the model's own or a
caller's, casts, shifts and flattens them and calls `cross_entropy`. That is done on a rank's rows, with the labels of
its own positions; sums are over all ranks, and the count is that of all labels. Any other reader gets all logits,
gathered at that moment.

With tensor parallelism too, a rank has some columns of its rows. Then the rows are `SplitLogits`, whose rules apply to
the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F

from autoplan.common.errors import PlanMismatchError
from autoplan.common.layout import chunk
from autoplan.common.nested import changed_inside
from autoplan.common.torch_internals import BASE, DisableTorchFunctionSubclass
from autoplan.execute.collectives import RankGroup, gather_over_ranks, sum_over_ranks
from autoplan.execute.executors import At, Running, executes
from autoplan.execute.vocabulary.split_logits import SplitLogits, as_it_is, as_kind, no_base, split_class, whole_columns
from autoplan.ops.records.record import writes_in_place
from autoplan.values import LogitsOfPositions

Bounds = tuple[tuple[int, int], ...]  # of each rank's positions


class PositionLogits(torch.Tensor):
    """A rank's rows (its data and gradient) that behave as logits of all positions. See `_class`."""

    group: RankGroup
    bounds: Bounds
    length: int
    dim_from_end: int  # of the positions
    batch: int  # number of sequences flattened into that dim
    base: Kind
    columns: type[SplitLogits] | None  # with tensor parallelism: the class of the columns
    rules: ClassVar[dict[Any, Rule]]  # what can be done on own rows
    what, way_out = "logits", ", or request full ones: autoplan.gather_logits(model, True)"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = cls.rules.get(func)
        result = NotImplemented if rule is None else rule(cls, func, args, kwargs)
        if result is not NotImplemented:
            return result
        if writes_in_place(func.__name__) and isinstance(args[0], PositionLogits):
            raise PlanMismatchError(
                f"{func.__name__} changes {cls.what} in place, of which each rank holds only its own positions",
                hint=f"create a new tensor instead{cls.way_out}",
            )
        return func(*_whole(args), **_whole(kwargs))

    @classmethod
    def gathered(cls, own: torch.Tensor) -> torch.Tensor:
        """Return all positions, for readers that every rank runs alike."""
        rows = tuple(tuple(range(start, stop)) for start, stop in cls.bounds)
        own = whole_columns(own)
        if cls.batch > 1:  # the sequences of a batch get a dim of their own, before that of the positions
            own = own.unflatten(cls.dim_from_end, (cls.batch, -1))
        whole = gather_over_ranks(own, cls.group, cls.dim_from_end, rows)
        return whole.flatten(cls.dim_from_end - 1, cls.dim_from_end) if cls.batch > 1 else whole


class OwnStream(PositionLogits):
    """A rank's positions of a stream, padded to equal shards, that behave as the full one: a mixer's code reads its
    sizes and passes it to projections. Other readers each run a part: the gradients of what they gather are summed."""

    rules: ClassVar[dict[Any, Rule]]
    what, way_out = "a stream", ""
    gather: ClassVar[Callable[[torch.Tensor, int, int, RankGroup], torch.Tensor]]

    @classmethod
    def gathered(cls, own: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():  # while an input is read, where ranks would wait for each other
            raise PlanMismatchError(f"compiled code is given {cls.what} of which each rank holds its own positions")
        return cls.gather(own, cls.dim_from_end, cls.length, cls.group)


Kind = type[PositionLogits]
Rule = Callable[[Kind, Any, Any, Any], Any]


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
    names = {"group": group, "bounds": bounds, "length": length, "dim_from_end": dim, "batch": batch}
    return type(base.__name__, (base,), {**names, "base": base, "columns": columns})


def _like(
    own: torch.Tensor, cls: Kind, dim: int | None = None, batch: int | None = None, bounds: Bounds | None = None
) -> torch.Tensor:
    """Return a result of own rows as logits of all positions again. `dim`, `batch` and `bounds` (of the positions that
    are left) are given where they differ from those of `cls`."""
    dim, batch = cls.dim_from_end if dim is None else dim, cls.batch if batch is None else batch
    length = cls.length if bounds is None else max(0, *(stop for _, stop in bounds))
    bounds = cls.bounds if bounds is None else bounds
    kind = _class(cls.base, _columns(own), cls.group, bounds, length, dim, batch)  # type: ignore[arg-type]
    return as_kind(_plain(own), kind)


def position_logits(
    local: torch.Tensor, dim: int, length: int, group: RankGroup, base: Kind = PositionLogits
) -> torch.Tensor:
    """Return a rank's (padded) shard along `dim`, from the end, as logits of `length` positions."""
    pieces = (chunk(length, group.size, rank) for rank in range(group.size))
    bounds = tuple((piece.start, piece.stop) for piece in pieces)
    kind = _class(base, _columns(local), group, bounds, length, dim)  # type: ignore[arg-type]
    start, stop = kind.bounds[group.rank]
    return as_kind(_plain(local).narrow(dim, 0, stop - start), kind)


def on_own_rows(x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Change a tensor in which each position is by itself: of position logits, own rows."""
    return _like(change(_raw(x)), type(x)) if isinstance(x, PositionLogits) else change(x)


def with_columns(x: PositionLogits, group: RankGroup, vocabulary: int, dim: int) -> torch.Tensor:
    """Return the same logits where a rank has only some columns of its rows."""
    return _like(as_kind(_plain(x), split_class(group, vocabulary, dim)), type(x))


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
    kind, own = type(x), whole_columns(_raw(x))
    piece = -(-kind.length // kind.group.size)
    if not isinstance(x, OwnStream) and own.size(kind.dim_from_end) < piece:
        rows = own.movedim(kind.dim_from_end, 0)
        own = torch.cat([rows, rows.new_zeros(piece - len(rows), *rows.shape[1:])]).movedim(0, kind.dim_from_end)
    return Own(own, kind.length)


def whole_logits(x: torch.Tensor) -> torch.Tensor:
    """Return the logits of all positions."""
    return _whole(x) if isinstance(x, PositionLogits) else x


def _plain(x: torch.Tensor) -> Any:
    """Return a rank's rows and columns as a plain tensor."""
    with DisableTorchFunctionSubclass():
        return torch.ops.aten.alias(x)


def _raw(x: Any) -> Any:
    """Return a rank's rows; with tensor parallelism as SplitLogits."""
    if not isinstance(x, PositionLogits):
        return x
    columns = type(x).columns
    return _plain(x) if columns is None else as_kind(_plain(x), columns)


def _whole(value: Any) -> Any:
    return type(value).gathered(_raw(value)) if isinstance(value, PositionLogits) else changed_inside(value, _whole)


def _own(whole: torch.Tensor, kind: Kind, dim: int) -> torch.Tensor:
    """Return this rank's positions of a full tensor."""
    start, stop = kind.bounds[kind.group.rank]
    if kind.batch == 1:
        return whole.narrow(dim, start, stop - start)
    first = dim if dim >= 0 else dim - 1  # of the two dims of a batch of sequences
    return whole.unflatten(dim, (kind.batch, -1)).narrow(first + 1, start, stop - start).flatten(first, first + 1)


def _shape_of(cls: Kind, x: torch.Tensor) -> list[int]:
    sizes = list(_raw(x).shape)
    sizes[cls.dim_from_end] = cls.batch * cls.length
    return sizes


# The rules for what can be done on own rows.


def _shape(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    return torch.Size(_shape_of(cls, args[0]))


def _size(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return _shape(cls, func, args, kwargs) if dim is None else _shape_of(cls, args[0])[dim]


def _numel(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    return prod(_shape_of(cls, args[0]))


def _each_element(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply casts, and arithmetic with numbers and with tensors that are the same for every position."""
    own = []
    for x in args:
        plain = isinstance(x, torch.Tensor) and not isinstance(x, PositionLogits)
        if plain and x.dim() >= -cls.dim_from_end and x.shape[cls.dim_from_end] != 1:
            return NotImplemented
        own.append(_raw(x))
    if kwargs.get("out") is not None or any(isinstance(x, PositionLogits) and type(x) is not cls for x in args):
        return NotImplemented
    return _like(func(*own, **kwargs), cls)


def _multiplied(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """Multiply each position by a matrix (a head that is tied to the embedding): its gradient is of own rows."""
    others = (*args[1:], *kwargs.values())
    plain = bool(args) and cls.columns is None and not any(isinstance(x, PositionLogits) for x in others)
    if not plain or cls.dim_from_end == -1 or others[0].dim() != 2:
        return NotImplemented
    return _like(func(_raw(args[0]), *args[1:], **kwargs), cls)


def _view(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """View with the same shape, or with the positions merged into the dims before them."""
    x, shape = args[0], args[1:] or (kwargs.get("shape"),)
    shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    whole = _shape_of(cls, x)
    if not all(isinstance(size, int) for size in shape):
        return NotImplemented
    sizes = [size if size != -1 else prod(whole) // max(1, -prod(shape)) for size in shape]
    if sizes == whole:
        return x
    at = cls.dim_from_end % len(whole)
    return _merged(cls, x) if sizes == [prod(whole[: at + 1]), *whole[at + 1 :]] else NotImplemented


def _flatten(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    x, rest = args[0], dict(zip(("start_dim", "end_dim"), args[1:], strict=False)) | kwargs
    dims = _raw(x).dim()
    span = (rest.get("start_dim", 0) % dims, rest.get("end_dim", -1) % dims)
    return _merged(cls, x) if span == (0, cls.dim_from_end % dims) else NotImplemented


def _merged(cls: Kind, x: torch.Tensor) -> torch.Tensor:
    raw = _raw(x)
    at = cls.dim_from_end % raw.dim()
    return _like(raw.flatten(0, at), cls, batch=cls.batch * prod(raw.shape[:at]))


def _item(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """Index by slices that take all of the other dims, and one run of positions."""
    x, index = args
    items = list(index) if isinstance(index, tuple) else [index]
    dims = _raw(x).dim()
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
    return _like(_raw(x)[tuple(index)], cls, bounds=bounds)


def _transpose(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """Transpose two dims: class scores come second in cross_entropy."""
    if kwargs or len(args) != 3 or cls.batch > 1:
        return NotImplemented
    raw = _raw(args[0])
    first, second, at = args[1] % raw.dim(), args[2] % raw.dim(), cls.dim_from_end % raw.dim()
    at = second if at == first else first if at == second else at
    return _like(raw.transpose(first, second), cls, dim=at - raw.dim())


def _loss(
    cls: Kind, input: Any, target: torch.Tensor, weight: torch.Tensor | None = None, size_average: Any = None,
    ignore_index: int = -100, reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Sum the loss of own rows over all ranks; the mean is over all labels that count."""
    raw = _raw(input)
    shape = _shape_of(cls, input)
    classes = 1 if raw.dim() > 1 else 0
    at = cls.dim_from_end % raw.dim()
    of_ids = not target.is_floating_point() and list(target.shape) == shape[:classes] + shape[classes + 1 :]
    if isinstance(target, PositionLogits) or size_average is not None or reduce is not None or not of_ids:
        return NotImplemented
    if at == classes or (weight is not None and weight.requires_grad):
        return NotImplemented
    own = _own(target, cls, at - (at > classes))
    how: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if reduction == "none":
        each = F.cross_entropy(raw, own, reduction="none", **how)
        return _whole(_like(each, cls, dim=at - (at > classes) - each.dim()))
    total = sum_over_ranks(F.cross_entropy(raw, own, reduction="sum", **how), cls.group)
    if reduction == "sum":
        return total
    counted = target[target != ignore_index]
    return total / (len(counted) if weight is None else weight[counted].sum())


_T = torch.Tensor
_PROPERTIES = ("dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "ndim", "is_cuda", "is_meta")
PositionLogits.rules = {
    F.cross_entropy: lambda cls, func, args, kwargs: _loss(cls, *args, **kwargs),
    _T.shape.__get__: _shape,
    _T.size: _size,
    **dict.fromkeys((_T.numel, _T.nelement), _numel),
    BASE.__get__: no_base,
    **{getattr(_T, name).__get__: as_it_is for name in _PROPERTIES},
    **dict.fromkeys((_T.dim, _T.ndimension, _T.is_floating_point, torch.is_floating_point, _T.is_complex), as_it_is),
    **dict.fromkeys((_T.register_hook, _T.is_contiguous, _T.get_device, _T.element_size, _T.__hash__), as_it_is),
    **dict.fromkeys(
        (_T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.type_as, _T.contiguous, _T.view_as), _each_element
    ),
    **dict.fromkeys((_T.clone, torch.clone, _T.detach, _T.cpu, _T.cuda, _T.tanh, torch.tanh, _T.neg), _each_element),
    **dict.fromkeys((_T.mul, torch.mul, _T.__mul__, _T.__rmul__, _T.div, torch.div, _T.__truediv__), _each_element),
    **dict.fromkeys((_T.add, torch.add, _T.__add__, _T.__radd__, _T.sub, torch.sub, _T.__sub__), _each_element),
    **dict.fromkeys((_T.matmul, _T.__matmul__, torch.matmul, F.linear), _multiplied),
    **dict.fromkeys((_T.view, _T.reshape, torch.reshape), _view),
    **dict.fromkeys((_T.flatten, torch.flatten), _flatten),
    _T.__getitem__: _item,
    **dict.fromkeys((_T.transpose, torch.transpose, _T.swapaxes, torch.swapaxes), _transpose),
}
_OF_STREAMS = (_shape, _size, _numel, as_it_is, _each_element, no_base)
OwnStream.rules = {func: rule for func, rule in PositionLogits.rules.items() if rule in _OF_STREAMS}


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
