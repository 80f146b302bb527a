"""Facts about code: the name of a torch call by its path through the source, so that it is recognised on every run,
hashes of functions, and the branches of one.

"forward:12:8-30>repeat_kv:3:20-41" is the call in columns 20 to 41 of the third line of `repeat_kv`, called from line
twelve of `forward`. Counting calls would not do: runs with a cache, a mask or more rounds have more or fewer of them.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import os
import sys
import sysconfig
import textwrap
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.nn.modules.module as module_calls

from autoplan.common.conventions import conventions
from autoplan.common.torch_internals import schema_of

_OP = type(torch.ops.aten.add.Tensor)
_OURS = str(Path(__file__).resolve().parents[2]) + os.sep  # the package
_TORCH = os.path.dirname(os.path.dirname(os.path.dirname(module_calls.__file__))) + os.sep  # module.py is in nn/modules


def call_name(function: Any) -> str:
    """Return the name of a torch function: a property getter is "attr:shape", aten's "linear.default" is "linear"."""
    if isinstance(function, _OP):
        return schema_of(function).name.rpartition("::")[2]
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


def same_code(code: str, other: str) -> bool:
    """Return whether two hashes agree. A hash of source and one of compiled code cannot be compared, and pass."""
    kinds = code.partition(":")[0], other.partition(":")[0]
    return code == other or "" in (code, other) or kinds[0] != kinds[1]


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
    code = inspect.unwrap(function).__code__
    return _source(code, code.co_filename)


def nodes_of(function: Any) -> Iterator[ast.AST]:
    """Yield all parts of the code of a function; none if it has no source (made at run time, or by decorators)."""
    with suppress(OSError, TypeError, SyntaxError, ValueError):
        yield from ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function))))


@cache
def _source(code: CodeType, file: str) -> str | None:
    """Read source once, though a file is looked for anew each time. `file`: codes of two files may be equal."""
    try:
        return textwrap.dedent(inspect.getsource(code))
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


# Facts about the code that a run enters: where it branches, and what it sets.

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
_SETTLED = frozenset({"torch", "numpy", "autoplan"})
_UNCONDITIONAL = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP", "JUMP_NO_INTERRUPT")
_FIRST_OF_HANDLER = "PUSH_EXC_INFO"


@dataclass(frozen=True, eq=False)
class CodeFacts:
    """Facts about a code object that are needed while it runs.

    `starts`: offsets of its instructions. `going_on`: for each branch, the offsets at which code that does not jump
    goes on. `asking`: branches that may depend on a number or on a tensor's values. `loops`: heads of its `for` loops.
    `stores`: attributes that it sets. `is_function`: it is the forward of a `torch.autograd.Function`.
    """

    code: CodeType
    place: str
    hash: str
    starts: tuple[int, ...]
    going_on: dict[int, tuple[int, ...]]
    asking: tuple[int, ...]
    loops: frozenset[int]
    handlers: frozenset[int]
    stores: tuple[str, ...]
    is_function: bool

    def call_at(self, offset: int) -> int:
        """Return where the running call begins: while a Python function runs, the offset is behind the call."""
        return self.starts[bisect_right(self.starts, offset) - 1]


_facts: dict[int, tuple[CodeType, CodeFacts | None]] = {}  # the code is kept alive so that its id stays valid


def facts_of(frame: FrameType) -> CodeFacts | None:
    """Return the facts of a frame's code; None if it is not the model's."""
    code = frame.f_code
    entry = _facts.get(id(code))
    if entry is None:
        name = str(frame.f_globals.get("__name__", "?"))
        followed = not is_settled(name) and not code.co_filename.startswith("<frozen")
        facts = _read(code, _imported_as(name, frame.f_globals)) if followed else None
        entry = _facts[id(code)] = (code, facts)
    return entry[1]


def _imported_as(name: str, variables: Mapping[str, Any]) -> str:
    """Return the name by which others import a script that is run, or that a started process runs again."""
    if name not in ("__main__", "__mp_main__") or "__file__" not in variables:
        return name
    spec = variables.get("__spec__")
    return Path(variables["__file__"]).stem if spec is None else str(spec.name)


def is_settled(module: str) -> bool:
    """Return whether the code of a Python module is not followed."""
    top = module.partition(".")[0]
    trusted = top in _SETTLED or top in conventions().trusted or top.startswith("namedtuple_")
    return trusted or (top in sys.stdlib_module_names and top != "__main__" and _is_of_python(top))


@lru_cache(maxsize=512)
def _is_of_python(module: str) -> bool:
    """Return whether a module is the standard library's own, and not a user's file of the same name."""
    file = getattr(sys.modules.get(module), "__file__", None)
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return file is None or any(Path(file).is_relative_to(folder) for folder in folders) and "site-packages" not in file


def _read(code: CodeType, module: str) -> CodeFacts:
    instructions = list(dis.get_instructions(code))
    going_on: dict[int, tuple[int, ...]] = {}
    asking, arguments = [], code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for number, op in enumerate(instructions):
        jumps = op.opcode in dis.hasjrel or op.opcode in dis.hasjabs
        if jumps and op.opname not in _UNCONDITIONAL:
            following = instructions[number + 1 : number + 2]
            if following and following[0].opname == "NOT_TAKEN":  # Python 3.14 marks the branch not taken
                following = instructions[number + 1 : number + 3]
            going_on[op.offset] = tuple(other.offset for other in following)
            before = instructions[number - 1]
            plain = before.opname.startswith("LOAD_ATTR") or before.argval in arguments  # a flag, or an attribute
            if "NONE" not in op.opname and op.opname != "FOR_ITER" and not plain:
                asking.append(op.offset)
    return CodeFacts(
        code,
        f"{module}:{code.co_qualname}" + (f":{code.co_firstlineno}" if "<" in code.co_qualname else ""),
        f"{PYTHON}:{_digest(_compiled(code))[:8]}",
        tuple(instruction.offset for instruction in instructions),
        going_on,
        tuple(asking),
        frozenset(instruction.offset for instruction in instructions if instruction.opname == "FOR_ITER"),
        frozenset(instruction.offset for instruction in instructions if instruction.opname == _FIRST_OF_HANDLER),
        tuple(dict.fromkeys(instruction.argval for instruction in instructions if instruction.opname == "STORE_ATTR")),
        any(getattr(kind.forward, "__code__", None) is code for kind in _subclasses(torch.autograd.Function)),
    )


def _subclasses(kind: Any) -> Iterator[Any]:
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)
