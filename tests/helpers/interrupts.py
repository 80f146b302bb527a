"""An exception at any line: run a function, raise at its n-th line inside autoplan, and look whether all is as it was.

`Snapshot` holds on to every object that it compares, so that no identity is used again, and knows nothing of how
autoplan itself puts a model back.
"""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.nn.modules import module as module_globals
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import autoplan
from autoplan.patches import patched

__all__ = ["Injected", "Snapshot", "choose_events", "fake_world", "interrupted_everywhere"]

_PACKAGE = str(Path(autoplan.__file__).parent) + "/"
_DEPTH = 6
_SECONDS = 120
_LONGEST = 1000


class Injected(Exception):
    """What is raised, where it is not a KeyboardInterrupt."""


@contextmanager
def fake_world(size: int) -> Iterator[None]:
    """A process group of one rank whose others are made up: collectives return at once."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------ raising at a line


@dataclass
class Lines:
    """The lines that a function runs inside autoplan, in order.

    At each that `stops` names the process is forked: in the copy an error is raised there, and what comes of it is
    looked at; the process itself goes on as if nothing were. One run so tries every line, each in the very state in
    which it stands.
    """

    stops: set[int] = field(default_factory=set)
    seen: list[tuple[str, int]] = field(default_factory=list)
    tried: int = 0
    copies: dict[int, int] = field(default_factory=dict)
    is_copy: bool = False

    def run(self, function: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            return function()
        finally:
            sys.settrace(before)

    def _enter(self, frame: Any, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(_PACKAGE) else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        if event == "line":
            self.seen.append((frame.f_code.co_filename, frame.f_lineno))
            # In a finalizer nothing can be raised: Python prints it and goes on.
            if len(self.seen) - 1 in self.stops and not _in_finalizer(frame):
                self._copy(frame)
        return self._line

    def _copy(self, frame: Any) -> None:
        """Fork; the copy raises, and ends once it was looked at."""
        self.tried += 1
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            if status:
                self.copies[len(self.seen) - 1] = os.waitstatus_to_exitcode(status)
            return
        self.is_copy = True
        signal.alarm(_SECONDS)  # a copy that waits for ever is ended
        error = KeyboardInterrupt if self.tried % 3 == 0 else Injected
        raise error(f"event {len(self.seen) - 1} at {frame.f_code.co_filename.removeprefix(_PACKAGE)}:{frame.f_lineno}")


def _in_finalizer(frame: Any) -> bool:
    """Whether the garbage collector called this, at a moment of its own."""
    while frame is not None:
        if frame.f_code.co_filename == weakref.__file__ and frame.f_code.co_name == "__call__":
            return True
        frame = frame.f_back
    return False


def choose_events(seen: list[tuple[str, int]], repeats: int, seed: int = 0) -> list[int]:
    """The first and the last run of every distinct line, and so many others."""
    first = {place: number for number, place in reversed(list(enumerate(seen)))}
    last = {place: number for number, place in enumerate(seen)}
    chosen = set(first.values()) | set(last.values())
    rest = [number for number in range(len(seen)) if number not in chosen]
    return sorted(chosen | set(random.Random(seed).sample(rest, min(repeats, len(rest)))))


def interrupted_everywhere(
    build: Callable[[], nn.Module],
    change: Callable[[nn.Module], Any],
    is_whole: Callable[[nn.Module], bool],
    choose: Callable[[list[tuple[str, int]]], list[int]],
) -> tuple[int, int, list[str]]:
    """Interrupt `change` at the chosen lines: how many there were, how often the model was whole all the same, and what
    was neither whole nor as it was. Every third interrupt is Ctrl-C."""
    change(build())  # whatever is imported or remembered at the first run
    probe, listed = build(), Lines()
    listed.run(lambda: change(probe))
    model = build()
    before = Snapshot.before(model)
    lines = Lines(set(choose(listed.seen)))
    with tempfile.TemporaryFile("a+") as report:

        def note(kind: str, text: str) -> None:
            report.write(f"{kind} {text[:_LONGEST]}\n".replace("\n", " ") + "\n")
            report.flush()

        try:
            lines.run(lambda: change(model))
        except BaseException as error:
            if not lines.is_copy:
                raise
            if not isinstance(error, Injected | KeyboardInterrupt):
                note("half", f"raised {type(error).__name__}: {error}")
            _look(before, model, is_whole, str(error), note)
        if lines.is_copy:  # the error was swallowed: all may be well
            _look(before, model, is_whole, "an error that did not come out", note)
        report.seek(0)
        notes = report.read().splitlines()
    problems = [one.removeprefix("half ") for one in notes if one.startswith("half ")]
    problems += [f"event {event}: the copy of the process ended with {code}" for event, code in lines.copies.items()]
    return lines.tried, sum(one.startswith("whole ") for one in notes), problems


def _look(
    before: Snapshot,
    model: nn.Module,
    is_whole: Callable[[nn.Module], bool],
    where: str,
    note: Callable[[str, str], None],
) -> NoReturn:
    """In a copy of the process: say what became of the model, and end."""
    code = 1
    try:
        apart = before.differences(Snapshot.of(model))
        if apart:
            note(*(("whole", where) if is_whole(model) else ("half", f"{where}: {'; '.join(apart[:3])}")))
        code = 0
    finally:
        os._exit(code)


# ------------------------------------------------------------------------------------------------ what a model is


@dataclass
class Snapshot:
    """Everything of a model by path, and the global state around it."""

    values: dict[str, Any] = field(default_factory=dict)
    kept: list[Any] = field(default_factory=list)

    @staticmethod
    def before(model: nn.Module) -> Snapshot:
        """Take a first snapshot, after models of earlier tests are collected: their patches end with them."""
        gc.collect()
        return Snapshot.of(model)

    @staticmethod
    def of(model: nn.Module) -> Snapshot:
        found = Snapshot()
        for path, module in model.named_modules(remove_duplicate=False):
            found._put(f"{path}:module", module)
            found.values[f"{path}:class"] = type(module)
            found.values[f"{path}:noted elsewhere"] = module in _module_state_mapping
            found._describe(f"{path}:", vars(module), _DEPTH)
        found._around()
        return found

    def differences(self, other: Snapshot) -> list[str]:
        """Paths at which two snapshots differ."""
        keys = [*self.values, *(key for key in other.values if key not in self.values)]
        missing = object()
        return [
            f"{key}: {self.values.get(key, 'absent')!r:.60} became {other.values.get(key, 'absent')!r:.60}"
            for key in keys
            if self.values.get(key, missing) != other.values.get(key, missing)
        ]

    def _put(self, path: str, thing: Any) -> None:
        self.kept.append(thing)
        self.values[path] = ("is", id(thing))

    def _describe(self, path: str, thing: Any, depth: int) -> None:
        if isinstance(thing, (int, float, str, bytes, bool, type(None), torch.dtype, torch.device)):
            self.values[path] = thing
            return
        self._put(path, thing)
        if isinstance(thing, torch.Tensor):
            self._tensor(path, thing, depth)
        elif isinstance(thing, dict):
            self.values[f"{path} keys"] = [str(key) for key in thing]
            for key, value in list(thing.items()) if depth else ():
                self._describe(f"{path}.{key}", value, depth - 1)
        elif isinstance(thing, (list, tuple)):
            self.values[f"{path} length"] = len(thing)
            for number, value in enumerate(thing if depth else ()):
                self._describe(f"{path}[{number}]", value, depth - 1)
        elif isinstance(thing, (set, frozenset)):
            self.values[f"{path} members"] = sorted(map(str, thing))
        elif depth and not isinstance(thing, (nn.Module, type)) and hasattr(thing, "__dict__"):
            self._describe(f"{path} attributes", vars(thing), depth - 1)

    def _tensor(self, path: str, tensor: torch.Tensor, depth: int) -> None:
        values = tensor.detach()
        self.values[f"{path} form"] = (type(tensor), tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.device)
        if type(values) in (torch.Tensor, nn.Parameter) and not values.is_meta:
            raw = values.contiguous().reshape(-1).view(torch.uint8) if values.numel() else values
            self.values[f"{path} bits"] = hashlib.sha1(raw.numpy().tobytes()).hexdigest()
            self.values[f"{path} memory"] = values.data_ptr()
        self.values[f"{path} trained"] = tensor.requires_grad
        if tensor.is_leaf:
            self._put(f"{path} gradient", tensor.grad)
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            self._describe(f"{path} {hooks}", getattr(tensor, hooks, None), 1)
        self._describe(f"{path} attributes", vars(tensor), min(depth, 2))

    def _around(self) -> None:
        self.values["default dtype"] = torch.get_default_dtype()
        self.values["random state"] = hashlib.sha1(torch.get_rng_state().numpy().tobytes()).hexdigest()
        self.values["gradients"] = torch.is_grad_enabled()
        self.values["function modes"] = len(_get_current_function_mode_stack())
        self.values["dispatch modes"] = len(_get_current_dispatch_mode_stack())
        self._put("optimizers", torch.optim.Optimizer.__init__)
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_parameter_registration_hooks"):
            self.values[name] = len(getattr(module_globals, name))
        self.values["patches"] = sorted(str(key) for key in patched._standing)
