"""Optional kernels: what is read and proven on a CPU is the path that a model takes without them.

Scans, convolutions and delta rules come as kernels for GPUs, with a reference in plain torch that computes the same.
transformers takes the kernel wherever its library is installed, also for tensors on a CPU or without storage, on which
it cannot run; for an exporter it takes the reference. While we look at a model, we are one. Other code asks for the
device itself. Either way the plan says whose reference was read.
"""

from __future__ import annotations

import ast
import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

__all__ = ["OptionalKernel", "kernel_note", "on_reference_path", "optional_kernels", "where_it_runs"]

_HOME = "transformers.integrations.hub_kernels"
_ASKED = "is_torchdynamo_exporting"  # transformers' question before it takes a kernel
_KEPT = ("package", "func_name", "is_new_implementation", "torch_function")  # in the decorator's closure
_NO_KERNELS = ("torch", "transformers", "numpy", *sys.stdlib_module_names)
_LIBRARIES, _MODELS = ("torch.", "builtins", "transformers."), "transformers.models."
_lock = threading.Lock()
_users = 0
_original: Any = None


@contextmanager
def on_reference_path() -> Iterator[None]:
    """While anyone is in here, transformers' functions with a kernel take their reference."""
    global _users, _original
    home = sys.modules.get(_HOME)
    if home is None or not hasattr(home, _ASKED):  # no such kernels in this version
        yield
        return
    with _lock:
        _users += 1
        if _users == 1:
            _original = getattr(home, _ASKED)
            setattr(home, _ASKED, lambda: True)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                setattr(home, _ASKED, _original)


def where_it_runs(model: nn.Module) -> Any:
    """`on_reference_path` for a model on the CPU, and no change for one on a GPU."""
    first = next(model.parameters(), None)
    return on_reference_path() if first is None or first.device.type in ("cpu", "meta") else nullcontext()


@dataclass(frozen=True)
class OptionalKernel:
    """A function that a file of the model's has under `name`, if its library is installed, and what is done without.

    `home`: the file. `reference`: None where there is none, or where the code asks for the device itself.
    """

    home: ModuleType
    name: str
    package: str
    function: str
    installed: bool
    reference: Callable[..., Any] | None = None


def optional_kernels(model: nn.Module) -> list[OptionalKernel]:
    """The optional kernels that the model's files know."""
    return [kernel for home in _homes(model) for kernel in (*_with_fallback(home), *_optional_imports(home))]


def kernel_note(model: nn.Module) -> str:
    """Which optional kernels the model's code knows, and whether they are installed; "" where it knows none."""
    known: dict[str, set[str]] = defaultdict(set)
    kernels = optional_kernels(model)
    for kernel in kernels:
        if kernel.reference is not None or not kernel.installed:
            known[kernel.package].add(kernel.function)
    if not known:
        return ""
    listed = ", ".join(f"{package} ({', '.join(sorted(known[package]))})" for package in sorted(known))
    missing = sorted({kernel.package for kernel in kernels if not kernel.installed})
    state = f"not installed: {', '.join(missing)}" if missing else "all are installed"
    said = "the reference in plain torch was read and proven, which computes the same"
    return f"optional kernels of {listed}: {said} ({state})"


def _homes(model: nn.Module) -> list[ModuleType]:
    """The files that the model's classes are written in, without those of the libraries below them."""
    names = {cls.__module__ for part in model.modules() for cls in type(part).__mro__}
    own = (name for name in sorted(names) if not name.startswith(_LIBRARIES) or name.startswith(_MODELS))
    found = (sys.modules.get(name) for name in own)
    return [module for module in found if isinstance(module, ModuleType)]


def _with_fallback(home: ModuleType) -> Iterator[OptionalKernel]:
    """Functions under transformers' decorator, which keeps what it was told in a closure."""
    for name, value in list(vars(home).items()):
        function = inspect.unwrap(value, stop=_decorated) if isinstance(value, FunctionType) else None
        if function is None or not _decorated(function):
            continue
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        package, kernel, new, reference = (cells[word].cell_contents for word in _KEPT)
        yield OptionalKernel(home, name, str(package), str(kernel), bool(new), reference)


def _decorated(function: Any) -> bool:
    return isinstance(function, FunctionType) and set(_KEPT) <= set(function.__code__.co_freevars)


def _optional_imports(home: ModuleType) -> Iterator[OptionalKernel]:
    """Functions whose import may be skipped or fail: `try: from x import f`, and in the other case `f = None`."""
    with _lock:  # Python 3.11 cannot make syntax trees in two threads at once
        imports = _conditional_imports(home.__name__)
    for package, function, name in imports:
        value = vars(home).get(name, _decorated)
        if value is None or callable(value) and not isinstance(value, type) and value is not _decorated:
            yield OptionalKernel(home, name, package, function, value is not None)


@lru_cache(maxsize=256)
def _conditional_imports(home: str) -> tuple[tuple[str, str, str], ...]:
    """Package, function and its name in the file, of each import of another library that stands under a condition."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[home]))
    except (OSError, SyntaxError, TypeError):
        return ()
    nodes = (node for part in tree.body if isinstance(part, ast.If | ast.Try) for node in ast.walk(part))
    found = [
        (node.module.partition(".")[0], node) for node in nodes if isinstance(node, ast.ImportFrom) and node.module
    ]
    return tuple(
        (package, alias.name, alias.asname or alias.name)
        for package, node in found
        if not node.level and package not in _NO_KERNELS
        for alias in node.names
    )
