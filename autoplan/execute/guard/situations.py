"""Kinds of calls of a sharded model: a cheap key tells whether a call is like one that was traced.

A call is like another if its arguments have the same kinds, dtypes and dims, and flags, strings, gradients, autocast,
modes and the state that modules keep between calls are the same. Sizes and numbers are compared separately: as long as
a branch that may depend on a number has an unseen way, each new set of them is traced; otherwise the first few, then
those outside of the seen range by a quarter (a sequence that grows by a token with each call would be traced for ever).
The first three calls of a kind are always traced: the one before may have left a state behind.

Calls whose code may read the environment or a clock are traced each time, and so are those that read values of tensors,
and those that read what cannot be compared: iterators, random generators, variables that inner functions set. What the
code only reads is watched: plain values, containers and objects that modules, their classes, functions and files of the
model hold under names that the code mentions. After one of them has changed, the rank where it changed traces the call.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, islice
from types import CodeType, FrameType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn

from autoplan.common.code.code_place import outer_stores
from autoplan.common.code.ways import is_settled
from autoplan.common.torch_internals import own_modules, own_parameters

_FIRST = 3
_SIZES = 16  # sets of sizes and numbers that are all traced
_FARTHER = 1.25
_DEPTH = 6
_MOST = 4096  # sets of numbers that are kept
_ABSENT = object()
_OUTSIDE = frozenset({"datetime", "os", "posix", "secrets", "socket", "time", "uuid"})  # the environment or a clock
_STREAMS = (Iterator, ContextVar, random.Random, numpy.random.Generator, numpy.random.RandomState)
_OF_MODULES = frozenset(vars(nn.Module()))

Key = tuple[Any, ...]


@dataclass
class _Kind:
    """The traced calls of one kind."""

    calls: int = 0
    numbers: set[Key] = field(default_factory=set)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    always: bool = False

    def is_new(self, numbers: Key, open_ways: bool) -> bool:
        if self.calls < _FIRST or (self.always and open_ways):
            return True
        if numbers in self.numbers:
            return False
        if len(self.numbers) < (_MOST if open_ways else _SIZES) or len(numbers) != len(self.low):
            return True
        bounds = zip(numbers, self.low, self.high, strict=True)
        return any(number > high * _FARTHER or number < low / _FARTHER for number, low, high in bounds)

    def add(self, numbers: Key) -> None:
        self.calls += 1
        self.numbers.add(numbers)
        same = len(numbers) == len(self.low)
        self.low = [min(pair) for pair in zip(numbers, self.low, strict=True)] if same else list(numbers)
        self.high = [max(pair) for pair in zip(numbers, self.high, strict=True)] if same else list(numbers)


class Situations:
    """All kinds of calls of one model. `keepers`: modules whose code sets attributes, with their names; `modes`:
    modules whose code reads `training`; `frozen`: parameters whose `requires_grad` may be read. `watched`: where a
    value is, its name, and its first value. `open_ways`: whether a branch that may depend on a number has a way never
    seen. `reads_streams`: whether the code reads what cannot be compared."""

    def __init__(self) -> None:
        self.kinds: dict[Key, _Kind] = {}
        self.keepers: list[tuple[nn.Module, tuple[str, ...]]] = []
        self.modes: list[nn.Module] = []
        self.frozen: list[nn.Parameter] = []
        self.noted: set[tuple[int, int]] = set()
        self.watched: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any]] = {}
        self.reads_streams = False
        self.looked_at: set[tuple[Key, Key]] = set()  # kinds of calls with changed values
        self.open_ways = False

    def of(self, model: nn.Module, given: Mapping[str, Any]) -> tuple[Key, Key]:
        """Return the kind of a call, and its numbers."""
        kind: list[Any] = [
            model.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled(),
            torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled(),
            *(module.training for module in self.modes), *(parameter.requires_grad for parameter in self.frozen),
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
        seen = self.kinds.get(kind)
        return seen is None or seen.is_new(numbers, self.open_ways)

    def changed(self) -> Key:
        """Return the watched values that differ from their first ones. A number that counts calls is left out where no
        branch may depend on it."""
        differing: list[Any] = []
        for place, (state, name, was) in self.watched.items():
            now = state.get(name, _ABSENT)
            if now is was or (_is_plain(now) and type(now) is type(was) and now == was):
                continue
            few = self.open_ways or len(self.looked_at) < _SIZES
            if isinstance(was, _Described):
                is_now = _Described.of(now)
                differing += (place, is_now.kind) if is_now.kind != was.kind else ()
                differing += (place, is_now.numbers) if few and is_now.numbers != was.numbers else ()
            elif few or not isinstance(now, int | float) or isinstance(now, bool):
                differing += (place, now if isinstance(now, bool | str | int | float) else _named(now))
        return tuple(differing)

    def add_changed(self, kind: Key, changed: Key) -> None:
        if len(self.looked_at) >= _MOST:
            self.looked_at.clear()
        self.looked_at.add((kind, changed))

    def add(self, kind: Key, numbers: Key, *, always: bool) -> None:
        seen = self.kinds.setdefault(kind, _Kind())
        seen.add(numbers)
        seen.always |= always

    def note_code(self, module: Any, frame: FrameType, stores: tuple[str, ...]) -> None:
        """Note a function of the model that runs: the state that it keeps for later calls, whether it reads the mode,
        and what else it reads."""
        code = frame.f_code
        if (id(module), id(code)) in self.noted:
            return
        self.noted.add((id(module), id(code)))
        names = _names_in(code)
        self.reads_streams |= bool(outer_stores(code))
        self._watch(frame.f_globals, names)
        self._watch({name: frame.f_locals.get(name) for name in code.co_freevars}, code.co_freevars)
        if not isinstance(module, type | ModuleType | torch.Tensor):
            covered = {*stores, "training"} if isinstance(module, nn.Module) else ()  # `keepers` covers these
            self._watch_attributes(module, tuple(set(names).difference(covered)), stores)
        if not isinstance(module, nn.Module):
            return
        self._watch(own_modules(module), names)
        if "requires_grad" in names:
            self.frozen += module.parameters()
        for name in names:
            child = own_modules(module).get(name)
            for below in () if child is None else child.modules():  # of which its own code may not mention the names
                self._watch_attributes(below, tuple(set(names) - _OF_MODULES))
            if child is not None and not own_parameters(child) and type(child).__module__.startswith("torch.nn"):
                self._watch(vars(child), tuple(set(vars(child)) - {"training"}))
        keeps = tuple(name for name in dict.fromkeys((*stores, *names))
                      if name in stores or isinstance(vars(module).get(name), list | dict))  # fmt: skip
        if keeps:
            self.keepers.append((module, keeps))
        if "training" in names and not any(module is other for other in self.modes):
            self.modes.append(module)

    def _watch(
        self, state: Mapping[str, Any], names: tuple[str, ...], coming: Container[str] = (), owner: Any = None
    ) -> None:
        """Watch values by name. `coming`: names that may be set later. `owner`: the object of which `state` is a
        view."""
        for name in names:
            value = state.get(name, _ABSENT)
            place = id(state if owner is None else owner), name
            if place in self.watched or isinstance(value, torch.Tensor | ModuleType):
                continue
            if value is _ABSENT and name not in coming:
                continue
            if value is _ABSENT or _is_plain(value) or isinstance(value, nn.Module) or callable(value):
                self.watched[place] = state, name, value
            else:
                self.watched[place] = state, name, _Described.of(value)
                self.reads_streams |= isinstance(value, _STREAMS)
            if isinstance(value, dict) and len(value) <= _SIZES and all(isinstance(key, str) for key in value):
                self._watch(value, tuple(value))
            elif not isinstance(value, nn.Module) and not _is_plain(value):  # the code of modules is traced itself
                self._watch_attributes(value, names)
                self._watch_attributes(getattr(value, "__self__", None), names)  # of a bound method

    def _watch_attributes(self, owner: Any, names: tuple[str, ...], coming: tuple[str, ...] = ()) -> None:
        """Watch attributes of an object, a function or a module, and those of its class, which an instance may override
        later."""
        state = getattr(owner, "__dict__", None)
        if not isinstance(state, dict) or isinstance(owner, type | ModuleType | torch.Tensor):
            return
        later = set(coming)
        for cls in type(owner).__mro__:
            if not is_settled(cls.__module__):
                attributes = tuple(name for name in names if name in vars(cls) and not callable(vars(cls)[name]))
                later.update(attributes)
                self._watch(vars(cls), attributes, owner=cls)
        self._watch(state, names, later)

    def __deepcopy__(self, memo: dict[int, Any]) -> Situations:
        return Situations()  # a copied model has its own


def _names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names that code mentions, including its inner functions."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return tuple(dict.fromkeys(chain(code.co_names, *inner)))


def reads_outside(frame: FrameType) -> bool:
    """Return whether code may read the environment or a clock."""
    for name in frame.f_code.co_names:
        value = frame.f_globals.get(name)
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", name)
        if module in _OUTSIDE:
            return True
    return False


def _is_plain(value: Any) -> bool:
    """Return whether a value is one that code may branch on."""
    if isinstance(value, tuple):
        return len(value) <= _SIZES and all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _named(value: Any) -> Any:
    return getattr(value, "__qualname__", type(value).__qualname__), id(value)


@dataclass(frozen=True)
class _Described:
    """The state of a container or an object, as far as it distinguishes kinds of calls."""

    kind: Key
    numbers: Key

    @classmethod
    def of(cls, value: Any) -> _Described:
        kind: list[Any] = []
        numbers: list[Any] = []
        _describe(value, kind, numbers, _DEPTH)
        return cls(tuple(kind), tuple(numbers))


def _describe(value: Any, kind: list[Any], numbers: list[Any], depth: int) -> None:
    """Append what distinguishes kinds of calls in a value, and its numbers."""
    if isinstance(value, torch.Tensor):
        dense = value.layout is torch.strided and value.is_contiguous()
        kind += (type(value), value.dtype, value.dim(), value.requires_grad, dense)
        numbers += value.shape
    elif value is None or isinstance(value, bool | str):
        kind.append(value)
    elif isinstance(value, int | float):
        kind.append(type(value))
        numbers.append(value if value == value else 0.0)
    elif isinstance(value, list | tuple | deque) and depth:
        kind += (type(value), len(value))
        for item in islice(value, _SIZES):
            _describe(item, kind, numbers, depth - 1)
        rest = islice(value, _SIZES, _MOST)
        kind.append(tuple(item for item in rest if item is None or isinstance(item, bool | str)))
    elif isinstance(value, set | frozenset):
        words = (str(item) for item in islice(value, _MOST) if isinstance(item, str | int | Enum))
        kind += (type(value), len(value), *sorted(words))
    elif isinstance(value, bytearray):
        kind += (type(value), len(value))
    elif isinstance(value, numpy.ndarray | numpy.generic):
        kind += (type(value), value.dtype, value.ndim)
        numbers += value.shape
        if value.size <= _SIZES and value.dtype.kind in "biuf":
            numbers += value.ravel().tolist()
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
        if is_settled(type(value).__module__):
            return
        state = getattr(value, "__dict__", None) or {
            name: getattr(value, name, None) for name in getattr(value, "__slots__", ()) if isinstance(name, str)
        }
        for name, item in list(state.items())[:_SIZES] if depth and isinstance(state, dict) else ():
            if item is None or isinstance(item, bool | str | int | float):
                kind.append(name)
                _describe(item, kind, numbers, 0)
