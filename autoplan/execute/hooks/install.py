"""The plan's work at the boundaries of modules, as one pre-hook and one post-hook per module.

A hook changes tensors by path, the same on every call: activation checkpointing may run a module again. Inside the
hooks torch functions are hidden from function modes, whose counters they would shift.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import autoplan.execute.hooks.boundaries
import autoplan.execute.hooks.halo

# These files register one executor for each class of instruction.
import autoplan.execute.hooks.reductions
import autoplan.execute.hooks.sequence
import autoplan.execute.vocabulary.leaving  # noqa: F401
from autoplan.common.errors import PlanMismatchError
from autoplan.common.nested import (
    Change,
    Noted,
    Path,
    change_at,
    change_input,
    is_other_form,
    other_forms,
    put_back,
    signature_names,
)
from autoplan.common.torch_internals import (
    DisableTorchFunction,
    forward_hooks,
    leave_out_of_graphs,
    runs_compiled,
    take_into_graphs,
)
from autoplan.execute.executors import Around, At, Running, copied_with_closure, execute, unwatched
from autoplan.execute.guard.marks import as_given, looking_on
from autoplan.execute.hooks.function_mode import ModuleMode, PlannedCalls
from autoplan.values import (
    AroundModule,
    AttendAcross,
    Boundary,
    CallOverPositions,
    CallRewrite,
    Instruction,
    NoteShard,
    OwnPositions,
    ReduceScatterCall,
    ReduceScatterSequence,
    SequenceBoundary,
)

_AFTER = 10  # turns; moves an instruction behind all others


@dataclass
class ModuleWork:
    """The instructions of the plan for one module."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)
    framed: bool = False
    random: str = ""  # "split", "whole" or ""
    holds: bool = False  # its code may read parameters in lists and closures, which are no local tensors

    def of(self, kind: type[Any] | tuple[type[Any], ...]) -> list[Any]:
        return [instruction for instruction in self.instructions if isinstance(instruction, kind)]

    @property
    def communicates(self) -> bool:
        """Return whether other ranks need anything from this module."""
        return any(instruction.communicates for instruction in self.instructions)


def install(module: nn.Module, work: ModuleWork, running: Running) -> Worker:
    """Install the hooks that do the work of one module."""
    worker = Worker(module, work, running)
    worker.handles = listen(module, worker)
    if worker.calls is not None:  # whose places compiled code does not tell
        leave_out_of_graphs(module)
    return worker


def listen(module: nn.Module, worker: Worker) -> list[RemovableHandle]:
    """Register a worker's hooks on a module."""
    handles = [module.register_forward_pre_hook(worker.before, with_kwargs=True)]
    # prepended, so that other hooks (transformers collects hidden states) see the output after our all-reduces
    handles.append(module.register_forward_hook(worker.after, prepend=True, with_kwargs=True))
    if worker.needs_cleanup:
        handles.append(module.register_forward_hook(worker.clean_up, with_kwargs=True, always_call=True))
    return handles


def moved_inside(module: nn.Module) -> str:
    """Return the name of a module inside (or this one) at which the plan moves positions of a sequence; "" if none."""
    hooks = (hook for inner in module.modules() for hooks in forward_hooks(inner) for hook in hooks.values())
    workers = (worker for hook in hooks if isinstance(worker := getattr(hook, "__self__", None), Worker))
    moving = (SequenceBoundary, AttendAcross, CallOverPositions, ReduceScatterCall)
    moves = (w.work.name for w in workers for i in w.work.of(moving) if not isinstance(i, NoteShard))
    return next(moves, "")


def keep_order(module: nn.Module) -> None:
    """Store the hooks of a module in the order in which they run: `prepend` moves a key to the front of an OrderedDict,
    but code that torch 2.11 compiles finds hooks by their position in the underlying dict, where nothing moved."""
    for hooks in forward_hooks(module):
        items = list(hooks.items())
        hooks.clear()
        hooks.update(items)


