"""The scoped function mode: for the few torch calls of a module that neither hooks nor stored integers can fix.

It is entered in the owning module's forward only, and acts on that module's own calls, not on its children's. A call is
identified by its function and its place in the code. Whatever does not fit (another literal than planned, a planned sum
that was never reached) is an error, never a guess.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from autoplan.common.code.code_place import call_name, code_place
from autoplan.common.code.ways import running
from autoplan.common.errors import PlanMismatchError
from autoplan.common.layout import Layout
from autoplan.common.torch_internals import own_parameters
from autoplan.execute.collectives import copy_to_ranks, take_rows
from autoplan.execute.executors import At, execute, other_branch
from autoplan.execute.guard.marks import as_given, looking_on
from autoplan.execute.hooks.sequence import positions_of_a_rank
from autoplan.execute.parameters.held import memory_of, record_of
from autoplan.patches.kernels import KERNEL_GUARDS, OptionalKernel, eager_code, optional_kernels
from autoplan.patches.patched import Alone, Hold, Place, hold
from autoplan.values import AttendAcross, CallRewrite, CallSite, Cut, LengthArgument

Path = tuple[Any, ...]


class _PlannedCall:
    """One rewritten call, with all that can be computed before it runs."""

    def __init__(self, planned: CallRewrite, at: At) -> None:
        at = replace(at, over=planned.over)
        rank, size = at.group.rank, at.group.size
        self.planned, self.site, self.at = planned, planned.site, at
        self.literals = [(number.path, number.passed[rank], number.wanted[rank]) for number in planned.arguments]
        self.cuts = [(cut, Layout.parse(cut.layout).rows(rank, size), Layout.parse(cut.layout).size)
                     for cut in planned.cuts]  # fmt: skip
        self.run: Callable[[Any, Any, Any], Any] = execute(planned, at)
        self.inner: _PlannedCall | None = None  # what attention of own queries calls
        # A reduction that is skipped is missing elsewhere, and a branch without a planned number or cut may need
        # others: the hash of the code, checked when a plan is applied, does not distinguish branches. A helper that is
        # called conditionally (keys are repeated only where a kernel needs it) keeps its numbers to itself.
        numbers = bool(planned.arguments or planned.lengths or planned.cuts) and ">" not in planned.site.place
        changes = planned.communicates or numbers
        self.must_be_reached = changes and not planned.sometimes

    def means(self, time: int, dims: int, width: int | None) -> bool:
        """Return whether the call now made at this place is the planned one."""
        site: CallSite = self.site
        return site.time in (None, time) and site.dims in (None, dims) and (site.width is None or site.width != width)

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.literals or self.planned.lengths or self.planned.copies:
            everything: Any = {"args": tuple(args), "kwargs": dict(kwargs)}
            for path, passed, wanted in self.literals:
                everything = _set(everything, path, partial(self._literal, passed, wanted))
            for length in self.planned.lengths:
                everything = _set(everything, length.path, partial(self._of_length, length))
            for path in self.planned.copies:
                everything = _set(everything, path, lambda x: None if x is None else copy_to_ranks(x, self.at.group))
            args, kwargs = everything["args"], everything["kwargs"]
        func = func if self.inner is None else partial(self._with, func)
        result = self.run(func, args, kwargs)
        for cut, rows, size in self.cuts:
            result = _cut(result, cut.output, cut, rows, size)
        return result

    def _with(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.inner is not None
        return self.inner(func, args, kwargs)

    def _literal(self, passed: int, wanted: int, have: int) -> int:
        """Return the number this rank must pass: as planned, or in proportion when it contains a size of the batch."""
        if have == passed:
            return wanted
        if have in (wanted, -1):  # torch infers -1
            return have
        if not passed or have * wanted % passed:
            raise other_branch(f"{self.at.where}: {self.site} passes {have}, but the plan was made for {passed}")
        return have * wanted // passed

    def _of_length(self, argument: LengthArgument, have: int) -> int:
        """Return the number for all positions, where the code passes that for those of a rank, or the reverse."""
        running = self.at.running
        length = running.lengths[argument.sequence.name]
        told, wanted = positions_of_a_rank(length, running.sequence), length
        if argument.own:
            told, wanted = wanted, told
        if have == -1 or running.runs_whole:
            return have
        if (have - argument.plus) % told:
            who = "all ranks have" if argument.own else "a rank has"
            raise other_branch(f"{self.at.where}: {self.site} passes {have}, but {who} {told} positions")
        return (have - argument.plus) // told * wanted + argument.plus


class PlannedCalls:
    """The planned calls of one module, by function and place."""

    def __init__(self, planned: Iterable[CallRewrite], at: At) -> None:
        self.at = at
        self.by_place: dict[tuple[str, str], list[_PlannedCall]] = {}
        for rewrite in planned:
            self.by_place.setdefault((rewrite.site.function, rewrite.site.place), []).append(_PlannedCall(rewrite, at))
        for place, calls in self.by_place.items():
            outer = next((call for call in calls if isinstance(call.planned, AttendAcross)), None)
            if outer is not None and len(calls) > 1:
                (outer.inner,) = (call for call in calls if call is not outer)
                self.by_place[place] = [outer]
        self.names = frozenset(name for name, _ in self.by_place)
        self.required = [call for calls in self.by_place.values() for call in calls if call.must_be_reached]

    def local(self, tensor: Any) -> Any:
        """Return the local tensor of a DTensor parameter that the module's code took from `parameters()`; in a list of
        such, those of all."""
        if not isinstance(tensor, DTensor):
            several = type(tensor) in (list, tuple) and any(isinstance(item, DTensor) for item in tensor)
            return type(tensor)(map(self.local, tensor)) if several else tensor
        for module in self.at.module.modules():
            for name, parameter in own_parameters(module).items():
                if parameter is tensor:
                    return getattr(module, name)
        return tensor


_MAY_HOLD = (DTensor, list, tuple)


class ModuleMode(TorchFunctionMode):
    """The mode that rewrites planned calls of one run of a module, but not those of its child modules."""

    def __init__(self, calls: PlannedCalls) -> None:
        super().__init__()
        self.calls, self.name, self.frames = calls, calls.at.name, calls.at.running.frames
        self.rounds: Counter[tuple[str, str]] = Counter()
        self.reached: set[_PlannedCall] = set()
        self.eager = Hold()

    def __enter__(self) -> None:
        if not torch.compiler.is_compiling():
            self.eager = eager_code()  # a mode in Python cannot act on calls in compiled functions
            self.eager.until_gone(self)  # an interrupted rank may not come to `__exit__`
        super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.eager.release()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.frames or self.frames[-1] != self.name:
            return func(*args, **kwargs)
        name = call_name(func)
        if any(isinstance(arg, _MAY_HOLD) for arg in args) and not name.endswith("_") and not name.startswith("attr:"):
            args = tuple(map(self.calls.local, args))
        planned = self._planned(name, args) if name in self.calls.names else None
        if planned is None:
            return func(*args, **kwargs)
        tracer = None if torch.compiler.is_compiling() else running()
        if tracer is not None:
            tracer.on_planned(func, args, kwargs)
        result = planned(func, args, kwargs)
        return result if torch.compiler.is_compiling() or looking_on() is None else as_given(planned.planned, result)

    def _planned(self, name: str, args: Any) -> _PlannedCall | None:
        """Return the planned call that is being made, or None."""
        key = (name, code_place())
        self.rounds[key] += 1
        candidates = self.calls.by_place.get(key)
        if candidates is None:
            return None
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        dims, width = (-1, None) if first is None else (first.dim(), first.shape[-1] if first.dim() else None)
        for call in candidates:
            if call.means(self.rounds[key], dims, width):
                self.reached.add(call)
                return call
        return None

    def check_reached(self) -> None:
        """Raise unless every planned sum and number was used: another branch would need it somewhere else."""
        for call in self.calls.required:
            if call not in self.reached:
                raise other_branch(f"{call.at.where}: {call.site} was not reached")


def _cut(result: Any, output: int, cut: Cut, rows: tuple[int, ...], size: int) -> Any:
    if isinstance(result, torch.Tensor):
        return take_rows(result, cut.dim, rows) if result.shape[cut.dim] == size else result
    items = list(result)
    items[output] = _cut(items[output], 0, cut, rows, size)
    return items if isinstance(result, list) else tuple(items)


def _set(value: Any, path: Path, change: Any) -> Any:
    """Return a nested value with one item changed; slices are entered by "start", "stop" and "step"."""
    if not path:
        return change(value)
    key, rest = path[0], path[1:]
    if isinstance(value, slice):
        parts = {name: getattr(value, name) for name in ("start", "stop", "step")}
        parts[key] = _set(parts[key], rest, change)
        return slice(parts["start"], parts["stop"], parts["step"])
    if isinstance(value, dict):
        return value | {key: _set(value[key], rest, change)}
    items = list(value)
    items[key] = _set(items[key], rest, change)
    return items if isinstance(value, list) else tuple(items)


# Kernels that take a layer's weight must not skip what the plan does at that layer.
#
# A fused kernel may take the weight of a norm or of an output projection and replace the layer, on a GPU, in training,
# where its library is installed: no trace on a CPU shows it, and no hook of that layer runs. With a shard of the weight
# the result would be silently wrong. So where such a kernel receives a parameter of a layer at which the plan does
# something, its reference in plain torch runs instead; if there is none, that is an error.

_alone = Alone()  # simulated ranks are threads


class _Guard:
    """The replacement of a kernel, for as long as a planned model needs it."""

    def __init__(self, kernel: OptionalKernel) -> None:
        self.kernel = kernel
        self.function: Callable[..., Any] | None = None
        self.planned: WeakSet[nn.Module] = WeakSet()

    def instead_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.function = function

        def guarded(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        # a compiler cannot rely on the addresses of parameters
        return torch.compiler.disable(functools.wraps(function)(guarded))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        assert self.function is not None
        # The planned layer of which a parameter, or a view in the same memory, is passed.
        memory = {memory_of(value) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}
        planned: list[nn.Module] = []
        _alone.run(lambda: planned.extend(self.planned))
        planned = [module for module in planned if record_of(module) is not None]  # otherwise the layer was restored
        own = ((module, p) for module in planned for p in own_parameters(module).values() if p is not None)
        layer = next((module for module, parameter in own if memory_of(parameter) in memory), None)
        if layer is None:
            return self.function(*args, **kwargs)
        if self.kernel.reference is None:
            raise PlanMismatchError(
                f"the kernel {self.kernel.name!r} of {self.kernel.package} takes a weight of "
                f"{type(layer).__name__} and would skip its sums over ranks",
                hint=f"run the model without {self.kernel.package}",
            )
        parameters = inspect.signature(self.kernel.reference).parameters
        return self.kernel.reference(*args, **{name: value for name, value in kwargs.items() if name in parameters})


_guards: WeakValueDictionary[tuple[int, str], _Guard] = WeakValueDictionary()  # kept alive by what is installed


def guard_kernels(model: nn.Module, planned: Iterable[nn.Module], undo: list[Callable[[], None]]) -> None:
    """Put a guard around each optional kernel that is installed and that the model's code may call."""
    mine = list(planned)
    guards: list[_Guard] = []

    def find(kernel: OptionalKernel) -> None:
        guard = _guards.setdefault((id(kernel.home), kernel.name), _Guard(kernel))
        guard.planned.update(mine)
        guards.append(guard)

    def release(guard: _Guard, installed: Hold) -> None:
        _alone.run(partial(guard.planned.difference_update, mine))
        installed.release()

    for kernel in optional_kernels(model) if mine else ():
        if kernel.installed:
            _alone.run(partial(find, kernel))
            installed_guard = hold(KERNEL_GUARDS, [Place(kernel.home, kernel.name, guards[-1].instead_of)])
            installed_guard.until_gone(model)
            undo.append(partial(release, guards[-1], installed_guard))
