"""Watch one run: which argument each tensor comes from, how far the run came, and on what it failed.

A torch-function mode marks every tensor with the arguments it was computed from. What a layer with weights computes
from an argument is still marked, but no longer the argument itself: its width is the model's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autoplan.capture.feeding.wants import Path
from autoplan.common.nested import flatten_tensors
from autoplan.ops import call_record
from autoplan.ops.indexing import looks_up
from autoplan.ops.records.on_shards import Groups

_ORIGIN, _DIRECT = "_fed_from", "_fed_itself"
_TORCH = str(File(torch.__file__).parent)
_HERE = str(File(__file__).parents[2])
_COMPARED = ("eq", "ne", "gt")
_LARGEST = 50_000_000  # most elements of a tensor that a run may make


@dataclass(frozen=True)
class FailedCall:
    """The innermost torch call that raised."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return str(getattr(self.func, "__name__", self.func))

    def get(self, position: int, name: str) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name)

    def tensors(self) -> Iterator[torch.Tensor]:
        for _, tensor in flatten_tensors((self.args, self.kwargs)):
            yield tensor


def origin(value: Any) -> tuple[Path, ...]:
    """Return the arguments that a tensor was computed from."""
    paths: tuple[Path, ...] = getattr(value, _ORIGIN, ()) if isinstance(value, torch.Tensor) else ()
    return paths


def is_direct(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is an argument, or was computed from it without any layer with weights."""
    return bool(getattr(tensor, _DIRECT, False))


_OTHER_NUMBERS = ("_like", "new_zeros", "new_ones", "new_full", "new_empty", "eq", "ne", "gt", "ge", "lt", "le")
_NO_NUMBERS = ("__get__", "__set__", "requires_grad_")  # calls that read no values: a forward may freeze its weights


class Watch(TorchFunctionMode):
    """Marks tensors with their origin. `steps` grows with every new thing that the run does. `rows`: of the tables that
    ids index; `compared`: numbers that ids are compared with; `picking`: ids that index values of their own leading
    sizes, as a mask does; `linking`: ids that index rows of other arguments, as edges do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in model.named_parameters()}
        self._own = {*self.names, *(id(tensor) for tensor in model.buffers())}
        shapes = {parameter.shape for parameter in model.parameters() if parameter.dim() > 1}
        self.names |= {id(tensor): name for name, tensor in model.named_buffers() if tensor.shape in shapes}
        self.read: set[str] = set()
        self.steps: set[tuple[str, int, int, str]] = set()
        self.rows: dict[Path, int] = {}
        self.compared: dict[Path, int] = {}
        self.iterated: dict[Path, None] = {}
        self.picking: set[Path] = set()
        self.linking: set[Path] = set()
        self.failed: FailedCall | None = None
        self.last: tuple[Path, ...] = ()

    @contextmanager
    def over(self, values: dict[str, Any]) -> Iterator[None]:
        """Watch one run on these arguments."""
        for path, tensor in flatten_tensors(values):
            self._mark(tensor, (path,), direct=True)
        with self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [tensor for _, tensor in flatten_tensors((args, kwargs))]
        weights = [self.names[id(tensor)] for tensor in tensors if id(tensor) in self.names]
        paths = tuple(dict.fromkeys(path for tensor in tensors for path in origin(tensor)))
        name = str(getattr(func, "__name__", func))
        if not name.startswith(_NO_NUMBERS):
            self.read.update(weights)
            self.last = paths or self.last
        try:
            result = func(*args, **kwargs)
        except Exception:  # recorded, and raised again
            self.failed = FailedCall(func, tuple(args), dict(kwargs))
            if func is F.multi_head_attention_forward and _attention(self.failed).kind == "bool":  # the query fits
                self.steps.add((*_caller(), "key_padding_mask"))
            raise
        if any(tensor.numel() > _LARGEST for _, tensor in flatten_tensors(result)):
            raise MemoryError(f"{name} makes a tensor of more than {_LARGEST:,} numbers")
        if name == "unbind":  # torch iterates so, after it has asked for `dim`; a list comes as far without
            self.steps.discard((*_caller(), "dim"))
        elif not name.startswith(("__get__", "__len__")):
            self.steps.add((*_caller(), name))
        if paths:
            self._note_rows(name, args, kwargs)
            self._note_compared(name, args)
            self._note_picking(name, args)
            if name == "unbind" and len(args) == 2 and args[1] == 0 and len(paths) == 1 and is_direct(args[0]):
                self.iterated[paths[0]] = None
            direct = not (weights or name.rstrip("_").endswith(_OTHER_NUMBERS)) and all(
                is_direct(tensor) for tensor in tensors if origin(tensor)
            )
            for _, tensor in flatten_tensors(args[:1] if call_record(name).assigns else result):
                self._mark(tensor, paths, direct=direct)
        return result

    def _mark(self, tensor: torch.Tensor, paths: tuple[Path, ...], *, direct: bool) -> None:
        if id(tensor) not in self._own:
            tensor.__dict__[_ORIGIN], tensor.__dict__[_DIRECT] = paths, direct

    def _note_rows(self, name: str, args: Any, kwargs: Any) -> None:
        """Record the rows of the smallest table that an argument's ids index."""
        if not looks_up(call_record(name).becomes):
            return
        ids = args[0] if args else kwargs.get("input")
        table = args[1] if len(args) > 1 else kwargs.get("weight")
        if isinstance(table, torch.Tensor) and len(origin(ids)) == 1 and is_direct(ids):
            path = origin(ids)[0]
            self.rows[path] = min(self.rows.get(path, table.shape[0]), table.shape[0])

    def _note_picking(self, name: str, args: Any) -> None:
        ids = args[1] if name == "__getitem__" else None
        if isinstance(ids, torch.Tensor) and ids.dim() > 1 and args[0].shape[: ids.dim()] == ids.shape:
            self.picking.update(origin(ids) if is_direct(ids) else ())
        if isinstance(ids, torch.Tensor) and is_direct(ids) and set(origin(args[0])) - set(origin(ids)):
            self.linking.update(origin(ids))

    def _note_compared(self, name: str, args: Any) -> None:
        """Record the first number that an argument of integers is compared with: padding, a mask, an end."""
        if name.strip("_") in _COMPARED and len(args) == 2 and type(args[1]) is int:
            ids = args[0]
            if isinstance(ids, torch.Tensor) and not ids.is_floating_point() and is_direct(ids):
                for path in origin(ids)[:1]:
                    self.compared.setdefault(path, args[1])


