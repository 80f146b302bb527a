"""Record the ways that a run takes through a model's own Python: functions entered and outcomes of branches.

A plan is proven for the code that ran; a sharded model compares (execute/guard/). `sys.settrace` follows frames of the
model's code alone (not the standard library, torch, or `Conventions.trusted`), is off while a torch function runs, and
yields to a debugger. Torch calls are recorded with their literals (forms.py): `h.softmax(dim)` may become another
function without any branch.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from inspect import CO_VARARGS
from itertools import groupby, takewhile
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoplan.common.code.code_place import CodeFacts, facts_of, is_settled
from autoplan.common.code.forms import form_of, form_of_given, unlike, without_repeats
from autoplan.values.plan import SeenCode

_OURS, _TORCH = (f"{folder}{os.sep}" for folder in (Path(__file__).parents[2], Path(torch.__file__).parent))
_PASSING = ("__torch_function__", "_call_impl")  # functions of autoplan that pass a torch call on
_MODULE_CALL = nn.Module._call_impl.__code__.co_filename
ENTRY = 0  # no call is at this offset: the arguments of an autograd function are recorded there

LiteralsSay = Callable[[str], str]
# Place and hash of the code, and the owner: the module in which it ran, and its callers. "": all owners.
Key = tuple[str, str, str]
Ways = dict[Key, set[str]]
ROOT = "(root)"
_CALLS = 2  # most callers in an owner


@lru_cache(maxsize=4096)
def _hands_on(code: CodeType) -> bool:
    """Return whether a torch call of the model's own code may pass through this frame unchanged."""
    file = code.co_filename
    if file.startswith(f"{_TORCH}distributed{os.sep}"):  # FSDP2's hooks make their own torch calls
        return False
    return file.startswith(_TORCH) or (file.startswith(_OURS) and code.co_name in _PASSING)


def has_own_code(model: nn.Module) -> bool:
    """Return whether a model has a class that is not from torch or a trusted package."""
    kinds = {kind for part in model.modules() for kind in type(part).__mro__}
    return any(not is_settled(kind.__module__) for kind in kinds - {object})


def is_module_call(code: CodeType) -> bool:
    """Return whether it is torch's own code that calls a module."""
    return code.co_name == "_call_impl" and code.co_filename == _MODULE_CALL


