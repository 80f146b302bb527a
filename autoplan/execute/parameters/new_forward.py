"""A forward that a library set on a model (a fused head: log-probabilities without logits).

It may read weights of modules that it does not call. No hooks of the plan run there, and each rank computes the same:
it reads full tensors (`local_views.whole_view`), and each rank keeps its rows of the gradient.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache
from types import CodeType
from typing import Any

from torch import nn

from autoplan.common.torch_internals import own_modules

_CALLED = nn.Module._call_impl.__code__


def has_new_forward(module: nn.Module, depth: int = 3) -> bool:
    """Return whether a library set a forward on a module, or on a model inside of it (which adapters wrap)."""
    if "forward" in vars(module) or not depth:
        return "forward" in vars(module)
    return any(has_new_forward(child, depth - 1) for child in own_modules(module).values() if child is not None)


def is_read_by_a_new_forward(module: nn.Module) -> bool:
    """Return whether a forward that was set on another module, not that of its class, reads this module."""
    frame: Any = sys._getframe(2)
    if frame.f_locals.get("self") is module:
        return False
    passed: set[CodeType | None] = set()
    while frame.f_code is not _CALLED:
        passed.add(frame.f_code)
        if frame.f_back is None:
            return False
        frame = frame.f_back
    caller = frame.f_locals["self"]
    if caller is module or "forward" not in vars(caller):
        return False
    new, cls = vars(caller)["forward"], caller.__class__
    running = getattr(getattr(new, "__func__", new), "__code__", None)  # hooks of the caller read parameters, too
    return running in passed and _code_of_forward(cls) not in passed


@cache
def _code_of_forward(cls: Any) -> CodeType | None:
    return getattr(inspect.unwrap(cls.forward), "__code__", None)
