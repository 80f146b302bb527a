"""What the operations with weights want from the tensors they consume.

A torch-function mode follows every argument through whatever is done to it (casts, views, sums) until an operation
that has a weight takes it; the weight's shape then says what the argument must have been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from autoplan.capture.draw import Draw

__all__ = ["Want", "Watch", "tensors_within"]


@dataclass(frozen=True)
class Want:
    """A kind ("ids", "float", "bool", "none") and a shape of sizes and of the names batch, length, width."""

    kind: str
    shape: tuple[int | str, ...]
    below: int = 2  # ids are smaller

    def text(self, batch: int, length: int) -> str:
        sizes = {"batch": batch, "length": length}
        shape = ", ".join(str(sizes.get(s, s)) if isinstance(s, str) else str(s) for s in self.shape)
        return "None" if self.kind == "none" else f"{self.kind} of shape [{shape}]"

    def make(self, draw: Draw, sizes: dict[str, int]) -> Any:
        shape = [sizes[s] if isinstance(s, str) else s for s in self.shape]
        if self.kind == "none":
            return None
        if self.kind == "ids":
            return draw.integers(0, self.below, shape)
        return torch.ones(shape, dtype=torch.bool) if self.kind == "bool" else draw.normal(shape)


class Watch(TorchFunctionMode):
    """Follows tensors to their first consumer. `wanted`: argument -> what it should be, by preference.

    What went well needs no change, but that ids stay below the rows of the table they look up. `grids`: plausible
    numbers of patches per side, read from the sizes of position tables.
    """

    def __init__(self, shapes: dict[str, tuple[int | str, ...]], grids: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.shapes, self.grids = shapes, grids
        self.wanted: dict[str, tuple[Want, ...]] = {}
        self.reasons: dict[str, str] = {}
        self.last = ""
        self._origin: dict[int, str] = {}
        self._alive: list[torch.Tensor] = []  # ids are reused once a tensor is gone

    @contextmanager
    def over(self, inputs: dict[str, torch.Tensor], model: nn.Module) -> Iterator[None]:
        """Watch one run of `model`, which is a copy of ours: some modules check before they call an operation."""
        for name, tensor in inputs.items():
            self._follow(tensor, name)
        hooks = [m.register_forward_pre_hook(self._module) for m in model.modules() if isinstance(m, _CHECKING)]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = next((self._origin[id(t)] for t in tensors_within((args, kwargs)) if id(t) in self._origin), None)
        if name is None:
            return func(*args, **kwargs)
        self.last = name
        reader = _CONSUMERS.get(func)
        found = reader(self, args, kwargs) if reader else None
        consumer = self._origin.get(id(found[0])) if found is not None else None
        try:
            result = func(*args, **kwargs)
        except Exception:
            if found is not None and consumer is not None:
                self._want(consumer, found[1], getattr(func, "__name__", str(func)))
            elif found is None:
                self._broadcast(name, args)
            raise
        if found is not None and consumer is not None:
            self._looked_up(consumer, found[1])
            return result  # what a consumer makes is the model's own
        for tensor in tensors_within(result):
            self._follow(tensor, name)
        return result

    def _follow(self, tensor: torch.Tensor, name: str) -> None:
        self._origin[id(tensor)] = name
        self._alive.append(tensor)

    def _want(self, name: str, wants: tuple[Want, ...], who: str) -> None:
        if name not in self.wanted:
            self.wanted[name] = wants
            self.reasons[name] = f"{who} wants {wants[0].text(2, 2)}"

    def _looked_up(self, name: str, wants: tuple[Want, ...]) -> None:
        if wants[0].kind == "ids":
            self._want(name, (Want("ids", self.shapes[name], wants[0].below),), "embedding")

    def _broadcast(self, name: str, args: Any) -> None:
        """An operation with a parameter failed: the last dim of the argument may be the parameter's."""
        parameter = next((a for a in args if isinstance(a, nn.Parameter) and a.dim()), None)
        if parameter is not None and parameter.shape[-1] > 1:
            self._want(name, _features(parameter.shape[-1]), "a parameter")

    def _module(self, module: nn.Module, args: Any) -> None:
        width = module.d_model if isinstance(module, nn.Transformer) else module.input_size
        for tensor in tensors_within(args[:2] if isinstance(module, nn.Transformer) else args[:1]):
            fits = tensor.is_floating_point() and tensor.shape[-1] == width
            if id(tensor) in self._origin and not fits:
                self._want(self._origin[id(tensor)], _features(int(width)), type(module).__name__)


