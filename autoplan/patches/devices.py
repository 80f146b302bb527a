"""One device: code that names an accelerator is planned on the CPU, where copies of a model run.

Forwards name devices: `torch.arange(n, device="cuda")`, `mask.cuda()`, `x.to(self.device)`. Copies that plans are read
and tried on lie on the CPU (or have no storage), also where the model itself lies on a GPU. So while such a copy runs,
whatever names an accelerator gets the CPU. Models whose code and attributes name none run without this.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoplan.common.code.code_place import is_settled
from autoplan.patches.patched import Patch, Place, patched

ACCELERATORS = ("cuda", "xpu", "mps", "hpu", "npu", "xla", "mtia")
_MOVES = frozenset(getattr(torch.Tensor, name) for name in ACCELERATORS if hasattr(torch.Tensor, name))


def _answers_without_cuda() -> bool:
    """Return whether the questions are looked up in torch.cuda at each call, and raise without CUDA."""
    with patched(QUESTIONS, _questions()):
        inside = torch.cuda.current_device(), torch.cuda.synchronize()
    return inside == (0, None)


QUESTIONS = Patch(
    name="questions to CUDA",
    replaces="torch.cuda.current_device and torch.cuda.synchronize",
    why="code that names CUDA is planned on the CPU, where they raise if torch finds no GPU",
    scope="while a copy of a model runs whose code names an accelerator",
    undone="the functions are restored",
    canary=_answers_without_cuda,
)


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
        stack.enter_context(patched(QUESTIONS, _questions()))
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
    name = value.type if isinstance(value, torch.device) else value
    return isinstance(name, str) and (name.partition(":")[0] in ACCELERATORS or name.startswith("torch.cuda."))


def names_an_accelerator(model: nn.Module) -> bool:
    """Return whether code of the model's classes, or a function that it calls, or an attribute names one."""
    for module in model.modules():
        for value in vars(module).values():
            if _is_an_accelerator(value) or (isinstance(value, FunctionType) and _names_one(value, set())):
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
