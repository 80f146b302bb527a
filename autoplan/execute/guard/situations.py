"""Which calls of a sharded model are like ones that were looked at: a cheap key for each call.

A call is like another if its arguments are of the same kinds, dtypes and dims, flags and words are the same, gradients,
autocast and modes too, and what modules keep of themselves between calls is. Sizes and numbers count apart: the first
few differing ones are looked at each, then those that leave the range of what was seen by a quarter (a sequence that
grows by a token with each call would be looked at for ever). The first three calls of a kind are looked at in any case:
a state may be left behind by the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

__all__ = ["Situations"]

_FIRST = 3
_SIZES = 16  # differing sets of sizes and numbers that are looked at each
_FARTHER = 1.25
_DEPTH = 4

Key = tuple[Any, ...]


@dataclass
class _Kind:
    """What was looked at of one kind of calls."""

    calls: int = 0
    numbers: set[Key] = field(default_factory=set)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    always: bool = False

    def is_new(self, numbers: Key) -> bool:
        if self.always or self.calls < _FIRST:
            return True
        if numbers in self.numbers:
            return False
        if len(self.numbers) < _SIZES or len(numbers) != len(self.low):
            return True
        bounds = zip(numbers, self.low, self.high, strict=True)
        return any(one > high * _FARTHER or one < low / _FARTHER for one, low, high in bounds)

    def add(self, numbers: Key) -> None:
        self.calls += 1
        self.numbers.add(numbers)
        same = len(numbers) == len(self.low)
        self.low = [min(pair) for pair in zip(numbers, self.low, strict=True)] if same else list(numbers)
        self.high = [max(pair) for pair in zip(numbers, self.high, strict=True)] if same else list(numbers)


class Situations:
    """All kinds of calls of one model. `keepers`: modules whose code sets attributes, with the names of these; `modes`:
    modules whose code asks whether they train."""

    def __init__(self) -> None:
        self.kinds: dict[Key, _Kind] = {}
        self.keepers: list[tuple[nn.Module, tuple[str, ...]]] = []
        self.modes: list[nn.Module] = []
        self.noted: set[tuple[int, int]] = set()

    def of(self, model: nn.Module, given: Mapping[str, Any]) -> tuple[Key, Key]:
        """The kind of a call, and its numbers."""
        kind: list[Any] = [
            model.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(),
            torch.get_default_dtype(), *(module.training for module in self.modes),
        ]  # fmt: skip
        numbers: list[Any] = []
        for name, value in given.items():
            kind.append(name)
            _describe(value, kind, numbers, _DEPTH)
        for module, names in self.keepers:
            state = vars(module)
            for name in names:
                _describe(state.get(name), kind, numbers, 2)
        return tuple(kind), tuple(numbers)

    def is_new(self, kind: Key, numbers: Key) -> bool:
        known = self.kinds.get(kind)
        return known is None or known.is_new(numbers)

    def add(self, kind: Key, numbers: Key, *, always: bool) -> None:
        known = self.kinds.setdefault(kind, _Kind())
        known.add(numbers)
        known.always |= always

    def note_code(self, module: Any, code: Any, stores: tuple[str, ...]) -> None:
        """A function of the model's runs: does it keep something for calls to come, or ask for the mode?"""
        if not isinstance(module, nn.Module) or (id(module), id(code)) in self.noted:
            return
        self.noted.add((id(module), id(code)))
        names = code.co_names
        kept = tuple(name for name in dict.fromkeys((*stores, *names))
                     if name in stores or isinstance(vars(module).get(name), list | dict))  # fmt: skip
        if kept:
            self.keepers.append((module, kept))
        if "training" in names and not any(module is one for one in self.modes):
            self.modes.append(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Situations:
        return Situations()  # of another model


def _describe(value: Any, kind: list[Any], numbers: list[Any], depth: int) -> None:
    """Append what of a value tells kinds of calls apart, and its numbers."""
    if isinstance(value, torch.Tensor):
        kind += (type(value), value.dtype, value.dim(), value.requires_grad)
        numbers += value.shape
    elif value is None or isinstance(value, bool | str):
        kind.append(value)
    elif isinstance(value, int | float):
        kind.append(type(value))
        numbers.append(value if value == value else 0.0)
    elif isinstance(value, list | tuple) and depth:
        kind += (type(value), len(value))
        for item in value[:_SIZES]:
            _describe(item, kind, numbers, depth - 1)
    elif isinstance(value, dict) and depth:
        kind += (type(value), len(value))
        for name in list(value)[:_SIZES]:
            kind.append(name if isinstance(name, str | int) else type(name))
            _describe(value[name], kind, numbers, depth - 1)
    elif isinstance(value, torch.dtype | torch.device):
        kind.append(value)
    elif isinstance(value, Callable):  # type: ignore[arg-type]
        kind.append(getattr(value, "__qualname__", type(value)))
    else:
        kind.append(type(value))
        state = getattr(value, "__dict__", None)
        for name, item in list(state.items())[:_SIZES] if depth and isinstance(state, dict) else ():
            if item is None or isinstance(item, bool | str | int | float):
                kind.append(name)
                _describe(item, kind, numbers, 0)