_CHECKING = (nn.RNNBase, nn.Transformer)


def tensors_within(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_within(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_within(item)


def _get(args: Any, kwargs: Any, position: int, name: str) -> Any:
    return args[position] if len(args) > position else kwargs.get(name)


Reader = Callable[[Watch, Any, Any], "tuple[Any, tuple[Want, ...]] | None"]


def _embedding(watch: Watch, args: Any, kwargs: Any) -> tuple[Any, tuple[Want, ...]]:
    rows = _get(args, kwargs, 1, "weight").shape[0]
    return _get(args, kwargs, 0, "input"), (Want("ids", ("batch", "length"), rows), Want("ids", ("batch",), rows))


def _features(width: int) -> tuple[Want, ...]:
    return (Want("float", ("batch", "length", width)), Want("float", ("batch", width)))


def _linear(watch: Watch, args: Any, kwargs: Any) -> tuple[Any, tuple[Want, ...]]:
    return _get(args, kwargs, 0, "input"), _features(_get(args, kwargs, 1, "weight").shape[1])


def _matmul(watch: Watch, args: Any, kwargs: Any) -> tuple[Any, tuple[Want, ...]] | None:
    left, right = _get(args, kwargs, 0, "input"), _get(args, kwargs, 1, "other")
    if isinstance(right, torch.nn.Parameter) and right.dim() == 2:
        return left, _features(right.shape[0])
    return None


def _addmm(watch: Watch, args: Any, kwargs: Any) -> tuple[Any, tuple[Want, ...]]:
    return _get(args, kwargs, 1, "mat1"), _features(_get(args, kwargs, 2, "mat2").shape[0])


def _convolution(rank: int) -> Reader:
    """Channels from the weight. Patches: as many per side as a table of positions has; else usual sizes."""

    def read(watch: Watch, args: Any, kwargs: Any) -> tuple[Any, tuple[Want, ...]]:
        weight, groups = _get(args, kwargs, 1, "weight"), _get(args, kwargs, 6, "groups") or 1
        kernel, stride = weight.shape[2:], _get(args, kwargs, 3, "stride") or 1
        strides = stride if isinstance(stride, list | tuple) else (stride,) * rank
        if all(step >= size > 1 for step, size in zip(strides, kernel, strict=False)):
            sides = [tuple(n * size for size in kernel) for n in (4, *watch.grids)]
        else:
            sides = [tuple(max(4 * size, n) for size in kernel) for n in (32, 64, 224)]
        channels = weight.shape[1] * groups
        wants = tuple(Want("float", ("batch", channels, *side)) for side in sides)
        return _get(args, kwargs, 0, "input"), wants

    return read


def _normalised(position: int, name: str) -> Reader:
    def read(watch: Watch, args: Any, kwargs: Any) -> tuple[Any, tuple[Want, ...]]:
        shape = tuple(_get(args, kwargs, position, name))
        wants = (Want("float", ("batch", "length", *shape)), Want("float", ("batch", *shape)))
        return _get(args, kwargs, 0, "input"), wants

    return read


def _channels(watch: Watch, args: Any, kwargs: Any) -> tuple[Any, tuple[Want, ...]] | None:
    """Batch norm: as many channels as its statistics have; two spatial dims, one, or none."""
    statistics = _get(args, kwargs, 1, "running_mean")
    statistics = statistics if statistics is not None else _get(args, kwargs, 3, "weight")
    if statistics is None:
        return None
    shapes: tuple[tuple[int | str, ...], ...] = ((statistics.shape[0],), (statistics.shape[0], 32, 32))
    shapes = (*shapes, (statistics.shape[0], "length"))
    return _get(args, kwargs, 0, "input"), tuple(Want("float", ("batch", *shape)) for shape in shapes)


def _attention(watch: Watch, args: Any, kwargs: Any) -> tuple[Any, tuple[Want, ...]]:
    return _get(args, kwargs, 0, "query"), _features(_get(args, kwargs, 3, "embed_dim_to_check"))


_CONSUMERS: dict[Any, Reader] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding,
    F.linear: _linear,
    F.conv1d: _convolution(1),
    F.conv2d: _convolution(2),
    F.conv3d: _convolution(3),
    F.layer_norm: _normalised(1, "normalized_shape"),
    F.rms_norm: _normalised(1, "normalized_shape"),
    F.batch_norm: _channels,
    F.multi_head_attention_forward: _attention,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.mm: _matmul,
    torch.addmm: _addmm,
}
