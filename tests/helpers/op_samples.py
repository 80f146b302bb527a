"""Every sample of torch's own op database, each put between linears (op_between.py) along each of its dims.

A sample is a call of an op: tensors, and arguments that are none. Nothing is drawn at random but by seed, so a case has
a name by which it can be made again. What cannot be a case is one all the same, with the reason.
"""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any

import torch
from op_between import KINDS, between
from torch import nn
from torch.utils import _pytree as pytree

__all__ = [
    "Case",
    "Unusable",
    "case_of",
    "cases",
    "database",
    "depends_on_seed",
    "name_of",
    "usable",
    "usable_samples",
]

_MOST_NUMBERS = 20_000  # in one tensor: the linears beside it are as wide as it is long
_LAST_BITS = 1e-13  # by how much rounding may change a number
# Python errors with which an op may say that it does not run on these inputs.
_CANNOT_RUN = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError, NotImplementedError)


@dataclass(frozen=True)
class Unusable:
    """A sample that cannot be put between linears, and why."""

    op: str
    number: int
    reason: str


@dataclass(frozen=True)
class Case:
    """One sample of one op, with one dim of its first float tensor under test."""

    op: str
    number: int
    dim: int
    shape: tuple[int, ...]
    model: nn.Module
    inputs: dict[str, Any]
    tp_size: int

    def __str__(self) -> str:
        return f"{self.op}[{self.number}] dim {self.dim} of {list(self.shape)}"


def database() -> list[Any]:
    """The op database, each op under its full name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal import common_methods_invocations as invocations
    invocations.wrapper_set_seed = _called  # random ops draw from the stream that runs, as they do in models
    return list(invocations.op_db)


def _called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def name_of(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def usable_samples(op: Any) -> list[int]:
    """The numbers of the samples that stand between linears, if they run."""
    samples = _samples(op)
    return [] if isinstance(samples, Unusable) else [n for n, given in enumerate(samples) if not unusable(given)]


def cases(op: Any, wanted: Callable[[int, int, tuple[int, ...]], bool] = lambda *_: True) -> Iterator[Case | Unusable]:
    """Every sample along every dim, if `wanted` (its number, the dim, the shape); what cannot be a case comes, too.

    Samples that differ in the values of tensors only are one.
    """
    name = name_of(op)
    samples = _samples(op)
    if isinstance(samples, Unusable):
        yield samples
        return
    for number, given in enumerate(samples):
        yield from _cases_of(op, name, number, given, wanted)


def _samples(op: Any) -> list[Any] | Unusable:
    """The samples as (args, kwargs); the random numbers in them are the same in every run."""
    name = name_of(op)
    if not op.supports_dtype(torch.float64, "cpu"):
        return Unusable(name, 0, "the op takes no float64")
    torch.manual_seed(zlib.crc32(name.encode()))
    random.seed(0)
    try:
        samples = list(op.sample_inputs("cpu", torch.float64, requires_grad=False))
    except _CANNOT_RUN as error:
        return Unusable(name, 0, f"its samples cannot be made: {_said(error)}")
    found: dict[str, Any] = {}
    for sample in samples:
        given = (sample.input, *sample.args), dict(sample.kwargs)
        found.setdefault(_shapes(given), given)
    return list(found.values())


def _cases_of(op: Any, name: str, number: int, given: Any, wanted: Callable[..., bool]) -> Iterator[Case | Unusable]:
    reason = unusable(given)
    if reason:
        yield Unusable(name, number, reason)
        return
    shape = tuple(_main(given).shape)
    for dim, size in enumerate(shape):
        if size > 1 and wanted(number, dim, shape):
            yield case_of(name, _like_a_models(op.op), *given, dim, number)


def _like_a_models(function: Callable[..., Any]) -> Callable[..., Any]:
    """Some ops are lambdas of the database: they are a model's Python here, and none of torch's."""
    if not isinstance(function, FunctionType) or "testing" not in function.__code__.co_filename:
        return function
    code = _elsewhere(function.__code__)
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _elsewhere(code: CodeType) -> CodeType:
    inner = tuple(_elsewhere(item) if isinstance(item, CodeType) else item for item in code.co_consts)
    return code.replace(co_filename="<a sample>", co_consts=inner)


def _tensors(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]


def _main(given: Any) -> torch.Tensor:
    """The tensor that is made by the linear under test: the first of floats."""
    return next(tensor for tensor in _tensors(given) if tensor.is_floating_point())


def unusable(given: Any) -> str:
    """Why a sample's tensors cannot come out of linears; empty where they can."""
    tensors = _tensors(given)
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not tensors:
        return "it takes no tensor"
    if not floats:
        return "it takes no float tensor"
    if any(tensor.layout != torch.strided for tensor in tensors):
        return "it takes a sparse tensor"
    if any(tensor.numel() == 0 for tensor in tensors):
        return "one of its tensors is empty"
    if any(tensor.numel() > _MOST_NUMBERS for tensor in tensors):
        return f"one of its tensors has more than {_MOST_NUMBERS} numbers"
    if floats[0].numel() == 1:
        return "its first float tensor has no dim that could be cut"
    return ""


def case_of(
    name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], dim: int, number: int = 0
) -> Case | Unusable:
    """A call between linears, its first float tensor with `dim` under test."""
    given = args, kwargs
    main = _main(given)
    seed = zlib.crc32(f"{name} {number} {dim}".encode())
    reason = ""
    for kind in dict.fromkeys((KINDS[(number + dim) % len(KINDS)], "buffer")):  # not all pass gradients everywhere
        try:
            model, inputs = between(function, given, main, dim, kind, seed)
            model(**pytree.tree_map(torch.clone, inputs)).sum().backward()
        except _CANNOT_RUN as error:
            reason = reason or f"it does not run unsharded: {_said(error)}"
            continue
        return Case(name, number, dim, tuple(main.shape), model, inputs, _smallest_factor(main.shape[dim]))
    return Unusable(name, number, reason)


def usable(model: nn.Module, inputs: dict[str, Any]) -> str:
    """Why nothing could be compared with the module unsharded; empty where it runs, twice alike, on finite numbers."""
    seen = []
    for scale in (1.0, 1.0, 1.0 + _LAST_BITS):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        try:
            given = pytree.tree_map(lambda tensor, scale=scale: tensor * scale, inputs)
            result = model(**given)
            result.sum().backward()
        except _CANNOT_RUN as error:
            return f"it does not run unsharded: {_said(error)}"
        seen.append([result.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    model.zero_grad(set_to_none=True)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in seen[0]):
        return "its result or a gradient is not finite"
    if not all(map(torch.equal, *seen[:2])):
        return "it gives other numbers each time, whatever the seed"
    if not all(torch.allclose(a, b, 1e-6, 1e-6) for a, b in zip(seen[0], seen[2], strict=True)):
        return "rounding decides what it gives"
    return ""


def depends_on_seed(model: nn.Module, inputs: dict[str, Any]) -> bool:
    """Are random numbers drawn that change what comes out?"""
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.no_grad():
            found.append(model(**pytree.tree_map(torch.clone, inputs)))
    return not torch.equal(*found)


def _smallest_factor(size: int) -> int:
    return next(factor for factor in range(2, size + 1) if size % factor == 0)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"


def _shapes(value: Any) -> str:
    return repr(
        pytree.tree_map(lambda leaf: (leaf.shape, leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf, value)
    )
