"""Patches of classes, and of code while it is recorded."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from autoplan.common.torch_internals import function_mode_is_active
from autoplan.patches.patched import Place, hold, patch, patched

# Change the class of a live model's modules.
#
# Parameters of a sharded model are read through properties, so every module gets a subclass of its own class, as FSDP2
# does, too. `as_it_was.py` restores the class of modules when a later step fails.

_HEARS = "__init_subclass__"
_making = threading.RLock()  # simulated ranks make classes at the same time


def give_class(thing: nn.Module | nn.Parameter, cls: type[nn.Module | nn.Parameter]) -> None:
    """Make a module or parameter an instance of another class with the same attributes: a subclass, or its former
    class."""
    object.__setattr__(thing, "__class__", cls)  # whatever the module's own code allows to be set


def subclass_of(cls: Any, namespace: dict[str, Any]) -> Any:
    """Make a subclass with these attributes and the names of `cls`, which instances of `cls` can be given.

    `__init_subclass__` of `cls` is not called, since its authors wrote no such subclass. `cls` is the only base, as
    another one before it may have another memory layout (`class Base(Generic[T], nn.Module)`).
    """
    namespace = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")} | namespace
    if not any(_HEARS in vars(base) for base in cls.__mro__[:-1]):
        return type(cls)(cls.__name__, (cls,), namespace)
    with _making:
        own = vars(cls).get(_HEARS)
        type.__setattr__(cls, _HEARS, classmethod(lambda subclass, **options: None))
        try:
            return type(cls)(cls.__name__, (cls,), namespace)
        finally:
            if own is None:
                type.__delattr__(cls, _HEARS)
            else:
                type.__setattr__(cls, _HEARS, own)


def reduced(subclass: Any, rebuild: Any, given: tuple[Any, ...], instance: Any, protocol: Any) -> Any:
    """Return a `__reduce_ex__` that calls `rebuild(*given)` for such a class, which cannot be found by its name."""
    theirs, arguments, *rest = super(subclass, instance).__reduce_ex__(max(2, protocol))
    if getattr(theirs, "__name__", "") == "__newobj__" and arguments == (subclass,):
        return (rebuild, given, *rest)
    return (theirs, arguments, *rest)  # a subclass of ours, or a class that rebuilds itself


@patch(
    name="classes of modules",
    replaces="the class of each module that holds parameters, by a subclass of it; so of each replaced parameter",
    why="the module's own code must read local tensors, while optimizers, FSDP2 and checkpoints read DTensors; and a "
    "replaced parameter must not be trained in silence",
    scope="while the model is sharded",
    undone="the original class is restored when the plan is undone or a later step fails",
)
def classes_patch() -> bool:
    """Return whether a call of a module uses `_call_impl` of its present class."""

    class Doubled(nn.Identity):
        def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
            return 2 * super()._call_impl(*args, **kwargs)

    module = nn.Identity()
    give_class(module, Doubled)
    inside = module(3)
    give_class(module, nn.Identity)
    return (inside, module(3), type(module)) == (6, 3, nn.Identity)


# Code whose calls a recording cannot see, unless caches and TorchScript are bypassed.
#
# Caches: while a model is recorded its sizes are traced integers, which carry their origin, and its tensors may have no
# storage. To a cache keyed on sizes (einops keeps one for each pattern and shape, models keep tables by length) they
# equal plain ones: it would return results of another module or an earlier recording, and keep ours for later calls. So
# during a recording, functions and methods wrapped in `functools.lru_cache` or `functools.cache` run uncached.
#
# TorchScript: a function compiled by `torch.jit.script` or `torch.jit.trace` makes its calls outside of Python, some of
# them without a visible result. It runs as its original Python function; so it does in a sharded model, where calls
# inside of it are rewritten.

_WRAPPER = type(functools.lru_cache(len))
# Their module-level caches hold plain numbers, no sizes of models, or what is logged only once.
_LEFT_ALONE = ("torch", "numpy", "sympy", "autoplan", "transformers", "huggingface_hub")


@patch(
    name="uncached functions",
    replaces="functools.lru_cache and functools.cache around functions of other packages and of the model's classes",
    why="a cache keyed on sizes would mix traced integers of a recording with plain ones",
    scope="while a model is recorded, or a copy of it is tried without storage",
    undone="the cached function is restored with its cache",
)
def uncached_patch() -> bool:
    """Return whether cached functions have a type of their own with `__wrapped__`, and closures can be changed."""
    cached = functools.lru_cache(maxsize=4)(abs)
    other = functools.cache(len)

    def holding() -> Any:
        return cached

    assert holding.__closure__ is not None
    (cell,) = holding.__closure__
    cell.cell_contents = other
    return type(other) is _WRAPPER and cached is other and other.__wrapped__ is len


@patch(
    name="TorchScript functions",
    replaces="torch.jit.ScriptFunction.__call__",
    why="ops inside a function that torch.jit compiled cannot be observed",
    scope="while a model is recorded; while a model lives whose plan rewrites calls in helper functions, or "
    "whose calls the path guard follows; inside a torch function mode",
    undone="the method is restored",
)
def unscripted_patch() -> bool:
    """Return whether a scripted function gives its original, and is called through its class."""

    def twice(x: torch.Tensor) -> torch.Tensor:
        return x + x

    return torch.jit.script(twice)._torchdynamo_inline is twice and "__call__" in vars(torch.jit.ScriptFunction)


def _as_python(call: Any) -> Any:
    def called(function: Any, *args: Any, **kwargs: Any) -> Any:
        seen = function_mode_is_active()
        written = getattr(function, "_torchdynamo_inline", None) if seen else None
        return call(function, *args, **kwargs) if written is None else written(*args, **kwargs)

    return called


_SCRIPTS = (Place(torch.jit.ScriptFunction, "__call__", _as_python),)


@contextmanager
def code_lies_open(model: nn.Module) -> Iterator[None]:
    """Bypass caches, of functions in any module and in the model's classes, and TorchScript, until the last such block
    ends."""
    with patched(uncached_patch, _cached(model), together=True), patched(unscripted_patch, _SCRIPTS):
        yield


def open_scripts(model: nn.Module) -> Callable[[], None]:
    """Let a mode that rewrites calls of this model see those in TorchScript; return a function that ends this."""
    scripts = hold(unscripted_patch, _SCRIPTS)
    scripts.until_gone(model)
    return scripts.release


def _cached(model: nn.Module) -> Iterator[Place]:
    """Yield the place of each cached function, with a replacement that bypasses its cache."""
    for module_name in _searched(len(sys.modules), next(reversed(sys.modules))):
        if isinstance(module := sys.modules.get(module_name), ModuleType):
            yield from (Place(module, name, _plain) for name in _names_in(module_name, module))
    own = {cls for part in model.modules() for cls in type(part).__mro__ if not cls.__module__.startswith("torch.")}
    homes = {cls.__module__ for cls in own if cls.__module__.partition(".")[0] not in sys.stdlib_module_names}
    for holder in (*(own - {object}), *(sys.modules[name] for name in homes if name in sys.modules)):
        for name, value in list(vars(holder).items()):
            # A decorator in the model's own classes and modules may hold a cached function in its closure.
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if type(function) is _WRAPPER:
                yield Place(holder, name, _plain)
            for cell in (function.__closure__ or ()) if isinstance(function, FunctionType) else ():
                try:
                    contents = cell.cell_contents
                except ValueError:  # the cell is empty
                    continue
                if type(contents) is _WRAPPER:
                    yield Place(cell, "cell_contents", _plain)


@functools.lru_cache(maxsize=1)
def _searched(number: int, newest: str) -> tuple[str, ...]:
    """Return the names of imported modules of other packages; there are so many modules, the newest of that name."""
    apart = sys.stdlib_module_names.union(_LEFT_ALONE)
    return tuple(name for name in list(sys.modules) if name.partition(".")[0] not in apart)


_scanned: dict[str, tuple[int, int, dict[str, None]]] = {}  # name of a module -> its id, its size, names in it


def _names_in(module_name: str, module: ModuleType) -> list[str]:
    """Return the names of cached functions in a module, which is searched when it is new or has other names."""
    members, (which, size, names) = vars(module), _scanned.get(module_name, (0, 0, {}))
    if (which, size) != (id(module), len(members)):  # names that a recording has replaced at this time stay
        names = {n: None for n, value in list(members.items()) if n in names or type(value) is _WRAPPER}
        _scanned[module_name] = id(module), len(members), names
    return [name for name in names if type(members.get(name)) is _WRAPPER]


def _plain(value: Any) -> Any:
    """Return the wrapped function; a static or class method stays one."""
    if isinstance(value, staticmethod | classmethod):
        cached: Any = value.__func__
        return type(value)(cached.__wrapped__)
    return value.__wrapped__
