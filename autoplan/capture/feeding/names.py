"""What arguments usually are, by words in their names: `rules/arguments.toml`, read once.

Which words mean what is a habit of code bases, not a fact about a model; so it is data, and whoever knows another habit
adds a line there.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast, get_args

from torch import nn

from autoplan.capture.feeding.wants import SIZES, Kind, Want
from autoplan.common.errors import AutoplanError
from autoplan.common.files.decode import misshapen
from autoplan.common.files.plain import NotPlain, read_plain
from autoplan.common.rules_folder import rules_folder

_SHAPE = {
    "states!": str,
    "loss_switches!": str,
    "argument!": [{"words!": str, "usually!": [str], "edges": bool}],
}


@dataclass(frozen=True)
class UsualNames:
    """`arguments`: words, and what it usually is. `edges`: those about edges. `states`: what a recurrent layer begins
    with. `loss_switches`: what makes a forward compute its loss."""

    arguments: tuple[tuple[re.Pattern[str], tuple[Want, ...]], ...]
    edges: tuple[re.Pattern[str], ...]
    states: re.Pattern[str]
    loss_switches: re.Pattern[str]

    def usual(self, name: str) -> tuple[Want, ...]:
        """What an argument of this name usually is, the likeliest first."""
        return next((wants for words, wants in self.arguments if words.search(name.lower())), ())

    def has_edges(self, names: Iterable[str | int]) -> bool:
        return any(words.search(str(name)) for name in names for words in self.edges)


def usual_names() -> UsualNames:
    return read_names(rules_folder() / "arguments.toml")


@lru_cache(maxsize=4)
def read_names(path: Path) -> UsualNames:
    """Raises AutoplanError, by line, for what cannot be read."""
    refusal = NotPlain(hint="compare it with autoplan's own rules/arguments.toml")
    data: dict[str, Any] = read_plain(path, refusal, notation="toml")
    if problem := misshapen(data, _SHAPE):
        refusal.refuse(f"{path}: {problem}")
    try:
        listed = [(re.compile(one["words"]), one) for one in data["argument"]]
        states, switches = re.compile(data["states"]), re.compile(data["loss_switches"])
        arguments = tuple((words, tuple(map(_want, one["usually"]))) for words, one in listed)
    except (re.error, ValueError) as error:
        raise AutoplanError(f"{path}: {error}", hint=refusal.hint) from error
    return UsualNames(arguments, tuple(words for words, one in listed if one.get("edges")), states, switches)


def _want(text: str) -> Want:
    """One line of the file.

    >>> _want("ids 2 edges < nodes")
    Want(kind='ids', shape=(2, 'edges'), below='nodes', value=None, items=())
    """
    shown, _, below = text.partition("<")
    said, _, value = shown.partition("=")
    kind, *dims = said.split()
    sizes = [_size(one) for one in (*dims, *below.split(), *value.split())]
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


# What a forward hands on as it was given: `return self.inner(*args, **kwargs)` takes what `inner` takes.
#
# A wrapper's own signature says nothing of its arguments; that of the function which it calls does. Read is the code,
# by attributes of `self` only: nothing is run.


_DEEPEST = 4  # wrappers in wrappers


def passed_on(function: Callable[..., Any], owner: nn.Module, depth: int = 0) -> list[inspect.Parameter]:
    """The parameters that `**kwargs` of a method stand for, as those have them who get it."""
    rest = [p for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_KEYWORD]
    stars = [p for p in inspect.signature(function).parameters.values() if p.kind is p.VAR_POSITIONAL]
    found: dict[str, inspect.Parameter] = {}
    for call in _calls_with(function, rest[0].name) if rest and depth < _DEEPEST else ():
        target = _target(call.func, owner) or _wrapped(call.func, function)
        if target is None:
            continue
        given = {keyword.arg for keyword in call.keywords if keyword.arg}
        starred = [argument for argument in call.args if isinstance(argument, ast.Starred)]
        placed = max(len(call.args) - len(starred), int(inspect.isfunction(target)))  # of a function the first is self
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


def _wrapped(func: ast.expr, wrapper: Callable[..., Any]) -> Callable[..., Any] | None:
    """The method that a decorator's wrapper runs: a function in its closure."""
    try:
        kept = inspect.getclosurevars(wrapper).nonlocals
    except (TypeError, ValueError):  # no function of Python's own, or one that is not made yet
        return None
    found = kept.get(func.id) if isinstance(func, ast.Name) else None
    return found if inspect.isfunction(found) else None


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
