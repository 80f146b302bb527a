"""Infer what arguments usually are from words in their names: `rules/arguments.toml`, read once.

Which words mean what is a habit of code bases, not a fact about a model; so it is data, and another habit is one more
line there.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast, get_args

from torch import nn

from autoplan.capture.feeding.wants import SIZES, Kind, Want
from autoplan.common.code.code_place import nodes_of
from autoplan.common.errors import AutoplanError
from autoplan.common.files.decode import misshapen
from autoplan.common.files.plain import NotPlain, read_plain
from autoplan.common.files.rule_files import rules_folder

_SHAPE = {
    "states!": str,
    "offsets!": str,
    "loss_switches!": str,
    "argument!": [{"words!": str, "usually!": [str], "edges": bool}],
}


@dataclass(frozen=True)
class UsualNames:
    """`arguments`: words, and what such arguments usually are. `edges`: words for edges of graphs. `states`: for
    initial states of recurrent layers. `offsets`: for numbers that count from zero. `loss_switches`: for switches, and
    short names of targets, that make a forward compute its loss."""

    arguments: tuple[tuple[re.Pattern[str], tuple[Want, ...]], ...]
    edges: tuple[re.Pattern[str], ...]
    states: re.Pattern[str]
    offsets: re.Pattern[str]
    loss_switches: re.Pattern[str]

    def usual(self, name: str) -> tuple[Want, ...]:
        """Return what an argument of this name usually is, the likeliest first."""
        return next((wants for words, wants in self.arguments if words.search(name.lower())), ())

    def has_edges(self, names: Iterable[str | int]) -> bool:
        return any(words.search(str(name)) for name in names for words in self.edges)


def usual_names() -> UsualNames:
    return read_names(rules_folder() / "arguments.toml")


@lru_cache(maxsize=4)
def read_names(path: Path) -> UsualNames:
    """Read such a file. Raise AutoplanError, with the line, for what cannot be read."""
    refusal = NotPlain(hint="compare it with autoplan's own rules/arguments.toml")
    data: dict[str, Any] = read_plain(path, refusal, notation="toml")
    if problem := misshapen(data, _SHAPE):
        refusal.refuse(f"{path}: {problem}")
    try:
        listed = [(re.compile(entry["words"]), entry) for entry in data["argument"]]
        states, offsets, switches = (re.compile(data[words]) for words in ("states", "offsets", "loss_switches"))
        arguments = tuple((words, tuple(map(_want, entry["usually"]))) for words, entry in listed)
    except (re.error, ValueError) as error:
        raise AutoplanError(f"{path}: {error}", hint=refusal.hint) from error
    edges = tuple(words for words, entry in listed if entry.get("edges"))
    return UsualNames(arguments, edges, states, offsets, switches)


def _want(text: str) -> Want:
    """Parse one line of the file.

    >>> _want("ids 2 edges < nodes")
    Want(kind='ids', shape=(2, 'edges'), below='nodes', value=None, items=())
    """
    shown, _, below = text.partition("<")
    head, _, value = shown.partition("=")
    kind, *dims = head.split()
    sizes = [_size(word) for word in (*dims, *below.split(), *value.split())]
    if kind not in get_args(Kind) or len(below.split()) > 1 or len(value.split()) > 1:
        raise ValueError(f"{text!r} is no kind, sizes, and what ids are below")
    shape, rest = tuple(sizes[: len(dims)]), sizes[len(dims) :]
    if value:
        return Want(cast(Kind, kind), shape, value=rest[0])
    return Want(cast(Kind, kind), shape, rest[0]) if below else Want(cast(Kind, kind), shape)


def _size(text: str) -> int | str:
    if not text.isdigit() and text not in SIZES:
        raise ValueError(f"{text!r} is neither a number nor one of {', '.join(SIZES)}")
    return int(text) if text.isdigit() else text


# Arguments that a forward passes on: `return self.inner(*args, **kwargs)` takes what `inner` takes.
#
# A wrapper's own signature says nothing about its arguments, that of the function which it calls does. The code is
# read, following attributes of `self` only; nothing is run.


_DEEPEST = 4  # most wrappers around wrappers


def passed_on(function: Callable[..., Any], owner: nn.Module, depth: int = 0) -> list[inspect.Parameter]:
    """Return the parameters that `**kwargs` of a method stand for, as the functions that receive it declare them."""
    rest = [p for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD]
    stars = [p for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_POSITIONAL]
    parameters: dict[str, inspect.Parameter] = {}
    for call in _calls_with(function, rest[0].name) if rest and depth < _DEEPEST else ():
        target = _target(call.func, owner) or _wrapped(call.func, function)
        if target is None:
            continue
        passed = {keyword.arg for keyword in call.keywords if keyword.arg}
        starred = [argument for argument in call.args if isinstance(argument, ast.Starred)]
        placed = max(len(call.args) - len(starred), int(inspect.isfunction(target)))  # an unbound method has `self`
        free = not starred or bool(stars)  # parameters that another sequence fills are not passed by name
        names = [p for p in _own(target) if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for place, parameter in enumerate(names):
            if free and place >= placed and parameter.name not in passed:
                parameters.setdefault(parameter.name, parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
        within = getattr(target, "__self__", None)
        for parameter in passed_on(target, within, depth + 1) if isinstance(within, nn.Module) else ():
            if parameter.name not in passed:
                parameters.setdefault(parameter.name, parameter)
    return list(parameters.values())


def _own(target: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(target).parameters.values())


def _calls_with(function: Callable[..., Any], rest: str) -> Iterator[ast.Call]:
    """Yield calls that receive all of `**rest`."""
    for node in nodes_of(function):
        if isinstance(node, ast.Call) and any(
            keyword.arg is None and isinstance(keyword.value, ast.Name) and keyword.value.id == rest
            for keyword in node.keywords
        ):
            yield node


def _wrapped(func: ast.expr, wrapper: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the method that a decorator's wrapper runs: a function in its closure."""
    try:
        variables = inspect.getclosurevars(wrapper).nonlocals
    except (TypeError, ValueError):  # not a Python function, or an unbound closure variable
        return None
    function = variables.get(func.id) if isinstance(func, ast.Name) else None
    return function if inspect.isfunction(function) else None


def _target(func: ast.expr, owner: nn.Module) -> Callable[..., Any] | None:
    """Return the method that `self.a.b` is, or the forward of the module that it is."""
    path: list[str] = []
    while isinstance(func, ast.Attribute):
        path.insert(0, func.attr)
        func = func.value
    if not path or not isinstance(func, ast.Name) or func.id != "self":
        return None
    target: Any = owner
    for name in path:
        target = getattr(target, name, None)
    target = target.forward if isinstance(target, nn.Module) else target
    return target if inspect.ismethod(target) else None
