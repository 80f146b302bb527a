"""Keep the forward hooks that are a part of what a model computes.

Hooks are left behind when a model is copied to be recorded: they are the user's business (they log, count, collect) and
must not see our runs. But a hook that holds a module or a parameter may compute with it; then it is a part of the
model's forward like any other, and is copied. So is one that writes into a dict or a list of the model, which the model
reads; a pre-hook that sets attributes of the module that is called (a weight that is a raw one times its scale); and
those of torch that compute a weight again at each call (the old `weight_norm` and `spectral_norm`, pruning), which hold
no more than its name.

A hook that makes a weight may do something else in training: a spectral norm then updates its estimate, and writes it
into a buffer. A parametrization is a module, and recorded in that mode too; a hook is not, so its weights are listed,
and stay replicated.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Container, Iterator
from functools import partial
from itertools import pairwise
from types import CodeType
from typing import Any

from torch import nn

from autoplan.capture.copies import PLAIN_CONTAINERS, Rebinding, containers_of, reachable

_MAKING_WEIGHTS = "torch.nn.utils."
_BASE_STATE = frozenset(nn.Module().__dict__)
_KINDS = {  # kind -> dicts with their flags
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}


def hooks_of_forward(module: nn.Module, shared: Container[int] = ()) -> Iterator[tuple[str, int, Any]]:
    """Yield kind, number and function of each such hook. `shared`: ids of containers that the model holds."""
    for kind in _KINDS:
        for number, hook in vars(module)[kind].items():
            if (
                any(isinstance(item, nn.Module | nn.Parameter) for item in reachable(hook))
                or (kind == "_forward_pre_hooks" and _sets_on_module(hook))
                or type(hook).__module__.startswith(_MAKING_WEIGHTS)
                or any(id(container) in shared for container in containers_of(hook))
            ):
                yield kind, number, hook


def _sets_on_module(hook: Any) -> bool:
    """Return whether a hook's code sets attributes of the module that is called, such as a computed weight."""
    code = _code_of(hook)
    method = code is not None and code.co_varnames[:1] == ("self",)
    first_argument = code.co_varnames[method : method + 1] if code is not None else ()
    instructions = list(dis.get_instructions(code)) if code is not None else []
    for before, instruction in pairwise(instructions):
        loads = before if instruction.opname == "STORE_ATTR" else instruction if before.argval == "setattr" else None
        if loads is not None and loads.argval in first_argument and loads.opname.startswith("LOAD_FAST"):
            return True
    return False


def _code_of(hook: Any) -> CodeType | None:
    function = hook.func if isinstance(hook, partial) else hook
    function = getattr(function, "__func__", function)
    function = function if hasattr(function, "__code__") else vars(type(function)).get("__call__")
    return getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None


def containers_in(model: nn.Module) -> frozenset[int]:
    """Return the ids of the lists and dicts that modules hold as attributes of their own."""
    values = (value for module in model.modules() for name, value in vars(module).items() if name not in _BASE_STATE)
    return frozenset(id(value) for value in values if type(value) in PLAIN_CONTAINERS)


def keep_hooks_of_forward(model: nn.Module, rebinding: Rebinding) -> None:
    """Add these hooks to the copy, whose hook dicts are empty so far."""
    shared = containers_in(model)
    for module in model.modules():
        if id(module) not in rebinding.memo:
            continue
        for kind, number, _ in hooks_of_forward(module, shared):
            for name in (kind, *_KINDS[kind]):
                theirs = vars(module)[name]
                if number in theirs and id(theirs) in rebinding.memo:  # not of a folded block
                    rebinding.memo[id(theirs)][number] = rebinding.of(theirs[number])


def made_anew_in_training(model: nn.Module) -> tuple[str, ...]:
    """Return the modules with a torch hook that computes their weight in another way in training."""
    names = []
    for name, module in model.named_modules():
        for kind, _, hook in hooks_of_forward(module):
            makes = type(hook).__module__.startswith(_MAKING_WEIGHTS) or _sets_on_module(hook)
            code = _code_of(hook) if makes and kind == "_forward_pre_hooks" else None
            if code is not None and "training" in code.co_names:
                names.append(name)
    return tuple(dict.fromkeys(names))