def _caller() -> tuple[str, int, int]:
    """Return the place in the model's code, exactly, since a line may hold several calls."""
    frame = sys._getframe(2)
    while frame.f_back is not None and not outside_torch(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno, frame.f_lasti


def outside_torch(filename: str) -> bool:
    """Return whether a file belongs to the model, rather than to torch or to autoplan."""
    return not filename.startswith((_TORCH, _HERE, "<"))


# Demands of operations with weights on the tensors they consume, read from the weight's shape.


@dataclass(frozen=True)
class Demand:
    """Requirement on a tensor: ids below a number, floats, or a mask, of one of these ranks, with sizes at some dims
    (from the end if negative). `spatial`: how many spatial dims follow the channels."""

    tensor: Any
    kind: str
    ranks: tuple[int, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    below: int = 0
    spatial: int | None = None


def demand_of(call: FailedCall) -> Demand | None:
    """Return what the failed call demands of the tensor it consumes; None for a call without a known demand."""
    reader = _READERS.get(call.func)
    return reader(call) if reader else None


def _embedding(call: FailedCall) -> Demand:
    return Demand(call.get(0, "input"), "ids", (2, 1), below=call.get(1, "weight").shape[0])


def _linear(call: FailedCall) -> Demand:
    return Demand(call.get(0, "input"), "float", (3, 2), ((-1, call.get(1, "weight").shape[1]),))


def _matmul(call: FailedCall) -> Demand | None:
    left, right = call.get(0, "input"), call.get(1, "other")
    if isinstance(right, torch.Tensor) and not origin(right) and right.dim():  # a weight, a buffer
        return Demand(left, "float", (3, 2), ((-1, right.shape[-2:][0]),))
    if isinstance(left, torch.nn.Parameter) and isinstance(right, torch.Tensor) and left.dim() >= 2:
        return Demand(right, "float", (3, 2), ((-2, left.shape[-1]),))
    return None


def _convolution(call: FailedCall) -> Demand:
    op, weight = call_record(call.name), call.get(1, "weight")
    assert op.product is not None and isinstance(op.sizes, Groups)
    channels = weight.shape[op.product.inner]
    if op.product.inner == 1:  # the channels of one group; a transposed convolution has them all
        channels *= call.get(op.sizes.at, "groups") or 1
    spatial = weight.dim() - 2
    return Demand(call.get(0, "input"), "float", (spatial + 2,), ((1, channels),), spatial=spatial)


def _normalised(call: FailedCall) -> Demand:
    shape = tuple(call.get(1, "normalized_shape"))
    sizes = tuple((at - len(shape), size) for at, size in enumerate(shape))
    return Demand(call.get(0, "input"), "float", (len(shape) + 2, len(shape) + 1), sizes)


def _channels(position: int, name: str) -> Callable[[FailedCall], Demand | None]:
    def read(call: FailedCall) -> Demand | None:
        values = call.get(position, name)
        weight = call.kwargs.get("weight") if values is None else values
        if not isinstance(weight, torch.Tensor):
            return None
        return Demand(call.get(0, "input"), "float", (), ((1, weight.shape[0]),))

    return read


def _attention(call: FailedCall) -> Demand:
    query, width, padding = call.get(0, "query"), call.get(3, "embed_dim_to_check"), call.get(14, "key_padding_mask")
    if isinstance(padding, torch.Tensor) and query.shape[-1] == width:
        return Demand(padding, "bool", (), ((-1, call.get(1, "key").shape[0]),))
    return Demand(query, "float", (3, 2), ((-1, width),))


_READERS: dict[Any, Callable[[FailedCall], Demand | None]] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding,
    F.linear: _linear,
    F.conv1d: _convolution,
    F.conv2d: _convolution,
    F.conv3d: _convolution,
    F.conv_transpose1d: _convolution,
    F.conv_transpose2d: _convolution,
    F.conv_transpose3d: _convolution,
    F.layer_norm: _normalised,
    F.rms_norm: _normalised,
    F.batch_norm: _channels(1, "running_mean"),
    F.group_norm: _channels(2, "weight"),
    F.multi_head_attention_forward: _attention,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    torch.addmm: lambda call: Demand(call.get(1, "mat1"), "float", (2,), ((-1, call.get(2, "mat2").shape[0]),)),
}
