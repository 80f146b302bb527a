"""Reading the arguments of a recorded call."""

from __future__ import annotations

from typing import Any

from autoplan.values import Call, Symbolic

__all__ = ["argument", "is_integer", "number"]


def is_integer(value: Any) -> bool:
    return isinstance(value, Symbolic) or (isinstance(value, int) and not isinstance(value, bool))


def number(value: Any) -> int:
    return value.value if isinstance(value, Symbolic) else int(value)


def argument(call: Call, position: int, *names: str) -> tuple[tuple[Any, ...], Any]:
    """An argument by position or name, with its path."""
    if len(call.args) > position:
        return ("args", position), call.args[position]
    for name in names:
        if name in call.kwargs:
            return ("kwargs", name), call.kwargs[name]
    return (), None
