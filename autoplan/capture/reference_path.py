"""Optional kernels: what is read and proven on a CPU is the path that a model takes without them.

Scans, convolutions and delta rules come as kernels for GPUs, with a reference in plain torch that computes the same.
transformers takes the kernel wherever its library is installed, also for tensors on a CPU or without storage, on which
it cannot run; for an exporter it takes the reference. While we look at a model, we are one. Other code asks for the
device itself. Either way the plan says whose reference was read.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

__all__ = ["kernel_note", "on_reference_path", "where_it_runs"]

_HOME = "transformers.integrations.hub_kernels"
_ASKED = "is_torchdynamo_exporting"  # transformers' question before it takes a kernel
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


def kernel_note(model: nn.Module) -> str:
    """Which optional kernels the model's code knows, and whether they are installed; "" where it knows none."""
    known: dict[str, set[str]] = defaultdict(set)
    for home in _homes(model):
        for package, function in (*_with_fallback(home), *_optional_imports(home)):
            known[package].add(function)
    if not known:
        return ""
    listed = ", ".join(f"{package} ({', '.join(sorted(known[package]))})" for package in sorted(known))
    missing = [package for package in sorted(known) if not _is_installed(package)]
    state = "are installed" if not missing else f"are not installed: {', '.join(missing)}"
    return f"optional kernels of {listed}: its reference path was read and proven, which computes the same ({state})"


def _homes(model: nn.Module) -> list[ModuleType]:
    """The files that the model's classes are written in, torch's own left out."""
    names = {cls.__module__ for part in model.modules() for cls in type(part).__mro__}
    found = (sys.modules.get(name) for name in sorted(names) if name.partition(".")[0] not in ("torch", "builtins"))
    return [module for module in found if isinstance(module, ModuleType)]


def _with_fallback(home: ModuleType) -> Iterator[tuple[str, str]]:
    """Functions under transformers' decorator, which keeps what it was told in a closure."""
    for value in list(vars(home).values()):
        function = inspect.unwrap(value, stop=_decorated) if isinstance(value, FunctionType) else None
        if function is not None and _decorated(function):
            kept = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
            yield str(kept["package"].cell_contents), str(kept["func_name"].cell_contents)


def _decorated(function: Any) -> bool:
    return isinstance(function, FunctionType) and {"package", "func_name"} <= set(function.__code__.co_freevars)


def _optional_imports(home: ModuleType) -> Iterator[tuple[str, str]]:
    """Names that stand for nothing here since an import was skipped or failed: `try: from x import f`, `f = None`."""
    empty = {name for name, value in vars(home).items() if value is None and not name.startswith("__")}
    if not empty:
        return
    try:
        tree = ast.parse(inspect.getsource(home))
    except (OSError, SyntaxError, TypeError):
        return
    for statement in tree.body:
        if not isinstance(statement, ast.If | ast.Try):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) in empty:
                        yield node.module.partition(".")[0], alias.asname or alias.name


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
