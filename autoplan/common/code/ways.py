"""Record which ways a run takes through a model's own Python: functions entered and outcomes of branches.

A plan is proven for the code that ran; a sharded model compares (execute/guard/). `sys.settrace` follows frames of the
model's code alone (not the standard library, torch, or `Conventions.trusted`), is off while a torch function runs, and
yields to a debugger. Torch calls are recorded with their literals (forms.py): `h.softmax(dim)` needs no branch to be
another function.
"""

from __future__ import annotations

import dis
import linecache
import os
import sys
import sysconfig
import threading
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from inspect import CO_VARARGS
from itertools import groupby, takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoplan.common.code.code_place import code_hash
from autoplan.common.code.forms import form_of, form_of_given, unlike, without_repeats
from autoplan.common.conventions import conventions
from autoplan.values.plan import SeenCode

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
_SETTLED = frozenset({"torch", "numpy", "autoplan"})
_OURS, _TORCH = (f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], Path(torch.__file__).parent))
_PASSING = ("__torch_function__", "_call_impl")  # of ours, they hand a torch call on
_UNCONDITIONAL = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP", "JUMP_NO_INTERRUPT")
_FIRST_OF_HANDLER = "PUSH_EXC_INFO"
_MODULE_CALL = nn.Module._call_impl.__code__.co_filename
ENTRY = 0  # where no call stands: what a function is given is written down there

LiteralsSay = Callable[[str], str]
# By place and hash of the code, and by owner: in which module it ran, called from where. "": in all of them.
Key = tuple[str, str, str]
Ways = dict[Key, set[str]]
ROOT = "(root)"
_CALLS = 2  # places of calls that an owner tells


@dataclass(frozen=True, eq=False)
class CodeFacts:
    """What of a code object must be known while it runs.

    `starts`: where its instructions begin. `going_on`: for each branch the offsets at which code goes on that does not
    jump. `asking`: the branches that may depend on a number or on what a tensor holds. `loops`: the heads of its `for`
    loops. `stores`: attributes that it sets. `is_function`: it is the forward of a `torch.autograd.Function`.
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
        """Where the call begins that is being made: while a Python function runs, the offset stands behind it."""
        return self.starts[bisect_right(self.starts, offset) - 1]


_facts: dict[int, tuple[CodeType, CodeFacts | None]] = {}  # the code is kept, or its id would be another's


def facts_of(frame: FrameType) -> CodeFacts | None:
    """Those of a frame's code; None where it is not the model's."""
    code = frame.f_code
    known = _facts.get(id(code))
    if known is None:
        name = str(frame.f_globals.get("__name__", "?"))
        facts = None if is_settled(name) or code.co_filename.startswith("<frozen") else _read(code, name)
        known = _facts[id(code)] = (code, facts)
    return known[1]


def is_settled(module: str) -> bool:
    """Is it one whose code is not followed?"""
    top = module.partition(".")[0]
    trusted = top in _SETTLED or top in conventions().trusted or top.startswith("namedtuple_")
    return trusted or (top in sys.stdlib_module_names and top != "__main__" and _is_of_python(top))


@lru_cache(maxsize=512)
def _is_of_python(module: str) -> bool:
    """The standard library's own, and not a file of somebody's that has its name?"""
    file = getattr(sys.modules.get(module), "__file__", None)
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")}
    return file is None or any(Path(file).is_relative_to(folder) for folder in folders) and "site-packages" not in file


@lru_cache(maxsize=4096)
def _hands_on(code: CodeType) -> bool:
    """May a torch call of the model's own code come through this frame, unchanged?"""
    file = code.co_filename
    if file.startswith(f"{_TORCH}distributed{os.sep}"):  # FSDP2's hooks make calls of their own
        return False
    return file.startswith(_TORCH) or (file.startswith(_OURS) and code.co_name in _PASSING)


def has_own_code(model: nn.Module) -> bool:
    """Is there a class in it that is not one of torch or of a package that is trusted?"""
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    return any(not is_settled(kind.__module__) for kind in kinds - {object})


