"""Logits that stay sharded over the vocabulary inside the model: its own loss does not need them gathered.

The problem: given `labels=`, a model computes its loss inside its own forward, with code that knows nothing of ranks:
`logits.float()`, a shift, `view(-1, vocab_size)`, then `cross_entropy`. Gathering the logits for it costs more memory
than anything else in a training step.

So the head returns its columns as a `SplitLogits`: a tensor that shows the global shape and intercepts every op. Casts,
scalings, views and indexing that leave the vocabulary alone run on the columns; `cross_entropy` becomes the
vocabulary-parallel one. Any other reader gets the logits gathered at that moment: correct, and as costly as before.
Nothing can mistake columns for full logits unnoticed; changing them in place in a way that is not understood is an
error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from autoplan.common.errors import PlanMismatchError
from autoplan.common.layout import chunk
from autoplan.common.nested import changed_inside, is_record
from autoplan.common.torch_internals import BASE, DisableTorchFunctionSubclass, FakeTensor
from autoplan.execute.collectives import RankGroup, gather_pieces
from autoplan.execute.vocabulary.shards import Columns, cross_entropy
from autoplan.ops.records.record import writes_in_place


def can_stay_split(size: int, group: RankGroup) -> bool:
    """Return whether every rank has at least two columns: one looks like a dim to broadcast, and none has no sums."""
    return len(chunk(size, group.size, group.size - 1)) > 1


Rule = Callable[[Any, Any, Any, Any], Any]  # of a class of parts, a function, args and kwargs; NotImplemented: gather


class ShownWhole(torch.Tensor):
    """A rank's part of a tensor (its data and gradient) that behaves as the full one. `rules` are for functions that a
    part can take; any other reads the full tensor, gathered at that moment."""

    group: RankGroup
    dim_from_end: int  # the sharded dim, -1 the last
    full_size: int  # of that dim
    columns: ClassVar[type[SplitLogits] | None] = None  # the class of a part that is sharded in another dim too
    rules: ClassVar[dict[Any, Rule]]
    whole: Callable[[torch.Tensor], torch.Tensor]  # of a part
    like: Callable[..., torch.Tensor]  # a result of a part: sharded alike, or in the dim that is given
    loss: Callable[..., Any]  # of a part, the dim of classes, token ids, and what else cross_entropy takes
    in_place: tuple[str, str]  # the error for a change in place that no rule knows, with {name}, and its hint

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = cls.rules.get(func)
        result = NotImplemented if rule is None else rule(cls, func, args, kwargs)
        if result is not NotImplemented:
            return result
        name = func.__name__
        if (writes_in_place(name) and isinstance(args[0], ShownWhole)) or isinstance(kwargs.get("out"), ShownWhole):
            text, hint = cls.in_place
            raise PlanMismatchError(text.format(name=name), hint=hint)
        return func(*gathered(cls, args), **gathered(cls, kwargs))


class SplitLogits(ShownWhole):
    """This rank's columns, sharded over the vocabulary. See `split_class`."""

    in_place = (
        "the model changes its logits in place ({name}) while they are sharded over the vocabulary",
        "call it without labels and compute the loss with autoplan.vocab_parallel_cross_entropy",
    )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A compiler inspects logits with values (gradient, strides) instead of tracing ops on them, as after a graph
        # break between head and loss. It must see the columns: it then traces our rules on them. Nothing may be
        # gathered here, since ranks compile at different speeds, or one of them not at all.
        inspected = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
        if inspected and not any(isinstance(arg, FakeTensor) for arg in args):
            return as_it_is(cls, func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def whole(cls, part: torch.Tensor) -> torch.Tensor:
        return gather_pieces(part, cls.group, cls.dim_from_end, cls.full_size)

    @classmethod
    def like(cls, part: torch.Tensor, dim: int | None = None) -> torch.Tensor:
        return as_kind(part, cls if dim is None else split_class(cls.group, cls.full_size, dim))

    @classmethod
    def loss(cls, part: torch.Tensor, classes: int, target: torch.Tensor, **how: Any) -> Any:
        """Use the vocabulary-parallel loss if the classes are the vocabulary."""
        if cls.dim_from_end % part.dim() != classes:
            return NotImplemented
        columns = Columns(part.movedim(classes, -1), cls.group, cls.full_size)
        loss = cross_entropy(columns, target, **how)
        return loss if torch.is_autocast_enabled(part.device.type) else loss.to(part.dtype)  # autocast keeps it wide


def moved(kind: type[SplitLogits]) -> tuple[type[SplitLogits], ...]:
    """Return the classes of such logits for each dim that the vocabulary may be moved to."""
    dims = dict.fromkeys((kind.dim_from_end, -1, -2, -3))
    return tuple(split_class(kind.group, kind.full_size, dim) for dim in dims)


@cache
def split_class(group: RankGroup, vocabulary: int, dim_from_end: int = -1) -> type[SplitLogits]:
    """Return the class of logits that are sharded like this; `as_kind` makes instances."""
    names = {"group": group, "full_size": vocabulary, "dim_from_end": dim_from_end, "__doc__": SplitLogits.__doc__}
    return type("SplitLogits", (SplitLogits,), names)


def as_kind(local: torch.Tensor, kind: type[torch.Tensor]) -> torch.Tensor:
    """Return a local tensor as an instance of `kind`. A FakeTensor is a subclass already: it becomes both."""
    if not isinstance(local, FakeTensor):
        return local.as_subclass(kind)
    part: torch.Tensor = torch.ops.aten.alias(local)
    part.__class__ = _without_storage(kind)  # type: ignore[arg-type]
    return part


@cache
def _without_storage(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    return kind if issubclass(kind, FakeTensor) else type(kind.__name__, (kind, FakeTensor), {"__doc__": kind.__doc__})


def columns_in(value: Any, change: Callable[[torch.Tensor, type[SplitLogits]], torch.Tensor]) -> Any:
    """Return a model's result with `change` applied to the columns, and the class, of its split logits."""
    if isinstance(value, SplitLogits):
        return change(part_of(value), type(value))
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(item, (SplitLogits, dict, tuple, list)):
                value[key] = columns_in(item, change)
    elif isinstance(value, (tuple, list)):
        items = [columns_in(item, change) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif is_record(value):
        return changed_inside(value, lambda item: columns_in(item, change))
    return value


# Between parts and full tensors.


def plain_part(x: torch.Tensor) -> torch.Tensor:
    """Return a part as a plain tensor."""
    with DisableTorchFunctionSubclass():
        alias: torch.Tensor = torch.ops.aten.alias(x)  # `as_subclass` is the same, but torch.compile cannot trace it
    return alias


def part_of(x: Any) -> Any:
    """Return the part that a tensor shows as a whole, and any other value as it is."""
    if not isinstance(x, ShownWhole):
        return x
    columns = type(x).columns
    return plain_part(x) if columns is None else as_kind(plain_part(x), columns)


def whole_columns(x: torch.Tensor) -> torch.Tensor:
    """Return logits gathered over their columns; other tensors unchanged."""
    whole: torch.Tensor = gathered(type(x), x) if isinstance(x, SplitLogits) else x
    return whole


def gathered(cls: Any, value: Any) -> Any:
    """Return arguments with full tensors in place of their parts, most of which are of the class `cls`."""
    if isinstance(value, ShownWhole):
        kind = cls if type(value) is cls else type(value)
        return kind.whole(part_of(value))
    if isinstance(value, dict):
        return {key: gathered(cls, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)([gathered(cls, item) for item in value])
    return value


# The rules that hold for any sharded dim.


def whole_shape(cls: type[ShownWhole], x: torch.Tensor) -> torch.Size:
    """Return the shape of the full tensor."""
    sizes = list(part_of(x).shape)
    sizes[cls.dim_from_end] = cls.full_size
    return torch.Size(sizes)


def _size(cls: type[ShownWhole], func: Any, args: Any, kwargs: Any) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return whole_shape(cls, args[0]) if dim is None else whole_shape(cls, args[0])[dim]


def _no_base(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Return None: logits as the model sees them are no views. FSDP2 asks each output of a unit."""
    return None


def as_it_is(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Return a non-tensor that is the same for columns and full logits. Hooks see the gradient of the columns."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def transpose(cls: type[ShownWhole], func: Any, args: Any, kwargs: Any) -> Any:
    """Transpose, perhaps moving the sharded dim: class scores come second in cross_entropy."""
    if kwargs or len(args) != 3:
        return NotImplemented
    part = part_of(args[0])
    first, second, split = args[1] % part.dim(), args[2] % part.dim(), cls.dim_from_end % part.dim()
    at = second if split == first else first if split == second else split
    return cls.like(part.transpose(first, second), at - part.dim())


def _loss(
    cls: type[ShownWhole], input: Any, target: torch.Tensor, weight: torch.Tensor | None = None,
    size_average: Any = None, ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """Compute the loss on parts if the targets are token ids."""
    if not isinstance(input, ShownWhole) or isinstance(target, ShownWhole) or isinstance(weight, ShownWhole):
        return NotImplemented
    shape = whole_shape(cls, input)
    classes = 1 if len(shape) > 1 else 0
    of_ids = not target.is_floating_point() and target.shape == shape[:classes] + shape[classes + 1 :]
    if size_average is not None or reduce is not None or not of_ids or (weight is not None and weight.requires_grad):
        return NotImplemented
    how = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    return cls.loss(part_of(input), classes, target, **how)


# The rules for what leaves the columns alone.


def _each_element(cls: type[SplitLogits], func: Any, args: Any, kwargs: Any) -> Any:
    """Apply casts and functions of single elements."""
    x = args[0]
    result = func(*map(part_of, args), **kwargs)
    return as_kind(result, cls) if isinstance(x, SplitLogits) else result


def _arithmetic(cls: type[SplitLogits], func: Any, args: Any, kwargs: Any) -> Any:
    """Apply arithmetic with numbers, with tensors that are equal for every token, and with columns sharded alike."""
    split = [a for a in args if isinstance(a, SplitLogits)]
    others = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and not isinstance(a, SplitLogits)]
    if kwargs.get("out") is not None or len(split) != 1:
        return NotImplemented
    raw = part_of(split[0])
    for other in others:
        width = other.shape[cls.dim_from_end] if other.dim() >= -cls.dim_from_end else 1
        ours = width == raw.shape[cls.dim_from_end]  # a bias sharded like the head
        alike = width == 1 and not other.requires_grad  # its gradient would be partial
        if other.dim() > raw.dim() or not (ours or alike):
            return NotImplemented
    return as_kind(func(*map(part_of, args), **kwargs), cls)


def _view(cls: type[SplitLogits], func: Any, args: Any, kwargs: Any) -> Any:
    """View with the vocabulary still in the last dim."""
    x, shape = args[0], args[1:]
    shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if kwargs or cls.dim_from_end != -1 or not shape or not all(isinstance(size, int) for size in shape):
        return NotImplemented
    raw, shape = part_of(x), list(shape)
    if -1 in shape:
        elements = 1  # torch.compile cannot trace prod() of a generator
        for size in shape:
            elements *= 1 if size == -1 else size
        shape[shape.index(-1)] = whole_shape(cls, x).numel() // elements if elements else -1
    if shape[-1] != cls.full_size:
        return NotImplemented
    return as_kind(func(raw, *shape[:-1], raw.shape[-1]), cls)


def _flatten(cls: type[SplitLogits], func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    first = args[1] if len(args) > 1 else kwargs.get("start_dim", 0)
    last = args[2] if len(args) > 2 else kwargs.get("end_dim", -1)
    raw = part_of(x)
    if cls.dim_from_end != -1 or last % raw.dim() == raw.dim() - 1:
        return NotImplemented
    return as_kind(raw.flatten(first, last), cls)


def _item(cls: type[SplitLogits], func: Any, args: Any, kwargs: Any) -> Any:
    """Index full rows."""
    x, index = args
    if not isinstance(x, SplitLogits) or cls.dim_from_end != -1:
        return NotImplemented
    items = index if isinstance(index, tuple) else (index,)
    if any(isinstance(item, (SplitLogits, list)) for item in items):
        return NotImplemented
    used = 0  # dims that the index consumes
    for item in items:
        if item is not None and item is not Ellipsis:
            is_mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
            used += item.dim() if is_mask else 1
    reaches_last = used >= part_of(x).dim() or any(item is Ellipsis for item in items)
    if reaches_last and not (isinstance(items[-1], slice) and items[-1] == slice(None)) and items[-1] is not Ellipsis:
        return NotImplemented
    return as_kind(part_of(x)[index], cls)


def _permute(cls: type[SplitLogits], func: Any, args: Any, kwargs: Any) -> Any:
    dims = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else args[1:]
    if kwargs:
        return NotImplemented
    raw = part_of(args[0])
    at = [dim % raw.dim() for dim in dims].index(cls.dim_from_end % raw.dim())
    return cls.like(raw.permute(*dims), at - raw.dim())


def by_function(rules: Mapping[tuple[Any, ...], Rule]) -> dict[Any, Rule]:
    """Return the rule of each function, from those of many."""
    return {function: rule for functions, rule in rules.items() for function in functions}


_T = torch.Tensor
_PROPERTIES = ("dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "ndim", "is_cuda", "is_meta")
INSPECTED = by_function({  # reads that need no values
    (_T.shape.__get__,): lambda cls, func, args, kwargs: whole_shape(cls, args[0]),
    (_T.size,): _size,
    (_T.numel, _T.nelement): lambda cls, func, args, kwargs: whole_shape(cls, args[0]).numel(),
    (BASE.__get__,): _no_base,
    tuple(getattr(_T, name).__get__ for name in _PROPERTIES): as_it_is,
    (_T.dim, _T.ndimension, _T.is_floating_point, torch.is_floating_point, _T.is_complex, torch.is_complex): as_it_is,
    (_T.register_hook, _T.is_contiguous, _T.get_device, _T.element_size, _T.__hash__): as_it_is,
})  # fmt: skip
LOSS = {F.cross_entropy: lambda cls, func, args, kwargs: _loss(cls, *args, **kwargs)}
OF_ELEMENTS = (
    *(_T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.type_as, _T.contiguous, _T.clone, torch.clone, _T.detach),
    *(_T.cpu, _T.cuda, _T.tanh, torch.tanh, _T.neg, torch.neg, _T.__neg__),
)
ARITHMETIC = (
    *(_T.mul, torch.mul, _T.__mul__, _T.__rmul__, _T.multiply, torch.multiply),
    *(_T.div, torch.div, _T.__truediv__, _T.true_divide, torch.true_divide),
    *(_T.add, torch.add, _T.__add__, _T.__radd__, _T.sub, torch.sub, _T.__sub__),
)
_IN_PLACE = (_T.__iadd__, _T.add_, _T.__isub__, _T.sub_, _T.__imul__, _T.mul_, _T.__itruediv__, _T.div_)
VIEWS, FLATTENED = (_T.view, _T.reshape, torch.reshape), (_T.flatten, torch.flatten)
TRANSPOSED = (_T.transpose, torch.transpose, _T.swapaxes, torch.swapaxes)
SplitLogits.rules = {**INSPECTED, **LOSS} | by_function({
    OF_ELEMENTS: _each_element,
    (*ARITHMETIC, *_IN_PLACE): _arithmetic,
    VIEWS: _view,
    FLATTENED: _flatten,
    (_T.__getitem__,): _item,
    TRANSPOSED: transpose,
    (_T.permute, torch.permute): _permute,
})  # fmt: skip
