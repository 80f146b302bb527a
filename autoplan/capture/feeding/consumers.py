"""What the operations with weights demand of the tensors they consume: the weight's shape says it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from autoplan.capture.feeding.watch import FailedCall, origin
from autoplan.ops import call_record
from autoplan.ops.records.sizes import Groups


@dataclass(frozen=True)
class Demand:
    """What a tensor must be: ids below a number, or floats, of so many dims, with sizes at some dims (from the end
    where negative). `spatial`: how many dims of space follow the channels."""

    tensor: Any
    kind: str
    ranks: tuple[int, ...] = ()
    sizes: tuple[tuple[int, int], ...] = ()
    below: int = 0
    spatial: int | None = None


def demand_of(call: FailedCall) -> Demand | None:
    """What the call that failed wanted of the tensor it consumes; None where nothing is known of it."""
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


def _addmm(call: FailedCall) -> Demand:
    return Demand(call.get(1, "mat1"), "float", (2,), ((-1, call.get(2, "mat2").shape[0]),))


def _convolution(call: FailedCall) -> Demand:
    known, weight = call_record(call.name), call.get(1, "weight")
    assert known.product is not None and isinstance(known.sizes, Groups)
    channels = weight.shape[known.product.inner]
    if known.product.inner == 1:  # those of one group; transposed, it has them all
        channels *= call.get(known.sizes.at, "groups") or 1
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
    return Demand(call.get(0, "query"), "float", (3, 2), ((-1, call.get(3, "embed_dim_to_check")),))


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
    torch.addmm: _addmm,
}
