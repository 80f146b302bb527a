"""What a forward hands on as it was given: `return self.inner(*args, **kwargs)` takes what `inner` takes.

A wrapper's own signature says nothing of its arguments; that of the function which it calls does. Read is the code, by
attributes of `self` only: nothing is run.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_DEEPEST = 4  # wrappers in wrappers


def passed_on(function: Callable[..., Any], owner: nn.Module, depth: int = 0) -> list[inspect.Parameter]:
    """The parameters that `**kwargs` of a method stand for, as those have them who get it."""
    rest = [p for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD]
    stars = [p for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_POSITIONAL]
    found: dict[str, inspect.Parameter] = {}
    for call in _calls_with(function, rest[0].name) if rest and depth < _DEEPEST else ():
        target = _target(call.func, owner)
        if target is None:
            continue
        given = {keyword.arg for keyword in call.keywords if keyword.arg}
        starred = [one for one in call.args if isinstance(one, ast.Starred)]
        placed = len(call.args) - len(starred)
        free = not starred or bool(stars)  # what some other sequence fills is not asked for by name
        names = [p for p in _own(target) if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for place, parameter in enumerate(names):
            if free and place >= placed and parameter.name not in given:
                found.setdefault(parameter.name, parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        within = getattr(target, "__self__", None)
        for parameter in passed_on(target, within, depth + 1) if isinstance(within, nn.Module) else ():
            if parameter.name not in given:
                found.setdefault(parameter.name, parameter)
    return list(found.values())


def _own(target: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(target).parameters.values())


def _calls_with(function: Callable[..., Any], rest: str) -> Iterator[ast.Call]:
    """Calls that get all of `**rest`."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # made at run time, or by decorators
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(
            keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id == rest
            for keyword in node.keywords
        ):
            yield node


def _target(func: ast.expr, owner: nn.Module) -> Callable[..., Any] | None:
    """The method, or the forward of the module, that `self.a.b` is."""
    path: list[str] = []
    while isinstance(func, ast.Attribute):
        path.insert(0, func.attr)
        func = func.value
    if not path or not isinstance(func, ast.Name) or func.id != "self":
        return None
    found: Any = owner
    for name in path:
        found = getattr(found, name, None)
    found = found.forward if isinstance(found, nn.Module) else found
    return found if inspect.ismethod(found) else None
