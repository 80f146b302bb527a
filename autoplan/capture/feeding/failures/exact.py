"""Failures whose expression says by itself what is wrong: `x.shape[2]` of what has two dims, a division by a zero.

The running expression is exact (Python tells its columns), so that nothing of a message has to be read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sized
from dataclasses import replace

import torch

from autoplan.capture.feeding.failures.blame import Place, is_number
from autoplan.capture.feeding.failures.conditions import value_of
from autoplan.capture.feeding.failures.failure import Failure
from autoplan.capture.feeding.resize import of_rank
from autoplan.capture.feeding.wants import State
from autoplan.capture.feeding.watch import origin

_NUMBERS = (1, 2, 4)  # for a number that may not be zero


def exact(failure: Failure) -> Iterator[State]:
    """Other states, by the error's kind and the expression that was running."""
    if isinstance(failure.error, IndexError):
        for place in failure.places[-1:]:
            yield from _dim_asked_for(failure.state, place)
            yield from _as_many_as_members(failure.state, place)
    if isinstance(failure.error, ValueError):
        for place in failure.places[-1:]:
            yield from _dims_unpacked(failure.state, place)
            yield from _as_many_parts(failure.state, place)
    if isinstance(failure.error, ZeroDivisionError):
        yield from _no_zero(failure)


def _dim_asked_for(state: State, place: Place) -> Iterator[State]:
    """`x.shape[k]` or `x.size(k)`: x has as many dims."""
    node = place.expression()
    for one in ast.walk(node) if node is not None else ():
        match one:
            case ast.Subscript(
                value=ast.Attribute(value=ast.Name(id=name), attr="shape"), slice=ast.Constant(value=int(k))
            ):
                pass
            case _:
                continue
        value = place.value(name)
        if not isinstance(value, torch.Tensor) or -value.dim() <= k < value.dim():
            continue
        more = (k + 1 if k >= 0 else -k) - value.dim()
        for path in origin(value):
            leaf = state.at(path)
            if leaf is not None:
                yield from of_rank(state, path, len(leaf.shape) + more)


def unpacks_a_shape(statement: ast.stmt | None) -> tuple[str, int] | None:
    """`a, b, c = x.shape`, or `x.size()`: x, and how many dims it has then."""
    match statement:
        case ast.Assign(
            targets=[ast.Tuple(elts=parts)],
            value=ast.Attribute(value=ast.Name(id=name), attr="shape")
            | ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="size"), args=[]),
        ) if not any(isinstance(one, ast.Starred) for one in parts):
            return name, len(parts)
    return None


def _dims_unpacked(state: State, place: Place) -> Iterator[State]:
    name, dims = unpacks_a_shape(place.statement()) or ("", 0)
    value = place.value(name)
    for path in origin(value) if isinstance(value, torch.Tensor) else ():
        leaf = state.at(path)
        if leaf is not None:
            yield from of_rank(state, path, len(leaf.shape) + dims - value.dim())


def _as_many_parts(state: State, place: Place) -> Iterator[State]:
    """`a, b = torch.split(x, n, dim=1)` or `x.split(n, 1)` that came out in more or fewer parts: x is n for each."""
    match place.statement():
        case ast.Assign(
            targets=[ast.Tuple(elts=parts)],
            value=ast.Call(func=ast.Attribute(value=owner, attr="split"), args=args, keywords=keywords),
        ):
            pass
        case _:
            return
    first = [owner] if isinstance(value_of(place, owner), torch.Tensor) else []
    given = [value_of(place, one) for one in (*first, *args, *(keyword.value for keyword in keywords))]
    tensor, each, dim = (*given, 0)[:3] if len(given) > 1 else (None, 0, 0)
    if isinstance(tensor, torch.Tensor) and is_number(each) and is_number(dim) and dim < tensor.dim():
        for path in origin(tensor):
            leaf = state.at(path)
            if leaf is not None and len(leaf.shape) == tensor.dim():
                yield from reversed(list(state.with_dim(path, dim, each * len(parts))))


def _as_many_as_members(state: State, place: Place) -> Iterator[State]:
    """`layers[i](x[:, i])` with more columns than layers: x has as many columns."""
    node = place.statement()
    taken = [one for one in ast.walk(node) if isinstance(one, ast.Subscript)] if node is not None else []
    for one in taken:
        held = value_of(place, one.value)
        name = one.slice.id if isinstance(one.slice, ast.Name) else ""
        at = place.value(name)
        if isinstance(held, torch.Tensor) or not isinstance(held, Sized) or not is_number(at) or at < len(held):
            continue
        for tensor, dim in _taken_at(place, taken, name):
            for path in origin(tensor):
                leaf = state.at(path)
                if leaf is not None and dim < len(leaf.shape) and len(held) > 0:
                    yield from reversed(list(state.with_dim(path, dim, len(held))))  # its own columns first


def _taken_at(place: Place, taken: list[ast.Subscript], name: str) -> Iterator[tuple[torch.Tensor, int]]:
    """Tensors that are indexed by the name, and along which dim."""
    for one in taken:
        tensor = value_of(place, one.value)
        indices = one.slice.elts if isinstance(one.slice, ast.Tuple) else [one.slice]
        if isinstance(tensor, torch.Tensor):
            yield from ((tensor, d) for d, i in enumerate(indices) if isinstance(i, ast.Name) and i.id == name)


def _no_zero(failure: Failure) -> Iterator[State]:
    """Plain numbers that are zero, those first that the running lines name."""
    named = [name for place in reversed(failure.places) for name in place.names()]
    zeros = [(name, want) for name, want in failure.state.wants if want.kind == "value" and want.value == 0]
    for name, want in sorted(zeros, key=lambda pair: pair[0] not in named):
        if is_number(want.value):
            yield from (failure.state.with_want((name,), replace(want, value=number)) for number in _NUMBERS)
