"""Patches that make runs comparable: seeds that ranks share, double precision, one device."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoplan.common.code.code_place import is_settled
from autoplan.patches.patched import Hold, Place, hold, patch, patched

# Notice when a rank is seeded, without writing anything into its generators.
#
# The problem: ranks share one stream of random numbers, and must agree on it again after seeding, which happens on all
# of them at once; draws of a single rank do not count. A generator's state does not distinguish the two, and a mark in
# it would be visible to others: data loaders seed from `torch.initial_seed()`. So torch's seeding functions are
# wrapped. Each call gives the rank's generators a new number; a state that is restored, as `fork_rng` and checkpoints
# do, has the number under which it was taken.

_NAMES = ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "get_rng_state")


class _Seedings:
    """The number of the present seeding of one rank's generators, and the count of seedings."""

    def __init__(self) -> None:
        self.now = self.made = 0


class RankGenerator(torch.Generator):
    """The generator of one simulated rank."""

    def __init__(self) -> None:
        self.seedings = _Seedings()


_of_process = _Seedings()
_of_state: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # by the id of a state that is still referenced


def watch_seeding() -> Hold:
    """Watch seeding until the hold is released."""
    holders = [(holder, name) for holder in (torch, torch.random, torch.cuda, torch.cuda.random) for name in _NAMES]
    return hold(seeding_patch, [Place(holder, name, _noting) for holder, name in holders if name in vars(holder)])


def seeding() -> int:
    """Return the number of this rank's present seeding."""
    return _mine().now


def note_seed() -> None:
    """Give this rank's generators a new number after seeding."""
    mine = _mine()
    mine.made += 1
    mine.now = mine.made


def is_simulated() -> bool:
    """Return whether this thread is a simulated rank, with a generator of its own in torch's place."""
    return isinstance(torch.random.default_generator.get_state.__self__, RankGenerator)


def _mine() -> _Seedings:
    generator = torch.random.default_generator.get_state.__self__
    return generator.seedings if isinstance(generator, RankGenerator) else _of_process


