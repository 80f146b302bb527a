"""autoplan reads a model it has never seen and writes the plan that parallelises it.

    plan = autoplan.plan("llama", tp_size=8)
    model = autoplan.parallelize(model, mesh, plan)

Names are loaded on first use, from where `__init__.pyi` says: importing the package imports no torch.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from autoplan import conveniences as _conveniences  # noqa: F401 - implements methods of plans
from autoplan.deprecated import Renamed, successor

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_HOMES = {
    alias.name: str(node.module) for node in _STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
}
_RENAMED: dict[str, Renamed] = {}  # names that were replaced since a release

__all__ = sorted(_HOMES, key=lambda name: (not name[0].isupper(), name))


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None and (now := successor(name, _RENAMED)) is not None:
        return globals().get(now) or __getattr__(now)
    if home is None:
        raise AttributeError(f"module 'autoplan' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value
