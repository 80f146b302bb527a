"""Derive inputs from a failed assertion: its comparisons are evaluated in the frame where it failed.

Only names, attributes, sizes and arithmetic are evaluated, since nothing else is surely free of side effects.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sized
from dataclasses import replace
from typing import Any

import torch

from autoplan.capture.feeding.failure import Failure, Place
from autoplan.capture.feeding.resize import multiples, of_kind, of_rank, resized
from autoplan.capture.feeding.wants import Path, State, Want, is_number
from autoplan.capture.feeding.watch import origin
from autoplan.common.torch_internals import is_fake

_CALLS = {"len": len, "tuple": tuple, "list": list, "min": min, "max": max, "sum": sum, "int": int, "all": all}
_METHODS = ("size", "dim", "numel", "ndimension", "min", "max", "amin", "amax", "sum", "item")
_UNKNOWN = object()
_MOST_PARTS = 16  # most items that a list is given


def asked_by_condition(place: Place, state: State) -> Iterator[State]:
    """Yield states in which the failed condition may hold."""
    test = place.condition()
    for node in ast.walk(test) if test is not None else ():
        if isinstance(node, ast.Compare) and len(node.ops) >= 1:
            left = node.left
            for right in node.comparators:
                yield from _compared(place, state, left, right)
                left = right
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance" and len(node.args) == 2:
            yield from _instance(place, state, node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("is_floating_point"):
            for path, leaf in state.among(_paths(place, node)):
                yield state.with_want(path, replace(leaf, kind="ids" if leaf.kind != "ids" else "float"))


def keys_asked_for(place: Place) -> tuple[str, ...]:
    """Return the keys that a dict should have: `assert key in data`, `all(key in data for key in needed)`."""
    test = place.condition()
    wanted: list[Any] = []
    for node in ast.walk(test) if test is not None else ():
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            wanted.append(value_of(place, node.left))
        elif isinstance(node, ast.GeneratorExp | ast.ListComp) and isinstance(node.elt, ast.Compare):
            several = value_of(place, node.generators[0].iter)
            wanted += several if isinstance(several, list | tuple | set) else []
    return tuple(dict.fromkeys(key for key in wanted if isinstance(key, str)))


def _compared(place: Place, state: State, left: ast.expr, right: ast.expr) -> Iterator[State]:
    lhs, rhs = value_of(place, left), value_of(place, right)
    paths = (*_paths(place, left), *_paths(place, right)) or tuple(path for path, _ in state.leaves())
    if _is_rank(left) or _is_rank(right):
        ranks = rhs if _is_rank(left) else lhs
        for rank in ranks if isinstance(ranks, tuple | list | set) else (ranks,):
            for path in paths if is_number(rank) else ():
                yield from of_rank(state, path, rank)
        return
    if any(isinstance(value, torch.Tensor) and value.is_floating_point() for value in (lhs, rhs)):
        for path in paths:
            yield from of_kind(state, path, "unit")
    lists = dict(state.holding("list"))
    for side, wanted in ((left, rhs), (right, lhs)):
        counted = (ast.unparse(side)[4:-1],) if ast.unparse(side).startswith("len(") else ()
        old, leaf = lists.get(counted), state.at(counted) if counted else None
        if not is_number(wanted) or not 0 < wanted <= _MOST_PARTS:
            continue
        if old is not None and old.items:
            items = tuple((at, dict(old.items).get(at, old.items[0][1])) for at in range(wanted))
            yield state.with_want(counted, replace(old, items=items))
            return
        if leaf is not None and leaf.is_tensor and len(leaf.shape) > 1:
            yield state.with_want(counted, Want("list", items=tuple((at, leaf) for at in range(wanted))))
    if any(ast.unparse(side).startswith("len(") for side in (left, right)) and is_number(lhs) and is_number(rhs):
        for path in paths:
            leaf = state.at(path)
            now = len(leaf.shape) if leaf is not None else 0
            for more in (rhs - lhs, lhs - rhs):
                yield from of_rank(state, path, now + more)
        return
    if isinstance(left, ast.BinOp) and isinstance(left.op, ast.Mod):
        have, factor = value_of(place, left.left), value_of(place, left.right)
        if is_number(have) and is_number(factor):
            yield from multiples(state, paths, have, factor)
        return
    for side, wanted in ((left, rhs), (right, lhs)):
        yield from _plain(place, state, side, wanted)
        words = [wanted] if isinstance(wanted, str) else wanted if isinstance(wanted, tuple | list | set | dict) else ()
        for path in _paths(place, side):
            yield from (state.with_want(path, Want("value", value=word)) for word in words if isinstance(word, str))
    for have, want in _pairs(lhs, rhs):
        yield from resized(state, paths, have, want)
        yield from resized(state, paths, want, have)


def _plain(place: Place, state: State, side: ast.expr, wanted: Any) -> Iterator[State]:
    """Yield states with a plain-number argument set to the other side, or to one more."""
    want = dict(state.wants).get(side.id) if isinstance(side, ast.Name) else None
    if want is not None and want.kind in ("size", "value") and is_number(wanted):
        yield from (state.with_want((ast.unparse(side),), Want("value", value=wanted + more)) for more in (0, 1))


def _pairs(one: Any, other: Any) -> Iterator[tuple[int, int]]:
    """Yield pairs of numbers that should be equal."""
    if is_number(one) and is_number(other):
        yield int(one), int(other)
    elif isinstance(one, tuple | list) and isinstance(other, tuple | list):
        for have, want in zip(one, other, strict=False):
            yield from _pairs(have, want)
    elif is_number(one) and isinstance(other, tuple | list | set | range):
        for want in list(other)[:4]:
            yield from _pairs(one, want)


def _is_rank(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text.endswith((".ndim", ".dim()", ".ndimension()")) or (
        text.startswith("len(") and text.endswith((".shape)", ".size())"))
    )


def _instance(place: Place, state: State, node: ast.Call) -> Iterator[State]:
    text = ast.unparse(node.args[1]).lower()
    for path, leaf in state.among(_paths(place, node.args[0])):
        if len(path) == 1:
            kind = tuple if "tuple" in text and "list" not in text else None
            if "list" in text or "tuple" in text:
                yield state.with_want(path, Want("list", value=kind, items=((0, leaf), (1, leaf))))
                yield state.with_want(path, Want("list", value=kind, items=((0, leaf),)))
            if "dict" in text or "mapping" in text:
                yield state.with_want(path, Want("dict"))


def _paths(place: Place, node: ast.AST) -> tuple[Path, ...]:
    names = [inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    values = [place.frame.f_locals.get(name) for name in names]
    return tuple(dict.fromkeys(path for value in values for path in origin(value)))


def value_of(place: Place, node: ast.expr) -> Any:
    """Return the value of an expression without side effects; a sentinel for any other."""
    if not all(_is_harmless(inner) for inner in ast.walk(node)):
        return _UNKNOWN
    try:
        code = compile(ast.Expression(body=node), "<condition>", "eval")
        value = eval(code, {**place.frame.f_globals, "__builtins__": _CALLS}, dict(place.frame.f_locals))
    except Exception:  # names may be gone, and attributes may do anything
        return _UNKNOWN
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_floating_point():
        return _UNKNOWN if value.is_meta or is_fake(value) else int(value)
    return tuple(value) if isinstance(value, torch.Size) else value


def _is_harmless(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        called = node.func
        if isinstance(called, ast.Name):
            return called.id in _CALLS
        return isinstance(called, ast.Attribute) and called.attr in _METHODS
    allowed = (
        ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Slice, ast.Tuple, ast.List,
        ast.expr_context, ast.operator, ast.unaryop, ast.Compare, ast.BoolOp, ast.boolop, ast.cmpop,
    )  # fmt: skip
    return isinstance(node, allowed)


# Failures whose expression shows what is wrong: `x.shape[2]` of a tensor with two dims, a division by zero.
#
# Python tells the columns of the running expression, so no message has to be read.


_NUMBERS = (1, 2, 4)  # tried in place of a zero


def exact(failure: Failure) -> Iterator[State]:
    """Yield other states, by the error's type and the expression that was running."""
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
    if isinstance(failure.error, TypeError):
        for place in failure.places[-1:]:
            yield from _functions(failure.state, place)