def _noting(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def noting(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        if plain.__name__ == "get_rng_state":
            # Remember under which seeding a state was taken, as long as it is referenced.
            key = id(result)
            _of_state[key] = weakref.ref(result, lambda _: _of_state.pop(key, None)), seeding()
            return result
        state = (args[0] if args else kwargs.get("new_state")) if plain.__name__ == "set_rng_state" else None
        record = _of_state.get(id(state))
        if state is not None and record is not None and record[0]() is state:
            _mine().now = record[1]
        else:
            note_seed()
        return result

    return noting


@patch(
    name="seeding of ranks",
    replaces=f"{', '.join(_NAMES)} of torch, torch.random, torch.cuda and torch.cuda.random",
    why="ranks re-synchronise their random stream after seeding, which the state of a generator does not show",
    scope="while a model sharded by `parallelize` that may draw random numbers is alive",
    undone="torch's functions are restored when the last such model is collected",
)
def seeding_patch() -> bool:
    """Return whether these functions seed and restore the generator in torch.random, and a fork restores it."""
    with torch.random.fork_rng(devices=()):
        with watch_seeding():
            before = seeding()
            torch.manual_seed(7)
            seeded = seeding()
            with torch.random.fork_rng(devices=()):
                torch.manual_seed(7)
                inside = seeding()
            after = seeding()
            torch.set_rng_state(torch.get_rng_state().clone())
        first = next(iter(inspect.signature(torch.set_rng_state).parameters))
        return len({before, seeded, inside, seeding()}) == 4 and after == seeded and first == "new_state"


# Double precision throughout: computations in single precision inside a model are lifted too.
#
# Norms, softmax, routers and rotary tables often compute in float32 whatever the model's dtype. In a float64 check that
# leaves rounding errors of 1e-7, and where large terms cancel (a gradient that is otherwise zero) they look like an
# error of 1e-4. So while a float64 model is checked, every request for float32 gets float64.


class Lifted(TorchFunctionMode):
    """A mode in which `.float()`, `.to(torch.float32)` and `dtype=torch.float32` mean float64. So does a tensor made
    without a dtype: the least float64, as in masks, overflows in float32, and torch 2.13's fused attention on a CPU is
    wrong where a float32 mask meets float64 queries."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(_lifted(value) for value in args)
        named = {name: _lifted(value) for name, value in (kwargs or {}).items()}
        draws_floats = func in _OF_NUMBERS and any(
            isinstance(value, float) for value in (*args, named.get("fill_value"))
        )
        if (draws_floats or func in _OF_DEFAULT_DTYPE) and named.get("dtype") is None and named.get("out") is None:
            named["dtype"] = torch.float64
        return func(*args, **named)


_OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.full, torch.arange)
_OF_DEFAULT_DTYPE = (torch.zeros, torch.ones, torch.empty, torch.eye, torch.linspace, torch.rand, torch.randn)


def _lifted(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@patch(
    name="double precision",
    replaces="torch.float32 in calls of torch functions, by torch.float64 (a torch function mode)",
    why="float32 computations inside a float64 model would look like errors of the plan",
    scope="while a float64 model is checked",
    undone="the mode is exited",
)
def double_precision_patch() -> bool:
    """Return whether all ways to request float32 pass a function mode."""
    x = torch.ones(2, dtype=torch.float64)
    with Lifted():
        results = (x.float(), x.to(torch.float32), x.sum(dtype=torch.float32), torch.ones(1), torch.tensor(0.5))
    return all(result.dtype == torch.float64 for result in results) and x.float().dtype == torch.float32


# One device: code that names an accelerator is planned on the CPU, where copies of a model run.
#
# Forwards name devices: `torch.arange(n, device="cuda")`, `mask.cuda()`, `x.to(self.device)`. Copies that plans are
# read and tried on lie on the CPU (or have no storage), also where the model itself lies on a GPU. So while such a
# copy runs, whatever names an accelerator gets the CPU. Models whose code and attributes name none run without this.


ACCELERATORS = ("cuda", "xpu", "mps", "hpu", "npu", "xla", "mtia")
_MOVES = frozenset(getattr(torch.Tensor, name) for name in ACCELERATORS if hasattr(torch.Tensor, name))


@patch(
    name="questions to CUDA",
    replaces="torch.cuda.current_device and torch.cuda.synchronize",
    why="code that names CUDA is planned on the CPU, where they raise if torch finds no GPU",
    scope="while a copy of a model runs whose code names an accelerator",
    undone="the functions are restored",
)
def questions_patch() -> bool:
    """Return whether the questions are looked up in torch.cuda at each call, and raise without CUDA."""
    with patched(questions_patch, _questions()):
        inside = torch.cuda.current_device(), torch.cuda.synchronize()
    return inside == (0, None)


def _questions() -> list[Place]:
    def or_none(answer: Any) -> Any:
        return lambda original: lambda *args: original(*args) if torch.cuda.is_available() else answer

    return [Place(torch.cuda, "current_device", or_none(0)), Place(torch.cuda, "synchronize", or_none(None))]


@contextmanager
def on_one_device(model: nn.Module) -> Iterator[None]:
    """Give the CPU to code that names an accelerator, in this thread, if `model` is a copy that lies on no GPU."""
    first = next(model.parameters(), None)
    apart = torch.get_default_device().type in ACCELERATORS
    if (first is not None and first.device.type in ACCELERATORS) or not (apart or names_an_accelerator(model)):
        yield
        return
    with ExitStack() as stack:
        stack.enter_context(patched(questions_patch, _questions()))
        stack.enter_context(_OnTheCpu())
        if apart:
            stack.enter_context(torch.device("cpu"))
        yield


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MOVES:
            return args[0].to("cpu")
        kwargs = kwargs or {}
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _cpu_for(kwargs["device"])}
        if func is torch.Tensor.to:
            args = (args[0], *map(_cpu_for, args[1:]))
        elif func is torch.Tensor.type and args[1:] and isinstance(args[1], str):
            args = (args[0], args[1].replace(".cuda.", "."), *args[2:])
        return func(*args, **kwargs)


def _cpu_for(device: Any) -> Any:
    """Return the CPU in the place of an accelerator, given by name or number, and anything else as it is."""
    return torch.device("cpu") if type(device) is int or _is_an_accelerator(device) else device


def _is_an_accelerator(value: Any) -> bool:
    if not isinstance(value, (str, torch.device)):  # most values, and this runs very often
        return False
    name = value.type if isinstance(value, torch.device) else value
    return name.partition(":")[0] in ACCELERATORS or name.startswith("torch.cuda.")


def names_an_accelerator(model: nn.Module) -> bool:
    """Return whether code of the model's classes, or a function that it calls, or an attribute names one."""
    values = (value for module in model.modules() for value in vars(module).values())
    for value in (value for value in values if isinstance(value, (str, torch.device, FunctionType))):
        if _names_one(value, set()) if isinstance(value, FunctionType) else _is_an_accelerator(value):
            return True
    return any(map(_class_names_one, {cls for module in model.modules() for cls in type(module).__mro__}))


@lru_cache(maxsize=4096)
def _class_names_one(cls: type) -> bool:
    if is_settled(cls.__module__):
        return False
    seen: set[CodeType] = set()
    values = [getattr(value, "__func__", getattr(value, "fget", value)) for value in vars(cls).values()]
    return any(_names_one(value, seen) for value in values if isinstance(value, FunctionType))


def _names_one(function: FunctionType, seen: set[CodeType]) -> bool:
    """Follow a function into those that it calls, but not into those of trusted packages."""
    pending: list[CodeType] = [function.__code__]
    while pending:
        code = pending.pop()
        if code in seen:
            continue
        seen.add(code)
        if "cuda" in code.co_names:
            return True
        for value in code.co_consts:
            if isinstance(value, CodeType):
                pending.append(value)
            elif _is_an_accelerator(value):
                return True
        for name in code.co_names:
            called = function.__globals__.get(name)
            if _is_an_accelerator(called):
                return True
            if not isinstance(called, FunctionType) or is_settled(called.__module__):
                continue
            if called.__code__ not in seen and _names_one(called, seen):
                return True
    return False
