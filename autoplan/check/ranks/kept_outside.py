"""What a model's code keeps outside of the model: lists and counters of its Python modules and classes.

The problem: packages of routed experts collect their losses in a list of a module. Ranks as threads are in one process,
so each would find the others' entries there, and a right plan looks wrong. What one run changes tells; such a model's
ranks are processes, as they are in training. So are those of a model that draws from the generators of the process past
the functions of `random` and `numpy.random`, which threads have each of its own (scipy's distributions do).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from autoplan.common.random_values import drawn_so_far
from autoplan.patches.simulated_ranks import host_generators

GENERATORS = "the generators of random and numpy.random"

_LIBRARIES = ("torch", "transformers", "autoplan", "builtins")
_COUNTED = (list, dict, set)


class KeptOutside:
    """While a model runs, what in the modules and classes of its code is no longer as it was when a part of it ends."""

    def __init__(self, model: nn.Module) -> None:
        kinds = {kind for module in model.modules() for kind in type(module).__mro__}
        self.classes = {kind for kind in kinds if kind.__module__.split(".")[0] not in _LIBRARIES}
        homes = {kind.__module__ for kind in self.classes} & sys.modules.keys()
        self._spaces: dict[str, Mapping[str, Any]] = {home: vars(sys.modules[home]) for home in homes}
        self._spaces |= {f"{kind.__module__}.{kind.__qualname__}": vars(kind) for kind in self.classes}
        self.before = dict(self._now())
        self.changed: tuple[str, ...] = ()

    def __enter__(self) -> KeptOutside:
        self._handle = register_module_forward_hook(self._look) if self.before else None
        own = random.Random(0), numpy.random.RandomState(0)
        self._drawn, self._by_name = drawn_so_far()[1:], host_generators(lambda: own)
        self._by_name.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._handle is not None:
            self._handle.remove()
        self._by_name.__exit__(*exception)
        if drawn_so_far()[1:] != self._drawn:
            self.changed += (GENERATORS,)

    def _look(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self.changed and type(module) in self.classes:
            now = dict(self._now())
            self.changed = tuple(name for name, value in self.before.items() if not _alike(value, now.get(name)))

    def _now(self) -> Iterator[tuple[str, list[Any]]]:
        for home, space in self._spaces.items():
            for name, value in list(space.items()):
                if not name.startswith("__"):
                    yield from ((f"{home}.{name}", told) for told in _told(value))


def _told(value: Any) -> Iterator[list[Any]]:
    """What tells a counter or a container from itself with other contents; of anything else nothing."""
    if isinstance(value, int | float | str):
        yield [value]
    elif isinstance(value, _COUNTED):
        yield list(value.values() if isinstance(value, dict) else value)  # held, so that no other takes their place


def _alike(one: list[Any], other: list[Any] | None) -> bool:
    if other is None or len(one) != len(other):
        return False
    return all(a is b or isinstance(a, int | float | str) and a == b for a, b in zip(one, other, strict=True))
