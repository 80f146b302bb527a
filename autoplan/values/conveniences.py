"""What a value can do that rooms above this one know how to do: print itself, save itself, say itself to others.

`plan.save(path)` is public, and a Plan that imported the writer of plan files would tie everything to everything. So
the methods stand on the values with their names and docstrings, and who does the work is handed in from the top of the
house (`autoplan/conveniences.py`, when the package is imported).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["done_above", "provide"]

_done_by: dict[str, Callable[..., Any]] = {}


def provide(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Say who does what: "Plan.save" -> a function that takes the plan first."""
    _done_by.update(functions)


def done_above(name: str, *args: Any, **kwargs: Any) -> Any:
    """Have `name` ("Plan.save") done by whoever was handed in for it."""
    return _done_by[name](*args, **kwargs)
