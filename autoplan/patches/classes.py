"""Modules of a live model change their class.

Parameters of a sharded model are read through properties, so every module gets a subclass of its own class. FSDP2 does
the like. `as_it_was.py` gives modules their own class back when a later step fails.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from autoplan.patches.patched import Patch

__all__ = ["CLASSES", "give_class", "subclass_of"]

_HEARS = "__init_subclass__"
_making = threading.RLock()  # simulated ranks make classes at the same time


def give_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Make a module an instance of another class with the same attributes: a subclass, or the class it had before."""
    module.__class__ = cls


def subclass_of(cls: Any, namespace: dict[str, Any]) -> Any:
    """Make a subclass with these attributes and the names of `cls`, which instances of `cls` can be given.

    A class that keeps account of its subclasses hears nothing of it: its authors wrote none. It is the only base, as
    another one before it may lie otherwise in memory (`class Base(Generic[T], nn.Module)`).
    """
    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    with _unheard(cls):
        return type(cls)(cls.__name__, (cls,), names | namespace)


@contextmanager
def _unheard(cls: type) -> Iterator[None]:
    """Inside, subclasses of `cls` are made without `__init_subclass__`, if it has one."""
    if not any(_HEARS in vars(base) for base in cls.__mro__[:-1]):
        yield
        return
    with _making:
        own = vars(cls).get(_HEARS)
        type.__setattr__(cls, _HEARS, classmethod(lambda made, **options: None))
        try:
            yield
        finally:
            if own is None:
                type.__delattr__(cls, _HEARS)
            else:
                type.__setattr__(cls, _HEARS, own)


def _canary() -> bool:
    """Does a call of a module go through `_call_impl` of the class that it has now?"""

    class Doubled(nn.Identity):
        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super()._call_impl(*args, **kwargs)

    module = nn.Identity()
    give_class(module, Doubled)
    inside = module(3)
    give_class(module, nn.Identity)
    return (inside, module(3), type(module)) == (6, 3, nn.Identity)


CLASSES = Patch(
    name="classes of modules",
    replaces="the class of each module of a model that holds parameters, by a subclass of it",
    why="a module's own code reads local tensors where optimizers, FSDP2 and checkpoints see DTensors",
    scope="while the model is sharded",
    undone="the module gets its own class back when the plan is undone, or a later step fails",
    where="autoplan/patches/classes.py",
    canary=_canary,
)