def _read(code: CodeType, module: str) -> CodeFacts:
    instructions = list(dis.get_instructions(code))
    going_on: dict[int, tuple[int, ...]] = {}
    asking, arguments = [], code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for number, one in enumerate(instructions):
        jumps = one.opcode in dis.hasjrel or one.opcode in dis.hasjabs
        if jumps and one.opname not in _UNCONDITIONAL:
            following = instructions[number + 1 : number + 2]
            if following and following[0].opname == "NOT_TAKEN":  # Python 3.14 writes down the way that goes on
                following = instructions[number + 1 : number + 3]
            going_on[one.offset] = tuple(other.offset for other in following)
            before = instructions[number - 1]
            told = before.opname.startswith("LOAD_ATTR") or before.argval in arguments  # a flag, or an attribute
            if "NONE" not in one.opname and one.opname != "FOR_ITER" and not told:
                asking.append(one.offset)
    return CodeFacts(
        code,
        f"{module}:{code.co_qualname}:{code.co_firstlineno}",
        f"{PYTHON}:{code_hash(code)}",
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


def is_module_call(code: CodeType) -> bool:
    """Is it torch's own call of a module?"""
    return code.co_name == "_call_impl" and code.co_filename == _MODULE_CALL


def source_line(code: CodeType, offset: int | None) -> str:
    """The line of an instruction, or the first of the function, as "file.py:88: if norm:"."""
    lines = [line for line, *_ in code.co_positions()]
    at = code.co_firstlineno if offset is None else lines[offset // 2] or code.co_firstlineno
    text = linecache.getline(code.co_filename, at).strip()
    return f"{code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{at}: {text or code.co_name}"


# -------------------------------------------------------------------------------------------------------- while it runs


class Tracer:
    """Follows frames of the model's code. `Recorder` and the guard of a sharded model say what comes of it."""

    def __init__(self) -> None:
        self.frames: dict[int, Follower] = {}
        self.names: dict[int, str] = {}

    def know(self, model: nn.Module) -> None:
        """Its modules will be told apart: what one of them does says nothing of another of its class."""
        self.names = {id(module): name or ROOT for name, module in model.named_modules()}

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """The trace function: called for each frame that begins."""
        facts = facts_of(frame)
        if facts is None:
            return self.on_module_call(frame) if is_module_call(frame.f_code) else None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        follower = self.frames[id(frame)] = Follower(self, facts, frame)
        above = frame.f_back
        caller = self.frames.get(id(above)) if above is not None else None
        first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        follower.owner = self.names.get(id(first), "" if caller is None else caller.owner)
        if caller is not None and above is not None and follower.owner.count(":") < _CALLS:
            follower.owner += f":{caller.facts.call_at(above.f_lasti)}"
        self.on_enter(follower, frame)
        if facts.is_function:  # called by `apply`, of which some versions of torch show a frame
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount + bool(frame.f_code.co_flags & CO_VARARGS)]
            self.on_function(follower, tuple(frame.f_locals[name] for name in names))
        elif caller is not None and above is not None:  # called directly: the place of the call chose the function
            way = f"{caller.facts.call_at(above.f_lasti)}>{facts.hash.rpartition(':')[2][:6]}"
            if way not in caller.known:
                self.on_way(follower, way)
        return follower.step

    def on_function(self, follower: Follower, given: tuple[Any, ...]) -> None:
        """A `torch.autograd.Function` begins: its backward may ask for any of its arguments."""

    def on_enter(self, follower: Follower, frame: FrameType) -> None:
        """A frame of the model's code begins."""

    def on_way(self, follower: Follower, way: str) -> None:
        """A frame goes a way that is not among those known of it; into it, where the way is a call."""

    def on_return(self, follower: Follower, frame: FrameType, value: Any) -> None:
        """It ends."""

    def on_module_call(self, frame: FrameType) -> Any:
        """torch calls a module. What is returned is its trace function."""

    def on_torch(self, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """A torch function was called. What is returned is what the code gets."""
        return result

    def on_planned(self, function: Any, args: Any, kwargs: Any) -> None:
        """The model's code made a torch call that the plan rewrites: with these arguments, before that."""

    def caller(self, frame: FrameType | None) -> Follower | None:
        """Whose torch call it is that is being made: the model's own code, with nothing but torch in between."""
        while frame is not None:
            follower = self.frames.get(id(frame))
            if follower is not None:
                return follower
            if not _hands_on(frame.f_code):
                return None
            frame = frame.f_back
        return None


class Follower:
    """One running frame. `known`: the ways of its code, for its owner, of which nothing more need be said.

    Ways are "12+" and "12-" (a branch goes on, or jumps), "12++" (a loop begins a second round: what its body is given
    was computed by the round before), "12" (an error is handled), "12>c0ffee" (a function is called),
    "12=softmax(T3,-1)" (a torch function is).
    """

    __slots__ = ("before", "earlier", "facts", "frame", "known", "owner", "strays", "touched", "tracer")

    def __init__(self, tracer: Tracer, facts: CodeFacts, frame: FrameType) -> None:
        self.tracer, self.facts, self.frame = tracer, facts, frame
        self.before = self.earlier = -1
        self.known: set[str] = set()
        self.owner = ""
        self.touched = False
        self.strays: list[str] = []

    def step(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode":
            at, before, earlier = frame.f_lasti, self.before, self.earlier
            self.before, self.earlier = at, before
            going_on = self.facts.going_on.get(before)
            if going_on is not None:
                way = f"{before}+" if at in going_on else f"{before}-"
                if way not in self.known:
                    self.tracer.on_way(self, way)
                if earlier > before and at in going_on and before in self.facts.loops:
                    way = f"{before}++"
                    if way not in self.known:
                        self.tracer.on_way(self, way)
            if at in self.facts.handlers and str(at) not in self.known:
                self.tracer.on_way(self, str(at))
        elif event == "return":
            self.tracer.on_return(self, frame, arg)
            self.tracer.frames.pop(id(frame), None)
        return self.step


_setting = threading.Lock()


def follow(trace: Any) -> None:
    """Set the trace function of this thread. Python refuses while another thread sets one of its own."""
    with _setting:
        sys.settrace(trace)


class Paused(TorchFunctionMode):
    """No trace while a torch function runs."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # a function that the model compiles takes the mode along
            return func(*args, **(kwargs or {}))
        traced = sys.gettrace() is not None
        follow(None)
        try:
            result = func(*args, **(kwargs or {}))
            return self.tracer.on_torch(func, args, kwargs or {}, result)
        finally:
            if traced:
                follow(self.tracer.enter)


@contextmanager
def tracing(tracer: Tracer | None) -> Iterator[bool]:
    """Follow what this thread runs. False, and nothing is followed, where it has a trace function already."""
    if tracer is None or sys.gettrace() is not None:
        yield False
        return
    mode = Paused(tracer)
    with mode:
        follow(tracer.enter)
        _listening.running = tracer
        try:
            yield True
        finally:
            follow(None)
            _listening.running = None


@contextmanager
def uncompared() -> Iterator[None]:
    """What runs here is held against nothing: its ways are not written down."""
    recorder = _listening.running
    before = {key: set(ways) for key, ways in recorder.ways.items()} if isinstance(recorder, Recorder) else {}
    try:
        yield
    finally:
        if isinstance(recorder, Recorder):
            recorder.ways.clear()
            recorder.ways.update(before)


# ------------------------------------------------------------------------------------------------------------- recorded


class Recorder(Tracer):
    """Writes every way down. `literals_say`: as ops/questions.py answers it."""

    def __init__(self, literals_say: LiteralsSay) -> None:
        super().__init__()
        self.literals_say = literals_say
        self.ways: Ways = {}

    def on_enter(self, follower: Follower, frame: FrameType) -> None:
        follower.known = self._of(follower, follower.owner)
        self._of(follower, "")

    def _of(self, follower: Follower, owner: str) -> set[str]:
        return self.ways.setdefault((follower.facts.place, follower.facts.hash, owner), set())

    def _add(self, follower: Follower, way: str) -> None:
        follower.known.add(way)
        self._of(follower, "").add(way)

    def on_way(self, follower: Follower, way: str) -> None:
        above = follower.frame.f_back
        self._add(self.frames[id(above)] if ">" in way and above is not None else follower, way)

    def on_torch(self, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        self._note(function, args, kwargs)
        return result

    def on_planned(self, function: Any, args: Any, kwargs: Any) -> None:
        self._note(function, args, kwargs)

    def on_function(self, follower: Follower, given: tuple[Any, ...]) -> None:
        self._add(follower, f"{ENTRY}={form_of_given(given)}")

    def _note(self, function: Any, args: Any, kwargs: Any) -> None:
        caller = self.caller(sys._getframe(3))
        if caller is not None and (form := form_of(self.literals_say, function, args, kwargs)):
            self._add(caller, f"{caller.facts.call_at(caller.frame.f_lasti)}={form}")

    def forget(self) -> None:
        """Begin anew."""
        self.ways, self.frames = {}, {}


class _Listening(threading.local):
    recorder: Recorder | None = None
    running: Tracer | None = None


_listening = _Listening()


@contextmanager
def recording(model: nn.Module, literals_say: LiteralsSay) -> Iterator[Recorder]:
    """What `record` (capture/recorder.py) runs in this thread meanwhile is written down, the last recording alone."""
    before, recorder = _listening.recorder, Recorder(literals_say)
    _listening.recorder = recorder if has_own_code(model) else None
    try:
        yield recorder
    finally:
        _listening.recorder = before


def listener() -> Recorder | None:
    """Who wants to know what this thread records."""
    return _listening.recorder


def running() -> Tracer | None:
    """Who follows what this thread runs."""
    return _listening.running


def set_running(tracer: Tracer | None) -> None:
    """A tracer begins to follow this thread, or ends."""
    _listening.running = tracer


def seen_code(ways: Ways) -> tuple[SeenCode, ...]:
    """As a plan holds it. Owners that went all ways of their code are not told of."""
    found: list[SeenCode] = []
    for code, group in groupby(sorted(ways), key=lambda key: key[:2]):
        keys = list(group)
        union = set().union(*(ways[key] for key in keys))
        every = _written(union)
        owners: dict[str, tuple[str, ...]] = {every: ()}
        for key in keys:
            taken = every if ways[key] == union else _written(ways[key])
            if key[2] and taken != every:
                owners[taken] = (*owners.get(taken, ()), key[2])
        found += (SeenCode(code[0], code[1], taken, names) for taken, names in owners.items())
    return tuple(found)


def _written(ways: set[str]) -> str:
    return " ".join(sorted(without_repeats(ways), key=_in_order))


def _in_order(way: str) -> tuple[int, str]:
    number = "".join(takewhile(str.isdigit, way))
    return int(number), way


def ways_of(paths: Iterable[SeenCode]) -> Ways:
    """The inverse."""
    return {(path.place, path.code, owner): set(path.ways.split()) for path in paths for owner in path.owners or ("",)}


def added(ways: Ways, more: Ways) -> Ways:
    """Both."""
    return {key: ways.get(key_in(ways, *key), set()) | more.get(key, set()) for key in (*ways, *more)}


def key_in(ways: Collection[Key], place: str, code: str, owner: str) -> Key:
    """Under which the ways of an owner are known: one that is not told of goes all ways of the code."""
    own = place, code, owner
    return own if own in ways else (place, code, "")


def others_of(ways: Ways, known: Ways) -> Ways:
    """Those that are not known."""
    left = {key: unlike(found, known.get(key, set())) for key, found in ways.items()}
    return {key: found for key, found in left.items() if found or key not in known}
