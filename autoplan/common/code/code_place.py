"""Name a torch call by its path through the source, so that it is recognised on every run.

"forward:12:8-30>repeat_kv:3:20-41" is the call in columns 20 to 41 of the third line of `repeat_kv`, called from line
twelve of `forward`. Counting calls would not do: runs with a cache, a mask or more rounds have more or fewer of them.
"""

from __future__ import annotations

import dis
import hashlib
import inspect
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch
import torch.nn.modules.module as module_calls

_OURS = str(Path(__file__).resolve().parents[2]) + os.sep  # the package
_TORCH = os.path.dirname(os.path.dirname(os.path.dirname(module_calls.__file__))) + os.sep  # module.py is in nn/modules


def call_name(function: Any) -> str:
    """Return the name of a torch function: a property getter is "attr:shape", aten's "linear.default" is "linear"."""
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.name.rpartition("::")[2]
    name: str = getattr(function, "__name__", str(function))
    owner = getattr(function, "__self__", None)
    if name in ("__get__", "__set__") and owner is not None:
        return f"attr:{getattr(owner, '__name__', '?')}"
    return name


def code_place() -> str:
    """Return the place of the torch call being handled, inside the module whose forward runs."""
    steps: list[str] = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if file == module_calls.__file__:
            break
        machinery = file.startswith(_OURS) or code.co_name == "__torch_function__"
        if not machinery and (code.co_name == "forward" or not file.startswith(_TORCH)):
            steps.append(_step(code, frame.f_lasti))
        frame = frame.f_back  # type: ignore[assignment]
    first = next((i for i in reversed(range(len(steps))) if steps[i].startswith("forward:")), len(steps) - 1)
    return ">".join(steps[first::-1])


@lru_cache(maxsize=65536)
def _step(code: CodeType, instruction: int) -> str:
    line, _, column, last = next(islice(code.co_positions(), instruction // 2, None))
    if line is None or column is None:  # Python runs without column information
        return f"{code.co_name}:{instruction}"
    return f"{code.co_name}:{line - code.co_firstlineno}:{column}-{last}"


@lru_cache(maxsize=4096)
def outer_stores(code: CodeType) -> tuple[str, ...]:
    """Return the variables of outer functions that a function rebinds."""
    if not code.co_freevars:
        return ()
    bound = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "STORE_DEREF"}
    return tuple(name for name in code.co_freevars if name in bound)


# Hash the source of a module's forward and of the functions on the paths to a plan's places: in an edited forward the
# same place may be another call. Wrappers are unwrapped; without source the compiled code is hashed.


_LENGTH = 16  # hexadecimal digits: enough to tell edits apart, short enough to read


def forward_code(kind: type[Any], places: Iterable[str]) -> str:
    """Return the hash for a class, given the places inside its forward; "" if there is no Python code to hash."""
    functions = list(_functions(kind, places))
    sources = [source_of(function) for function in functions]
    if not functions:
        return ""
    if all(source is not None for source in sources):
        return f"source:{_digest(map(str, sources))}"
    return f"compiled:{_digest(line for function in functions for line in _compiled(function.__code__))}"


def code_hash(code: CodeType) -> str:
    """Return a hash of compiled code that does not depend on its location."""
    return _digest(_compiled(code))[:8]


def same_code(one: str, other: str) -> bool:
    """Return whether two hashes agree. A hash of source and one of compiled code cannot be compared, and pass."""
    kinds = one.partition(":")[0], other.partition(":")[0]
    return one == other or "" in (one, other) or kinds[0] != kinds[1]


def _functions(kind: type[Any], places: Iterable[str]) -> Iterator[FunctionType]:
    """Yield the plain functions on the paths to these places, the forward first."""
    forward = plain_function(getattr(kind, "forward", None))
    if forward is None:
        return
    seen: dict[FunctionType, None] = {forward: None}
    for place in places:
        caller = forward
        for step in place.split(">")[1:]:
            name = step.partition(":")[0]
            below = plain_function(getattr(kind, name, None)) or plain_function(caller.__globals__.get(name))
            if below is None:  # a nested function, whose source is part of the outer one's, or a library's function
                break
            seen[below] = None
            caller = below
    yield from sorted(seen, key=lambda function: (function is not forward, function.__qualname__))


def plain_function(function: Any) -> FunctionType | None:
    """Return the Python function under all wrappers; None if there is none."""
    try:
        function = inspect.unwrap(function)
    except ValueError:  # wrapped in a circle
        return None
    function = getattr(function, "__func__", function)
    return function if isinstance(function, FunctionType) else None


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's code reads, in nested functions too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def source_of(function: FunctionType) -> str | None:
    """Return a function's source; None if there is none."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError, IndentationError):  # no file, or it has changed since
        return None


def _compiled(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _compiled(constant)
        elif not isinstance(constant, frozenset):  # its order is not stable
            yield repr(constant)


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(lines).encode()).hexdigest()[:_LENGTH]
