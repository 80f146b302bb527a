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

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

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


class SplitLogits(torch.Tensor):
    """This rank's columns (its data and gradient) that behave as full logits. See `split_class`."""

    group: RankGroup
    vocabulary: int
    dim_from_end: int  # the sharded dim, -1 the last

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # A compiler inspects logits with values (gradient, strides) instead of tracing ops on them, as after a graph
        # break between head and loss. It must see the columns: it then traces our rules on them. Nothing may be
        # gathered here, since ranks compile at different speeds, or one of them not at all.
        inspected = torch.compiler.is_compiling() and not torch.compiler.is_dynamo_compiling()
        if inspected and not any(isinstance(arg, FakeTensor) for arg in args):
            return as_it_is(cls, func, args, kwargs)
        rule = _RULES.get(func)
        result = NotImplemented if rule is None else rule(cls, func, args, kwargs)
        if result is not NotImplemented:
            return result
        name = func.__name__
        if (writes_in_place(name) and isinstance(args[0], SplitLogits)) or isinstance(kwargs.get("out"), SplitLogits):
            raise PlanMismatchError(
                f"the model changes its logits in place ({name}) while they are sharded over the vocabulary",
                hint="call it without labels and compute the loss with autoplan.vocab_parallel_cross_entropy",
            )
        return func(*_gathered(cls, args), **_gathered(cls, kwargs))


def moved(kind: type[SplitLogits]) -> tuple[type[SplitLogits], ...]:
    """Return the classes of such logits for each dim that the vocabulary may be moved to."""
    dims = dict.fromkeys((kind.dim_from_end, -1, -2, -3))
    return tuple(split_class(kind.group, kind.vocabulary, dim) for dim in dims)


@cache
def split_class(group: RankGroup, vocabulary: int, dim_from_end: int = -1) -> type[SplitLogits]:
    """Return the class of logits that are sharded like this; `as_kind` makes instances."""
    names = {"group": group, "vocabulary": vocabulary, "dim_from_end": dim_from_end, "__doc__": SplitLogits.__doc__}
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
        return change(_raw(value), type(value))
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


Kind = type[SplitLogits]

# Between columns and full logits.


def _raw(x: Any) -> Any:
    """Return the columns as a plain tensor."""
    if not isinstance(x, SplitLogits):
        return x
    with DisableTorchFunctionSubclass():
        return torch.ops.aten.alias(x)  # `as_subclass(torch.Tensor)` is the same, but torch.compile cannot trace it


def whole_columns(x: torch.Tensor) -> torch.Tensor:
    """Return logits gathered over their columns; other tensors unchanged."""
    whole: torch.Tensor = _gathered(type(x), x) if isinstance(x, SplitLogits) else x
    return whole


def _gathered(cls: Kind, value: Any) -> Any:
    """Return arguments with gathered logits instead of split ones; most of them are of the class `cls`."""
    if isinstance(value, SplitLogits):
        kind = cls if type(value) is cls else type(value)
        return gather_pieces(_raw(value), kind.group, kind.dim_from_end, kind.vocabulary)
    if isinstance(value, dict):
        return {key: _gathered(cls, item) for key, item in value.items()}
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)([_gathered(cls, item) for item in value])
    return value


def _whole_shape(cls: Kind, x: SplitLogits) -> torch.Size:
    sizes = list(_raw(x).shape)
    sizes[cls.dim_from_end] = cls.vocabulary
    return torch.Size(sizes)


# The rules for what leaves the columns alone.


