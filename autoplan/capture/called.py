"""Call the model on a feed. The key "@module" calls a submodule instead; "@training" runs training-only code as well.

Also here: which modules have training-only code, and lazy layers, which take their shapes from a first call.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.nn.parameter import is_lazy

from autoplan.capture.copies import copied
from autoplan.capture.dry_run import own
from autoplan.common.code.code_place import nodes_of
from autoplan.common.conventions import conventions
from autoplan.common.errors import CaptureError
from autoplan.common.nested import call_with
from autoplan.common.random_values import untouched_randomness
from autoplan.patches.kernels import where_it_runs

PART, TRAINING = "@module", "@training"


def call(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run the model on a feed, or the submodule that the feed's key `@module` names."""
    keywords = dict(inputs)
    part, training = keywords.pop(PART, None), keywords.pop(TRAINING, False)
    with where_it_runs(model), in_training(model) if training else nullcontext():
        return call_with(model if part is None else model.get_submodule(part), keywords)


def calls_the_model(feeds: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the feeds that call the model itself, not one of its submodules."""
    return {name: inputs for name, inputs in feeds.items() if PART not in inputs}


def inside_a_function() -> bool:
    """Return whether the forward of a `torch.autograd.Function` is running. Its backward is its own even where
    gradients are off: a checkpointing function runs the model's code without gradients, and later again with them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and isinstance(frame.f_locals.get(next(iter(code.co_varnames), "")), FunctionCtx):
            return True
        frame = frame.f_back
    return False


# Code that runs in training only.
#
# A head that only training reads, noise on a router or an auxiliary loss stands behind `if self.training`: a recording
# in eval mode never meets it. So modules whose own code branches on the mode are put into training mode for one more
# call. All others stay in eval mode: dropout and batch norm have one code for both, and draw or write in training.


_MODE = "training"


def has_training_paths(model: nn.Module) -> bool:
    """Return whether any module runs other code in training mode."""
    return any(map(_has_code, model.modules()))


@contextmanager
def in_training(model: nn.Module) -> Iterator[None]:
    """Put the modules that have training-only code, and only those, into training mode."""
    changed = [module for module in model.modules() if not module.training and _has_code(module)]
    for module in changed:
        module.training = True
    try:
        yield
    finally:
        for module in changed:
            module.training = False


def _has_code(module: nn.Module) -> bool:
    cls: Any = type(module)
    return any(all(_may_hold(other, module) for other in others) for others in _choices(cls))


def reads(model: nn.Module, *names: str) -> bool:
    """Return whether code of a class of the model has one of these names (whether gradients are on, or required): it
    may then take another path."""
    kinds: set[Any] = {type(part) for part in model.modules()}
    return any(not _names(kind).isdisjoint(names) for kind in kinds)


@lru_cache(maxsize=4096)
def _names(cls: Any) -> frozenset[str]:
    return frozenset(name for function in _functions(cls) for name in function.__code__.co_names)


@lru_cache(maxsize=4096)
def _functions(cls: Any) -> tuple[Any, ...]:
    """Return the functions of a class and its bases. torch's own do not count, apart from `torch.nn.utils` (a spectral
    norm)."""
    functions: list[Any] = []
    for base in cls.__mro__:
        of_torch = base.__module__.startswith("torch.") and not base.__module__.startswith("torch.nn.utils.")
        if not (base is object or of_torch or conventions().is_base(base)):
            unwrapped = map(inspect.unwrap, filter(inspect.isfunction, vars(base).values()))
            functions += filter(inspect.isfunction, unwrapped)  # a wrapped function may be of C
    return tuple(functions)


@lru_cache(maxsize=4096)
def _choices(cls: Any) -> tuple[tuple[ast.expr, ...], ...]:
    """Return, for each branch on `self.training` in the code of a class, the other conditions of that branch."""
    choices = []
    for function in _functions(cls):
        if _MODE in function.__code__.co_names:
            choices += [rest for node in nodes_of(function) if (rest := _chosen(node)) is not None]
    return tuple(choices)


def _chosen(node: ast.AST) -> tuple[ast.expr, ...] | None:
    """Return the other conditions of a branch on the mode that chooses between pieces of code; None for other nodes.

    A choice between two numbers does not count: `0.0 if not self.training else p`.
    """
    if not isinstance(node, ast.If | ast.While | ast.IfExp):
        return None
    if isinstance(node, ast.IfExp):
        choices = node.body, node.orelse
        calls = any(isinstance(part, ast.Call) for choice in choices for part in ast.walk(choice))
        if not calls and any(isinstance(choice, ast.Constant | ast.Attribute | ast.UnaryOp) for choice in choices):
            return None
    conjunction = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
    parts = node.test.values if conjunction else [node.test]  # type: ignore[attr-defined]
    others = tuple(
        part
        for part in parts
        if not any(isinstance(inner, ast.Attribute) and inner.attr == _MODE for inner in ast.walk(part))
    )
    return others if len(others) < len(parts) else None


def _may_hold(test: ast.expr, module: nn.Module) -> bool:
    """Return False for a `self.flag` or `self.number > 0` that is false, and True for any other condition."""
    if isinstance(test, ast.Attribute) and _is_self(test.value):
        flag = getattr(module, test.attr, True)
        return bool(flag) if isinstance(flag, bool | int | float) else flag is not None
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.left, ast.Attribute):
        value, limit = getattr(module, test.left.attr, None), test.comparators[0]
        plain = _is_self(test.left.value) and isinstance(value, int | float) and isinstance(limit, ast.Constant)
        return not (plain and isinstance(test.ops[0], ast.Gt) and not value > limit.value)  # type: ignore[attr-defined]
    return True


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


# Lazy layers take their shapes from a first call. A plan needs the shapes, so a copy is called first.


def with_shapes(model: nn.Module, feeds: Mapping[str, Mapping[str, Any]] | None) -> nn.Module:
    """Return the model, or a copy of it that was called once if parameters have no shape yet (lazy layers)."""
    waiting = _waiting(model)
    if not waiting:
        return model
    if not feeds:
        raise CaptureError(
            f"{waiting[0]} of {type(model).__name__} is uninitialized until the first call ({len(waiting)} such)",
            hint="call the model once on an example before planning, or pass inputs= (then a copy is called)",
        )
    copy = copied(model)
    try:
        with untouched_randomness(0), torch.no_grad():
            for inputs in feeds.values():
                call(copy, own(dict(inputs)))
    except Exception as error:  # someone else's forward may raise anything
        raise CaptureError(
            f"the first call of {type(model).__name__}, which initializes {waiting[0]}, failed: "
            f"{type(error).__name__}: {error}",
            hint="pass inputs= as its forward takes them",
        ) from error
    left = _waiting(copy)
    if left:
        raise CaptureError(
            f"{left[0]} of {type(model).__name__} is still uninitialized after a call with inputs=",
            hint="pass a second feed that runs it: {name: {argument: tensor}}",
        )
    return copy


def _waiting(model: nn.Module) -> list[str]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return [name for name, tensor in named if is_lazy(tensor)]