def _functions(state: State, place: Place) -> Iterator[State]:
    """Yield states for `f(x)`, `f(x, 1)` or `f(x, y)` in which the argument f is a function."""
    match place.expression():
        case ast.Call(func=ast.Name(id=name), args=[_, *more]):
            along = bool(more) and isinstance(value_of(place, more[0]), int)
            function = torch.softmax if along else torch.mul if more else torch.relu
            for path, _ in state.among(origin(place.value(name))):
                yield state.with_want(path, Want("value", value=function))


def _dim_asked_for(state: State, place: Place) -> Iterator[State]:
    """Yield states for `x.shape[k]` in which x has that many dims."""
    node = place.expression()
    for inner in ast.walk(node) if node is not None else ():
        match inner:
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
        for path, leaf in state.among(origin(value)):
            yield from of_rank(state, path, len(leaf.shape) + more)


def unpacks_a_shape(statement: ast.stmt | None) -> tuple[str, int] | None:
    """Return x and its number of dims for `a, b, c = x.shape` or `x.size()`; None for any other statement."""
    match statement:
        case ast.Assign(
            targets=[ast.Tuple(elts=parts)],
            value=ast.Attribute(value=ast.Name(id=name), attr="shape")
            | ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="size"), args=[]),
        ) if not any(isinstance(part, ast.Starred) for part in parts):
            return name, len(parts)
    return None