def _size(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return _whole_shape(cls, args[0]) if dim is None else _whole_shape(cls, args[0])[dim]


def no_base(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Return None: logits as the model sees them are no views. FSDP2 asks each output of a unit."""
    return None


def as_it_is(cls: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Return a non-tensor that is the same for columns and full logits. Hooks see the gradient of the columns."""
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _each_element(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply casts and functions of single elements."""
    x = args[0]
    result = func(*map(_raw, args), **kwargs)
    return as_kind(result, cls) if isinstance(x, SplitLogits) else result


def _arithmetic(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """Apply arithmetic with numbers, with tensors that are equal for every token, and with columns sharded alike."""
    split = [a for a in args if isinstance(a, SplitLogits)]
    others = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor) and not isinstance(a, SplitLogits)]
    if kwargs.get("out") is not None or len(split) != 1:
        return NotImplemented
    raw = _raw(split[0])
    for other in others:
        width = other.shape[cls.dim_from_end] if other.dim() >= -cls.dim_from_end else 1
        ours = width == raw.shape[cls.dim_from_end]  # a bias sharded like the head
        alike = width == 1 and not other.requires_grad  # its gradient would be partial
        if other.dim() > raw.dim() or not (ours or alike):
            return NotImplemented
    return as_kind(func(*map(_raw, args), **kwargs), cls)


def _view(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """View with the vocabulary still in the last dim."""
    x, shape = args[0], args[1:]
    shape = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    if kwargs or cls.dim_from_end != -1 or not shape or not all(isinstance(size, int) for size in shape):
        return NotImplemented
    raw, shape = _raw(x), list(shape)
    if -1 in shape:
        elements = 1  # torch.compile cannot trace prod() of a generator
        for size in shape:
            elements *= 1 if size == -1 else size
        shape[shape.index(-1)] = _whole_shape(cls, x).numel() // elements if elements else -1
    if shape[-1] != cls.vocabulary:
        return NotImplemented
    return as_kind(func(raw, *shape[:-1], raw.shape[-1]), cls)


def _flatten(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    x = args[0]
    first = args[1] if len(args) > 1 else kwargs.get("start_dim", 0)
    last = args[2] if len(args) > 2 else kwargs.get("end_dim", -1)
    raw = _raw(x)
    if cls.dim_from_end != -1 or last % raw.dim() == raw.dim() - 1:
        return NotImplemented
    return as_kind(raw.flatten(first, last), cls)


def _item(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
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
    reaches_last = used >= _raw(x).dim() or any(item is Ellipsis for item in items)
    if reaches_last and not (isinstance(items[-1], slice) and items[-1] == slice(None)) and items[-1] is not Ellipsis:
        return NotImplemented
    return as_kind(_raw(x)[index], cls)


def _transpose(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    """Transpose, perhaps moving the vocabulary: class scores come second in cross_entropy."""
    if kwargs or len(args) != 3:
        return NotImplemented
    raw = _raw(args[0])
    first, second, split = args[1] % raw.dim(), args[2] % raw.dim(), cls.dim_from_end % raw.dim()
    at = second if split == first else first if split == second else split
    return as_kind(raw.transpose(first, second), split_class(cls.group, cls.vocabulary, at - raw.dim()))


def _permute(cls: Kind, func: Any, args: Any, kwargs: Any) -> Any:
    dims = args[1] if len(args) == 2 and isinstance(args[1], Sequence) else args[1:]
    if kwargs:
        return NotImplemented
    raw = _raw(args[0])
    at = [dim % raw.dim() for dim in dims].index(cls.dim_from_end % raw.dim())
    return as_kind(raw.permute(*dims), split_class(cls.group, cls.vocabulary, at - raw.dim()))


def _loss(
    cls: Kind,
    input: Any,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Use the vocabulary-parallel loss if the classes are the vocabulary and the targets are token ids."""
    if not isinstance(input, SplitLogits) or isinstance(target, SplitLogits) or isinstance(weight, SplitLogits):
        return NotImplemented
    raw = _raw(input)
    classes = 1 if raw.dim() > 1 else 0
    of_ids = not target.is_floating_point() and target.shape == raw.shape[:classes] + raw.shape[classes + 1 :]
    if size_average is not None or reduce is not None or not of_ids or cls.dim_from_end % raw.dim() != classes:
        return NotImplemented
    if weight is not None and weight.requires_grad:
        return NotImplemented
    columns = Columns(raw.movedim(classes, -1), cls.group, cls.vocabulary)
    loss = cross_entropy(columns, target, weight, ignore_index, reduction, label_smoothing)
    return loss if torch.is_autocast_enabled(raw.device.type) else loss.to(raw.dtype)  # autocast keeps it wide


_T = torch.Tensor
_PROPERTIES = ("dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "ndim", "is_cuda", "is_meta")
_RULES: dict[Any, Callable[[Kind, Any, Any, Any], Any]] = {
    F.cross_entropy: lambda cls, func, args, kwargs: _loss(cls, *args, **kwargs),
    BASE.__get__: no_base,
    _T.shape.__get__: lambda cls, func, args, kwargs: _whole_shape(cls, args[0]),
    _T.size: _size,
    **dict.fromkeys((_T.numel, _T.nelement), lambda cls, func, args, kwargs: _whole_shape(cls, args[0]).numel()),
    **{getattr(_T, name).__get__: as_it_is for name in _PROPERTIES},
    **dict.fromkeys((_T.dim, _T.ndimension, _T.is_floating_point, torch.is_floating_point), as_it_is),
    **dict.fromkeys((_T.is_complex, torch.is_complex, _T.register_hook, _T.is_contiguous), as_it_is),
    **dict.fromkeys((_T.get_device, _T.element_size, _T.__hash__), as_it_is),
    **dict.fromkeys((_T.float, _T.double, _T.half, _T.bfloat16, _T.to, _T.type_as, _T.contiguous), _each_element),
    **dict.fromkeys((_T.clone, torch.clone, _T.detach, _T.cpu, _T.cuda, _T.tanh, torch.tanh), _each_element),
    **dict.fromkeys((_T.neg, torch.neg, _T.__neg__), _each_element),
    **dict.fromkeys((_T.mul, torch.mul, _T.__mul__, _T.__rmul__, _T.multiply, torch.multiply), _arithmetic),
    **dict.fromkeys((_T.div, torch.div, _T.__truediv__, _T.true_divide, torch.true_divide), _arithmetic),
    **dict.fromkeys((_T.add, torch.add, _T.__add__, _T.__radd__, _T.sub, torch.sub, _T.__sub__), _arithmetic),
    **dict.fromkeys((_T.view, _T.reshape, torch.reshape), _view),
    **dict.fromkeys((_T.__iadd__, _T.add_, _T.__isub__, _T.sub_, _T.__imul__, _T.mul_), _arithmetic),
    **dict.fromkeys((_T.__itruediv__, _T.div_), _arithmetic),
    **dict.fromkeys((_T.flatten, torch.flatten), _flatten),
    _T.__getitem__: _item,
    **dict.fromkeys((_T.transpose, torch.transpose, _T.swapaxes, torch.swapaxes), _transpose),
    **dict.fromkeys((_T.permute, torch.permute), _permute),
}