def source_line(code: CodeType, offset: int | None) -> str:
    """Return the line of an instruction, or the first of the function, as "file.py:88: if norm:"."""
    lines = [line for line, *_ in code.co_positions()]
    at = code.co_firstlineno if offset is None else lines[offset // 2] or code.co_firstlineno
    text = linecache.getline(code.co_filename, at).strip()
    return f"{code.co_filename.replace(chr(92), '/').rpartition('/')[2]}:{at}: {text or code.co_name}"


# Follow running frames


class Tracer:
    """Follows frames of the model's code. `Recorder` and the guard of a sharded model act on what it reports."""

    def __init__(self) -> None:
        self.frames: dict[int, Follower] = {}
        self.names: dict[int, str] = {}

    def know(self, model: nn.Module) -> None:
        """Register the names of a model's modules, since modules of one class may take different ways."""
        self.names = {id(module): name or ROOT for name, module in model.named_modules()}

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Follow a frame that begins, if it is the model's. (This is the trace function.)"""
        facts = facts_of(frame)
        if facts is None:
            return self.on_module_call(frame) if is_module_call(frame.f_code) else None
        if self._imports(frame):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        follower = self.frames[id(frame)] = Follower(self, facts, frame)
        above = frame.f_back
        caller = self.frames.get(id(above)) if above is not None else None
        first = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_argcount else None
        follower.owner = self.names.get(id(first), "" if caller is None else caller.owner)
        if caller is not None and above is not None and follower.owner.count(":") < _CALLS:
            follower.owner += f":{caller.facts.call_at(above.f_lasti)}"
        self.on_enter(follower, frame)
        if facts.is_function:  # called by `apply`, which has a frame in some versions of torch
            names = frame.f_code.co_varnames[: frame.f_code.co_argcount + bool(frame.f_code.co_flags & CO_VARARGS)]
            self.on_function(follower, tuple(frame.f_locals[name] for name in names))
        elif caller is not None and above is not None:  # called directly: the calling code chose the function
            way = f"{caller.facts.call_at(above.f_lasti)}>{facts.hash.rpartition(':')[2][:6]}"
            if way not in caller.known:
                self.on_way(follower, way)
        return follower.step

    def _imports(self, frame: FrameType) -> bool:
        """Return whether an import in the model's code runs the frame: once in a process, and not at the same call in
        each."""
        above = frame.f_back
        while above is not None and id(above) not in self.frames:
            if is_module_call(above.f_code) or above.f_code.co_filename.startswith(_OURS):
                return False  # what began this: all of it may run in an import
            if above.f_globals.get("__name__") == "importlib._bootstrap":
                return True
            above = above.f_back
        return False

    def on_function(self, follower: Follower, given: tuple[Any, ...]) -> None:
        """Called when a `torch.autograd.Function` begins: its backward may use any of its arguments."""

    def on_enter(self, follower: Follower, frame: FrameType) -> None:
        """Called when a frame of the model's code begins."""

    def on_way(self, follower: Follower, way: str) -> None:
        """Called when a frame takes a way that is not among its known ones; for a call, with the frame called."""

    def on_return(self, follower: Follower, frame: FrameType, value: Any) -> None:
        """Called when a frame ends."""

    def on_module_call(self, frame: FrameType) -> Any:
        """Called when torch calls a module. Return the trace function of that frame."""

    def on_torch(self, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Called after a torch function. Return what its caller gets."""
        return result

    def on_planned(self, function: Any, args: Any, kwargs: Any) -> None:
        """Called when the model's code makes a torch call that the plan rewrites, with the original arguments."""

    def caller(self, frame: FrameType | None) -> Follower | None:
        """Return the model's frame that makes the current torch call, with nothing but torch in between; else None."""
        while frame is not None:
            follower = self.frames.get(id(frame))
            if follower is not None:
                return follower
            if not _hands_on(frame.f_code):
                return None
            frame = frame.f_back
        return None


class Follower:
    """One running frame. `known`: ways of its code, for its owner, that need no report.

    Ways are "12+" and "12-" (a branch goes on, or jumps), "12++" (a loop begins a second round, on what the first one
    computed), "12" (an error is handled), "12>c0ffee" (a function is called), "12=softmax(T3,-1)" (a torch function
    is).
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
    """Set the trace function of this thread. The lock is for Python, which refuses while another thread sets one."""
    with _setting:
        sys.settrace(trace)


class Paused(TorchFunctionMode):
    """Turns tracing off while a torch function runs."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():  # the mode is also active in functions that the model compiles
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
    """Follow what this thread runs. Yield False, and follow nothing, if it has a trace function already."""
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
    """Discard the ways recorded inside: nothing is compared with them."""
    recorder = _listening.running
    before = {key: set(ways) for key, ways in recorder.ways.items()} if isinstance(recorder, Recorder) else {}
    try:
        yield
    finally:
        if isinstance(recorder, Recorder):
            recorder.ways.clear()
            recorder.ways.update(before)


# Record ways


class Recorder(Tracer):
    """Records every way. `literals_say`: see ops/elementwise.py."""

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
        """Start again with no ways."""
        self.ways, self.frames = {}, {}


class _Listening(threading.local):
    recorder: Recorder | None = None
    running: Tracer | None = None


_listening = _Listening()


@contextmanager
def recording(model: nn.Module, literals_say: LiteralsSay) -> Iterator[Recorder]:
    """Record the ways of what `record` (capture/recorder.py) runs in this thread, of the last recording only."""
    before, recorder = _listening.recorder, Recorder(literals_say)
    _listening.recorder = recorder if has_own_code(model) else None
    try:
        yield recorder
    finally:
        _listening.recorder = before


def listener() -> Recorder | None:
    """Return the recorder of what this thread records, if any."""
    return _listening.recorder


def running() -> Tracer | None:
    """Return the tracer that follows this thread, if any."""
    return _listening.running


def set_running(tracer: Tracer | None) -> None:
    """Register the tracer that follows this thread; None when it ends."""
    _listening.running = tracer


def seen_code(ways: Ways) -> tuple[SeenCode, ...]:
    """Return the ways as a plan holds them. Owners that took all ways of their code are left out."""
    code_seen: list[SeenCode] = []
    for code, group in groupby(sorted(ways), key=lambda key: key[:2]):
        keys = list(group)
        union = set().union(*(ways[key] for key in keys))
        every = _written(union)
        owners: dict[str, tuple[str, ...]] = {every: ()}
        for key in keys:
            taken = every if ways[key] == union else _written(ways[key])
            if key[2] and taken != every:
                owners[taken] = (*owners.get(taken, ()), key[2])
        code_seen += (SeenCode(code[0], code[1], taken, names) for taken, names in owners.items())
    return tuple(code_seen)


def _written(ways: set[str]) -> str:
    return " ".join(sorted(without_repeats(ways), key=lambda way: (int("".join(takewhile(str.isdigit, way))), way)))


def ways_of(paths: Iterable[SeenCode]) -> Ways:
    """Return the ways that a plan holds; the inverse of `seen_code`. Older plans add a line to every place."""
    ways: Ways = {}
    for path in paths:
        for owner in path.owners or ("",):
            place = path.place if "<" in path.place else re.sub(r":\d+$", "", path.place)
            key = place, path.code, owner
            ways.setdefault(key, set()).update(path.ways.split())
    return ways


def added(ways: Ways, more: Ways) -> Ways:
    """Return the union of two sets of ways."""
    return {key: ways.get(key_in(ways, *key), set()) | more.get(key, set()) for key in (*ways, *more)}


def key_in(ways: Collection[Key], place: str, code: str, owner: str) -> Key:
    """Return the key for the ways of an owner: one that is left out took all ways of the code."""
    own = place, code, owner
    return own if own in ways else (place, code, "")


def others_of(ways: Ways, seen: Ways) -> Ways:
    """Return the ways that are not known."""
    left = {key: unlike(taken, seen.get(key, set())) for key, taken in ways.items()}
    return {key: taken for key, taken in left.items() if taken or key not in seen}
