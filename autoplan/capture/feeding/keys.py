"""Derive keys of dicts and lengths of lists and tuples from a failure; plain arguments are in told.py.

A dict may be an argument, an item of one, or built by the model from arguments: then the key belongs to the argument.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator

import torch

from autoplan.capture.feeding.arguments import Arguments, field_of, of_items, of_nodes, usual
from autoplan.capture.feeding.conditions import keys_asked_for, value_of
from autoplan.capture.feeding.failure import Failure, NothingRead, Place
from autoplan.capture.feeding.names import usual_names
from autoplan.capture.feeding.wants import Path, State, Want
from autoplan.capture.feeding.watch import is_direct, origin
from autoplan.common.nested import flatten_tensors

_FEW = 6


def keys(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """Yield states with a key that a dict lacks, a dict in place of a tensor, or a list as long as it is unpacked."""
    dicts = [path for path, _ in failure.state.holding("dict")]
    if isinstance(failure.error, KeyError) and failure.error.args:
        yield from _missing(failure, arguments, model, failure.error.args[0], dicts)
    for place in reversed(failure.places[-2:]):
        for path in dicts:
            yield from _asked(failure.state, path, keys_asked_for(place), model)
    if isinstance(failure.error, NothingRead):  # a dict that is gone through, for parts that have names
        for path in (path for path in dicts if not failure.state.inner(path).items):
            for names in {tuple(m) for m in model.modules() if isinstance(m, torch.nn.ModuleDict)}:
                yield failure.state.with_want(path, of_items("dict", {n: field_of(None, n) for n in names}, model))
    for place in reversed(failure.places[-2:]):
        yield from _subscripts(failure.state, place, model)
        for path in [p for p in dicts if p[0] in place.names()]:
            for want in list(_of_key("x", model))[:1]:
                yield failure.state.with_want((*path, "x"), want)


def _missing(
    failure: Failure, arguments: Arguments, model: torch.nn.Module, key: object, held: list[Path]
) -> Iterator[State]:
    state = failure.state
    if not isinstance(key, str | int):
        yield from _from_table(failure, key)
        return
    if arguments.open and isinstance(key, str) and key.isidentifier() and not state.holds(key):
        yield from (state.with_want((key,), want) for want in itertools.islice(_of_key(key, model), _FEW))
    for path in held:
        if key in dict(state.inner(path).items):
            continue
        wants = list(_of_key(key, model))
        if usual_names().has_edges(key for key, _ in state.inner(path).items):  # positions of nodes are points
            wants = sorted(map(of_nodes, wants), key=lambda want: want.kind == "positions")
        yield from (state.with_want((*path, key), want) for want in wants)


def _from_table(failure: Failure, key: object) -> Iterator[State]:
    """Yield states for `table[v] for v in names` in which the argument lists the table's keys, all of them or one."""
    paths = [path for _, tensor in flatten_tensors(key) for path in origin(tensor)]
    for place in failure.places[-2:]:
        node = place.expression()
        for inner in ast.walk(node) if node is not None else ():
            table = value_of(place, inner.value) if isinstance(inner, ast.Subscript) else None
            if isinstance(table, dict) and table and all(isinstance(key, str) for key in table):
                for path in dict.fromkeys(paths):
                    yield failure.state.with_want(path, Want("value", value=tuple(table)))
                    yield failure.state.with_want(path, Want("value", value=tuple(table)[:1]))


def _asked(state: State, path: Path, asked: tuple[str, ...], model: torch.nn.Module) -> Iterator[State]:
    """Yield states with all keys that a condition asks for, at once."""
    items = dict(state.inner(path).items)
    new = [key for key in asked if key not in items]
    for together in itertools.islice(zip(*(_of_key(key, model) for key in new), strict=False), _FEW):
        more = state
        for key, want in zip(new, together, strict=True):
            more = more.with_want((*path, key), want)
        yield more


def _subscripts(state: State, place: Place, model: torch.nn.Module) -> Iterator[State]:
    """Yield states for `x["key"]` where x is a tensor, or a dict inside of an argument."""
    node = place.expression()
    for inner in ast.walk(node) if node is not None else ():
        if not isinstance(inner, ast.Subscript):
            continue
        key, value = value_of(place, inner.slice), value_of(place, inner.value)
        if not isinstance(key, str):
            continue
        if isinstance(value, torch.Tensor):
            for path in origin(value):
                yield from (state.with_want(path, Want("dict", items=((key, want),))) for want in _of_key(key, model))
        for path in _inner_dicts(value) if isinstance(value, dict) else ():
            yield from (state.with_want((*path, key), want) for want in _of_key(key, model))


def _inner_dicts(value: object) -> tuple[Path, ...]:
    """Return the paths of a dict inside of an argument, by the tensors in it."""
    inside = (path[:-1] for _, tensor in flatten_tensors(value) for path in origin(tensor) if is_direct(tensor))
    return tuple(dict.fromkeys(path for path in inside if len(path) > 1))


def _of_key(key: object, model: torch.nn.Module) -> Iterator[Want]:
    parameter = inspect.Parameter(re.sub(r"\W", "_", f"{key}") or "x", inspect.Parameter.KEYWORD_ONLY)
    yield from usual(parameter, model)
