"""Run on fake tensors, but with real numbers where they follow from the integers and masks among a model's inputs.

Multimodal models count placeholder tokens, read grids of patches, and cut sequences by lengths, in Python. A run on
fake tensors alone must give up there, although none of these numbers depends on a weight: they follow from integers
that the caller passes. So integer and boolean inputs stay real, an op all of whose tensors are real is computed, and
everything that depends on a weight is fake as before.

Where Python asks for choices that do depend on weights (which experts were hit) and the model is too large to run for
real, they can be made up: positions spread over all there are, comparisons that hold. Any run makes some choice.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from autoplan.common.nested import flatten_tensors, own_argument
from autoplan.common.torch_internals import (
    DispatchMode,
    FakeTensor,
    FakeTensorMode,
    schema_of,
    unset_fake_temporarily,
)
from autoplan.ops import op_record
from autoplan.ops.records.answers import Supposed
from autoplan.values import Symbolic

_LARGEST = 4_000_000  # most elements of a tensor that is computed for real


class KnownValues:
    """A fake mode in which values computed from known integers alone are real. Inputs enter it by `admit`.

    `supposing` makes up positions and comparisons of unknown values.
    """

    def __init__(self, mode: FakeTensorMode, *, supposing: bool = False) -> None:
        self.mode, self.supposing = mode, supposing

    def admit(self, value: Any) -> Any:
        """Return an input for this mode: integers and masks keep their values, floats lose their storage."""
        if not isinstance(value, torch.Tensor):
            return own_argument(value, self.admit)
        return value.clone() if _is_known(value) else self.mode.from_tensor(value)

    def __enter__(self) -> KnownValues:
        self.mode.__enter__()
        self.above = _Computing(self.supposing)
        self.above.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self.above.__exit__(*exception)
        self.mode.__exit__(*exception)


class _Computing(DispatchMode):
    """Computes an op for real if every tensor in it is real, or if it makes integers from no tensor at all."""

    def __init__(self, supposing: bool) -> None:
        super().__init__()
        self.supposing = supposing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [tensor for _, tensor in flatten_tensors((args, kwargs))]
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            if schema_of(func).is_mutable and not isinstance(tensors[0], FakeTensor):
                raise RuntimeError(f"{func}: a known tensor is overwritten with unknown values")
            result = func(*args, **kwargs)
            return _supposed(func, tensors[0], result) if self.supposing and not schema_of(func).is_mutable else result
        if not tensors:
            fresh = func(*args, **kwargs)
            if not all(_is_known(tensor) and tensor.device.type == "cpu" for _, tensor in flatten_tensors(fresh)):
                return fresh
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _supposed(func: Any, chosen_from: torch.Tensor, found: Any) -> Any:
    """Return the result of an op on unknown values, with its positions and truth values made up."""
    if isinstance(found, tuple | list):
        return type(found)([_supposed(func, chosen_from, item) for item in found])
    if not isinstance(found, FakeTensor) or found.numel() > _LARGEST or not _is_known(found):
        return found
    supposed = op_record(schema_of(func).name.removeprefix("aten::")).supposed
    with unset_fake_temporarily():
        if found.dtype == torch.bool and supposed in (Supposed.TRUE, Supposed.FALSE):
            return torch.full(found.shape, supposed is Supposed.TRUE)
        if found.dtype == torch.int64 and supposed is Supposed.POSITIONS:
            return _spread(found.shape, chosen_from.shape)
    return found


def _spread(shape: torch.Size, among: torch.Size) -> torch.Tensor:
    """Return positions along the dim in which an op chooses: the first, the last, and some in between."""
    if len(shape) != len(among):  # one position per row
        return torch.zeros(shape, dtype=torch.int64)
    dim = next((d for d in range(len(shape)) if shape[d] != among[d]), len(shape) - 1)
    count, size = shape[dim], among[dim]
    places = torch.arange(count) * max(size - 1, 0) // max(count - 1, 1)
    return places.reshape([count if d == dim else 1 for d in range(len(shape))]).expand(shape).contiguous()


def _is_known(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel() <= _LARGEST


# Integers that remember where they came from.
#
# A module's forward mixes tensor sizes with integers that its constructor stored (`view(b, s, self.num_heads, -1)`). To
# know which stored integer must become smaller on a rank, the recorder replaces them for one run by `TracedInt`s:
# ordinary ints whose arithmetic keeps an expression tree (the `origin` of `values.Symbolic`). Nothing is guessed from
# equal values: two integers that happen to be 64 keep two different origins.


class Escapes:
    """Records comparisons of traced integers and conversions to float, since neither is seen in a torch call."""

    def __init__(self) -> None:
        self.module = ""
        self.comparisons: dict[tuple[str, Any, Any, bool], None] = {}
        self.floats: dict[tuple[tuple[Any, ...], str], None] = {}

    def compared(self, left: Any, right: Any, result: bool) -> None:
        self.comparisons[(self.module, _symbolic(left), _symbolic(right), result)] = None

    def escaped(self, origin: tuple[Any, ...], how: str) -> None:
        for attribute in _attributes_in(origin):
            self.floats[(attribute, how)] = None


class TracedInt(int):
    """An int with an origin. Arithmetic with ints gives traced ints; anything else is recorded as an escape."""

    origin: tuple[Any, ...]
    escapes: Escapes

    def __new__(cls, value: int, origin: tuple[Any, ...], escapes: Escapes) -> TracedInt:
        self = int.__new__(cls, value)
        self.origin, self.escapes = origin, escapes
        return self

    def __reduce__(self) -> Any:  # copies and pickles are plain ints
        return int, (int(self),)

    def __deepcopy__(self, memo: Any) -> TracedInt:
        return self

    __hash__ = int.__hash__

    def __eq__(self, other: Any) -> Any:
        result = int.__eq__(self, other)
        if result is not NotImplemented:
            self.escapes.compared(self, other, result)
        return result

    def __ne__(self, other: Any) -> Any:
        result = int.__ne__(self, other)
        if result is not NotImplemented:
            self.escapes.compared(self, other, not result)
        return result

    def __neg__(self) -> TracedInt:
        return TracedInt(int.__neg__(self), ("neg", self.origin), self.escapes)

    def __float__(self) -> float:
        self.escapes.escaped(self.origin, "float")
        return int.__float__(self)


def _symbolic(value: Any) -> Any:
    return Symbolic(int(value), value.origin) if isinstance(value, TracedInt) else value


def _attributes_in(origin: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    if origin[0] == "attr":
        yield origin
    for part in origin[1:]:
        if isinstance(part, tuple):
            yield from _attributes_in(part)


def _origin(value: int) -> tuple[Any, ...]:
    return value.origin if isinstance(value, TracedInt) else ("const", int(value))


def _install(dunder: str, name: str, *, reflected: bool) -> None:
    plain = getattr(int, dunder)

    def operate(self: TracedInt, other: Any) -> Any:
        result = plain(self, other)
        if result is NotImplemented or not isinstance(result, int):
            self.escapes.escaped(self.origin, dunder)
            return result
        left, right = _origin(self), _origin(other)
        return TracedInt(result, (name, right, left) if reflected else (name, left, right), self.escapes)

    setattr(TracedInt, dunder, operate)


for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
    _install(f"__{_name}__", _name, reflected=False)
    _install(f"__r{_name}__", _name, reflected=True)


def _is_plain_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, (bool, TracedInt)) and type(value).__module__ == "builtins"


def _is_settings(value: Any) -> bool:
    """Return whether a value is config-like: an object with plain attributes and `to_dict`, and no module."""
    return hasattr(value, "__dict__") and hasattr(value, "to_dict") and not isinstance(value, torch.nn.Module)


def integer_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return the integers (and tuples or lists of them) that a module stores, config fields as "config.name"."""
    integers: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules") or name.startswith("_forward") or name == "training":
            continue
        if _is_settings(value):
            for key, inner in vars(value).items():
                if _is_plain_int(inner) or _is_int_sequence(inner):
                    integers[f"{name}.{key}"] = inner
        elif _is_plain_int(value) or _is_int_sequence(value):
            integers[name] = value
    return integers


def _is_int_sequence(value: Any) -> bool:
    return type(value) in (list, tuple) and 0 < len(value) <= 16 and all(_is_plain_int(item) for item in value)


def trace_attributes(modules: dict[str, torch.nn.Module], escapes: Escapes) -> None:
    """Replace integers that throw-away modules store by traced ones; each module gets a config copy of its own."""
    for fqn, module in modules.items():
        copies: dict[int, Any] = {}
        for name, value in list(vars(module).items()):
            if _is_settings(value):
                module.__dict__[name] = copies.setdefault(id(value), copy.copy(value))
        for dotted, value in integer_attributes(module).items():
            holder, _, key = dotted.rpartition(".")
            target = module.__dict__ if not holder else module.__dict__[holder].__dict__
            if isinstance(value, int):
                target[key] = TracedInt(value, ("attr", fqn, dotted, None), escapes)
            else:
                items = [TracedInt(item, ("attr", fqn, dotted, i), escapes) for i, item in enumerate(value)]
                target[key] = type(value)(items)
