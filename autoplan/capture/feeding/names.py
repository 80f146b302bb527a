"""What arguments usually are, by words in their names: `rules/arguments.toml`, read once.

Which words mean what is a habit of code bases, not a fact about a model; so it is data, and whoever knows another habit
adds a line there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast, get_args

from autoplan.capture.feeding.wants import SIZES, Kind, Want
from autoplan.common.errors import AutoplanError
from autoplan.common.files.plain import NotPlain, read_plain
from autoplan.common.files.shapes import misshapen
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
