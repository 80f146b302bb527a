"""Integers that remember where they came from.

A module's forward mixes tensor sizes with integers that its constructor stored (`view(b, s, self.num_heads, -1)`).
To know which stored integer must become smaller on a rank, the recorder replaces them for one run by `TracedInt`s:
ordinary ints whose arithmetic keeps an expression tree (the `origin` of `values.Symbolic`). Nothing is guessed from
equal values: two integers that happen to be 64 stay two different origins.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from autoplan.values import Symbolic


class Escapes:
    """What happened to traced integers besides reaching a torch call: comparisons, and turning into floats."""

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
    """An int with an origin. Arithmetic with ints gives traced ints; anything else is an escape, and noted."""

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


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _install(f"__{_name}__", _name, reflected=False)
    _install(f"__r{_name}__", _name, reflected=True)
for _name in ("truediv", "pow"):
    _install(f"__{_name}__", _name, reflected=False)
    _install(f"__r{_name}__", _name, reflected=True)


def _is_plain_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, (bool, TracedInt)) and type(value).__module__ == "builtins"


def _is_settings(value: Any) -> bool:
    """A config-like object: plain attributes, no behaviour of torch's."""
    return hasattr(value, "__dict__") and hasattr(value, "to_dict") and not isinstance(value, torch.nn.Module)


def integer_attributes(module: torch.nn.Module) -> dict[str, Any]:
    """The integers (and tuples or lists of integers) a module stores, config fields as "config.name"."""
    found: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules") or name.startswith("_forward") or name == "training":
            continue
        if _is_settings(value):
            for key, inner in vars(value).items():
                if _is_plain_int(inner) or _is_int_sequence(inner):
                    found[f"{name}.{key}"] = inner
        elif _is_plain_int(value) or _is_int_sequence(value):
            found[name] = value
    return found


def _is_int_sequence(value: Any) -> bool:
    return type(value) in (list, tuple) and 0 < len(value) <= 16 and all(_is_plain_int(item) for item in value)


def trace_attributes(modules: dict[str, torch.nn.Module], escapes: Escapes) -> None:
    """Replace stored integers of throw-away modules by traced ones; each module gets a config copy of its own."""
    for fqn, module in modules.items():
        copies: dict[int, Any] = {}
        for name, value in list(vars(module).items()):
            if _is_settings(value):
                module.__dict__[name] = copies.setdefault(id(value), copy.copy(value))
        wrap = _wrapper(fqn, escapes)
        for dotted, value in integer_attributes(module).items():
            holder, _, key = dotted.rpartition(".")
            target = module.__dict__ if not holder else module.__dict__[holder].__dict__
            target[key or dotted] = wrap(dotted, value)


def _wrapper(fqn: str, escapes: Escapes) -> Callable[[str, Any], Any]:
    def wrap(attribute: str, value: Any) -> Any:
        if isinstance(value, int):
            return TracedInt(value, ("attr", fqn, attribute, None), escapes)
        items = [TracedInt(item, ("attr", fqn, attribute, i), escapes) for i, item in enumerate(value)]
        return type(value)(items)

    return wrap
