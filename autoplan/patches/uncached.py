"""Caches that must not see a traced run.

While a model is recorded its sizes are traced integers, which know where they come from, and its tensors may be
without storage. To a cache keyed on sizes (einops keeps one for each pattern and shape, models keep tables by length)
they equal plain ones: it would hand out what came from another module, or from a recording long gone, and keep ours for
whoever asks next. So for the time of a recording, functions and methods wrapped in `functools.lru_cache` or
`functools.cache` run without it.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import nn

__all__ = ["uncached_functions"]

_WRAPPER = type(functools.lru_cache(len))
# Their module-level caches are of plain numbers, of no model's sizes, or of what is to be said once only.
_LEFT_ALONE = ("torch", "numpy", "sympy", "autoplan", "transformers", "huggingface_hub")


class _Place(NamedTuple):
    """An attribute of a module or class, or what a decorated function keeps in its closure."""

    holder: Any
    name: str

    @property
    def key(self) -> tuple[int, str]:
        return id(self.holder), self.name

    def put(self, value: Any) -> None:
        setattr(self.holder, self.name, value)


@dataclass
class _Replaced:
    """What stood in a place, and how many recordings need it away."""

    place: _Place
    original: Any
    users: int = 0


_lock = threading.Lock()
_replaced: dict[tuple[int, str], _Replaced] = {}


@contextmanager
def uncached_functions(model: nn.Module) -> Iterator[None]:
    """No caches in functions of any module and in what the model is made of, until nobody asks for it any more."""
    mine: list[_Replaced] = []
    with _lock:
        for place, original, plain in _cached(model):
            one = _replaced.get(place.key)
            if one is None:
                one = _replaced[place.key] = _Replaced(place, original)
                place.put(plain)
            one.users += 1
            mine.append(one)
        held = {one.place.key for one in mine}
        for key, one in _replaced.items():  # what another recording has replaced by now is not found any more
            if key not in held:
                one.users += 1
                mine.append(one)
    try:
        yield
    finally:
        with _lock:
            for one in mine:
                one.users -= 1
                if not one.users:
                    one.place.put(one.original)
                    del _replaced[one.place.key]


def _cached(model: nn.Module) -> Iterator[tuple[_Place, Any, Any]]:
    """Where a cached function stands, what is there, and the same without its cache."""
    standard = sys.stdlib_module_names
    for module_name, module in list(sys.modules.items()):
        top = module_name.partition(".")[0]
        if isinstance(module, ModuleType) and top not in standard and top not in _LEFT_ALONE:
            for name, value in list(vars(module).items()):
                if type(value) is _WRAPPER:
                    yield _Place(module, name), value, value.__wrapped__
    own = {cls for part in model.modules() for cls in type(part).__mro__ if not cls.__module__.startswith("torch.")}
    homes = {cls.__module__ for cls in own if cls.__module__.partition(".")[0] not in standard}
    for holder in (*(own - {object}), *(sys.modules[name] for name in homes if name in sys.modules)):
        for name, value in list(vars(holder).items()):
            yield from _cached_inside(holder, name, value)


def _cached_inside(holder: Any, name: str, value: Any) -> Iterator[tuple[_Place, Any, Any]]:
    """The same in a class or module of the model's: a decorator may hold the cached function in its closure."""
    rewrap: Callable[[Any], Any] = type(value) if isinstance(value, staticmethod | classmethod) else lambda plain: plain
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    if type(function) is _WRAPPER:
        yield _Place(holder, name), value, rewrap(function.__wrapped__)
    for cell in (function.__closure__ or ()) if isinstance(function, FunctionType) else ():
        try:
            kept = cell.cell_contents
        except ValueError:  # the cell is empty
            continue
        if type(kept) is _WRAPPER:
            yield _Place(cell, "cell_contents"), kept, kept.__wrapped__
