"""Copy functions together with what they close over.

The problem: `copy.deepcopy` takes a function for a constant. A hook that closes over the state of a model would go on
to work with that of the original after the model has been copied.
"""

from __future__ import annotations

import copy
from functools import partial
from types import CellType, FunctionType
from typing import Any

__all__ = ["copied_with_closure"]


def copied_with_closure(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy of a function, or of a list or tuple of them, in which closures refer to copies too."""
    if isinstance(value, list) and id(value) not in memo:
        found: list[Any] = []
        memo[id(value)] = found
        found.extend(copied_with_closure(item, memo) for item in value)
        return found
    if type(value) is tuple:
        return tuple(copied_with_closure(item, memo) for item in value)
    if isinstance(value, partial):
        given = {name: copied_with_closure(item, memo) for name, item in value.keywords.items()}
        return partial(copied_with_closure(value.func, memo), *copied_with_closure(value.args, memo), **given)
    if not isinstance(value, FunctionType) or value.__closure__ is None:
        return copy.deepcopy(value, memo)
    if id(value) not in memo:
        cells = tuple(CellType() for _ in value.__closure__)
        made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        made.__kwdefaults__ = value.__kwdefaults__
        memo[id(value)] = made
        for cell, before in zip(cells, value.__closure__, strict=True):
            cell.cell_contents = copied_with_closure(before.cell_contents, memo)
    return memo[id(value)]
