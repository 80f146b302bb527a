"""Dotted paths: `pkg.module.NAME`, `pkg.module.Class.attribute`, `pkg.module:function`.

The value is a plan, or a function that returns one and takes nothing, the model, or the model and whether sequence
parallelism is wanted. An import that fails says which part failed; a value that is no plan says what it is. Importing
and calling run a stranger's code, which may raise anything: what it raises is the message.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from autoplan.common.importing import importable_here
from autoplan.decide.written_plans.choices import WrittenPlanError
from autoplan.values import Plan

__all__ = ["looks_dotted", "plan_at"]


def looks_dotted(text: str) -> bool:
    """Could this be a dotted path? (Whether it leads anywhere is another question.)"""
    parts = text.replace(":", ".").split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def plan_at(path: str, model: Any, sequence_parallel: bool = False) -> Mapping[str, Any] | Plan:
    """The dict or Plan that a dotted path leads to."""
    with importable_here():
        value = _value_at(path)
    called = ""
    if callable(value) and not isinstance(value, Mapping):
        try:
            value, called = _called(value, path, model, sequence_parallel), "() returned"
        except WrittenPlanError:
            raise
        except (Exception, SystemExit) as error:
            raise WrittenPlanError(f"{path} raises when it is called: {_said(error)}", hint="fix it first") from error
    if isinstance(value, (Mapping, Plan)):
        return value
    raise WrittenPlanError(
        f"{path}{called or ' is'} {_described(value)}, which is no plan",
        hint="it must be a dict of pattern: style, an autoplan Plan, or a function that returns one",
    )


def _value_at(path: str) -> Any:
    parts = path.replace(":", ".").split(".")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        if not _exists(name):
            continue
        try:
            value = import_module(name)
        except ImportError as error:
            raise WrittenPlanError(f"{path}: importing {name} failed: {error}", hint="install what it needs") from error
        except (Exception, SystemExit) as error:
            raise WrittenPlanError(f"{path} raises on import: {_said(error)}", hint=f"fix {name} first") from error
        return _attribute(value, name, parts[length:], path)
    raise WrittenPlanError(
        f"{path}: there is no module {parts[0]!r}",
        hint="check the spelling, and that its folder is on PYTHONPATH",
    )


def _exists(module: str) -> bool:
    if module in sys.modules:  # `__main__` is, and has no spec
        return True
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # a parent that is missing, or is no package
        return False


def _attribute(value: Any, name: str, rest: list[str], path: str) -> Any:
    for part in rest:
        if not hasattr(value, part):
            public = [known for known in dir(value) if not known.startswith("_")]
            raise WrittenPlanError(f"{path}: {name} has no {part!r}", hint=f"it has {', '.join(public[:12])}")
        value, name = getattr(value, part), f"{name}.{part}"
    return value


def _called(function: Callable[..., Any], path: str, model: Any, sequence_parallel: bool) -> Any:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise WrittenPlanError(f"{path} cannot be called: {error}", hint="give a plain function") from error
    offered = {"model": model, "sequence_parallel": sequence_parallel}
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.name in offered for p in places):
        arguments = {p.name: offered[p.name] for p in places if p.name in offered}
        asked = [p for p in places if p.name not in offered and p.default is p.empty]
        if not asked:
            return function(**arguments)
    required = [p for p in places if p.default is p.empty]
    if len(required) > 2:
        names = ", ".join(p.name for p in required)
        raise WrittenPlanError(f"{path} wants ({names})", hint="it may take (), (model) or (model, sequence_parallel)")
    return function(*list(offered.values())[: len(required)])


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _described(value: Any) -> str:
    kind = type(value)
    return f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"