def _dims_unpacked(state: State, place: Place) -> Iterator[State]:
    name, dims = unpacks_a_shape(place.statement()) or ("", 0)
    value = place.value(name)
    for path, leaf in state.among(origin(value) if isinstance(value, torch.Tensor) else ()):
        yield from of_rank(state, path, len(leaf.shape) + dims - value.dim())


def _as_many_parts(state: State, place: Place) -> Iterator[State]:
    """Yield states for `a, b = torch.split(x, n, dim=1)` or `x.split(n, 1)` in which dim 1 of x is n for each name."""
    match place.statement():
        case ast.Assign(
            targets=[ast.Tuple(elts=parts)],
            value=ast.Call(func=ast.Attribute(value=owner, attr="split"), args=args, keywords=keywords),
        ):
            pass
        case _:
            return
    first = [owner] if isinstance(value_of(place, owner), torch.Tensor) else []
    values = [value_of(place, argument) for argument in (*first, *args, *(keyword.value for keyword in keywords))]
    tensor, each, dim = (*values, 0)[:3] if len(values) > 1 else (None, 0, 0)
    if isinstance(tensor, torch.Tensor) and is_number(each) and is_number(dim) and dim < tensor.dim():
        for path, leaf in state.among(origin(tensor)):
            if len(leaf.shape) == tensor.dim():
                yield from reversed(list(state.with_dim(path, dim, each * len(parts))))


def _as_many_as_members(state: State, place: Place) -> Iterator[State]:
    """Yield states for `layers[i](x[:, i])` in which x has as many columns as there are layers."""
    node = place.statement()
    taken = [inner for inner in ast.walk(node) if isinstance(inner, ast.Subscript)] if node is not None else []
    for subscript in taken:
        items = value_of(place, subscript.value)
        name = subscript.slice.id if isinstance(subscript.slice, ast.Name) else ""
        at = place.value(name)
        if isinstance(items, torch.Tensor) or not isinstance(items, Sized) or not is_number(at) or at < len(items):
            continue
        for tensor, dim in _taken_at(place, taken, name):
            for path, leaf in state.among(origin(tensor)):
                if dim < len(leaf.shape) and len(items) > 0:
                    yield from reversed(list(state.with_dim(path, dim, len(items))))  # its own columns first


def _taken_at(place: Place, taken: list[ast.Subscript], name: str) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield tensors that are indexed by the name, and the dim."""
    for subscript in taken:
        tensor = value_of(place, subscript.value)
        indices = subscript.slice.elts if isinstance(subscript.slice, ast.Tuple) else [subscript.slice]
        if isinstance(tensor, torch.Tensor):
            yield from ((tensor, d) for d, i in enumerate(indices) if isinstance(i, ast.Name) and i.id == name)


def _no_zero(failure: Failure) -> Iterator[State]:
    """Yield states in which a plain number that is zero is not; names in the running lines come first."""
    named = [name for place in reversed(failure.places) for name in place.names()]
    zeros = [(name, want) for name, want in failure.state.wants if want.kind == "value" and want.value == 0]
    for name, want in sorted(zeros, key=lambda pair: pair[0] not in named):
        if is_number(want.value):
            yield from (failure.state.with_want((name,), replace(want, value=number)) for number in _NUMBERS)