class Hooks:
    """Hooks of a module; those of a copied model have closures that refer to the copy."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update({name: copied_with_closure(value, memo) for name, value in vars(self).items()})
        return copied


class Worker(Hooks):
    """The hooks of one module, with all that they do before and after it runs."""

    def __init__(self, module: nn.Module, work: ModuleWork, running: Running) -> None:
        self.module, self.work, self.running = module, work, running
        at = At(module, work.name, signature_names(module), running)
        boundaries: list[Boundary] = work.of(Boundary)
        around = [(instruction.turn, execute(instruction, at)) for instruction in work.of(AroundModule)]
        paths = [boundary.path for boundary in boundaries if boundary.side == "output"]
        steps = [(_turn_of(boundary), _at_boundary(boundary, at, paths)) for boundary in boundaries] + around
        self.entering = [step.enter for _, step in steps if step.enter is not None]
        self.leaving = [step.leave for _, step in sorted(steps, key=lambda step: step[0]) if step.leave is not None]
        self.beginning = [step.begin for _, step in steps if step.begin is not None]
        self.ending = [step.end for _, step in steps if step.end is not None]
        self.kept = [step.kept for _, step in steps if step.kept is not None]
        calls: list[CallRewrite] = work.of(CallRewrite)
        self.calls = PlannedCalls(calls, at) if calls or work.holds else None
        self.entered: list[ModuleMode] = []
        self.opened: list[bool] = []
        self.handles: list[RemovableHandle] = []

    def stop(self) -> None:
        """Remove the worker's hooks from its module."""
        for handle in self.handles:
            handle.remove()
        self.handles = []
        if self.calls is not None:
            take_into_graphs(self.module)

    @property
    def needs_cleanup(self) -> bool:
        return bool(self.calls or self.work.framed or self.work.random or self.beginning or self.ending)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self.running.runs_whole:
            return args, kwargs
        if self.calls is not None and runs_compiled(module):
            raise PlanMismatchError(
                f"{self.work.name or 'the model'} is compiled, and the plan rewrites calls in its code, which compiled "
                "code does not show",
                hint="compile the model, or a block around that module: both leave it out, and it runs as it is",
            )
        return unwatched(self._before, args, kwargs)

    def _before(self, args: Any, kwargs: Any) -> Any:
        if self.entering:
            with DisableTorchFunction():
                for enter in self.entering:
                    args, kwargs = enter(args, kwargs)
        if self.needs_cleanup:
            self._open()
        return args, kwargs

    def _open(self) -> None:
        running = self.running
        switched = bool(self.work.random) and (running.draws or not torch.compiler.is_compiling())
        if switched and running.may_draw(self.module):
            with DisableTorchFunction():
                split = self.work.random == "split"
                (running.randomness.enter_split if split else running.randomness.enter_whole)()
            self.opened.append(True)
        else:
            self.opened.append(False)
        running.frames.append(self.work.name)
        for begin in self.beginning:
            begin()
        if self.calls is not None:
            mode = ModuleMode(self.calls)
            mode.__enter__()
            self.entered.append(mode)

    def after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return output if self.running.runs_whole else unwatched(self._after, output)

    def _after(self, output: Any) -> Any:
        with DisableTorchFunction():
            for leave in self.leaving:
                output = leave(output)
        return output

    def clean_up(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.opened:
            unwatched(self._close, output)

    def _close(self, output: Any) -> None:
        if self.calls is not None:
            mode = self.entered.pop()
            mode.__exit__(None, None, None)
            if output is not None:  # the module did not raise
                mode.check_reached()
        self.running.frames.pop()
        for end in self.ending:
            end(output is None)
        if self.opened.pop():
            with DisableTorchFunction():
                split = self.work.random == "split"
                (self.running.randomness.leave_split if split else self.running.randomness.leave_whole)()


def _turn_of(planned: Boundary) -> int:
    """Return the turn of a boundary. With another split, what leaves fewer positions comes first, and all other moves
    along the sequence come after that split's work."""
    if not (isinstance(planned, SequenceBoundary) and planned.over):
        return planned.turn
    fewer = isinstance(planned, ReduceScatterSequence | OwnPositions) and planned.side == "output"
    return -_AFTER if fewer else planned.turn + _AFTER


def _at_boundary(planned: Boundary, at: At, outputs: Iterable[Path]) -> Around:
    """Wrap the executor of one tensor as a function of all that a module takes or returns."""
    done, path, names, where = execute(planned, at), planned.path, at.names, at.where
    if isinstance(done, Around):
        return done

    def change(x: torch.Tensor) -> Any:
        result = done(x)
        return result if torch.compiler.is_compiling() or looking_on() is None else as_given(planned, result, x)

    if planned.side == "input" and len(path) == 1:
        return Around(enter=lambda args, kwargs: change_input(args, kwargs, names, path, change, where))
    if planned.side == "input":  # a dict belongs to the caller, who reads it again after the module
        noted: Noted = []

        def at_path(value: Any, path: Path, change: Change, where: str) -> Any:
            return change_at(value, path, change, where, noted)

        def leave(output: Any) -> Any:
            put_back(noted)
            return output

        return Around(lambda args, kwargs: change_input(args, kwargs, names, path, change, where, at=at_path), leave)
    others = other_forms(path, {*outputs, *(at.running.outputs if at.name == "" else ())})
    return Around(leave=lambda x: x if is_other_form(x, path, others) else change_at(x, path, change, where))
