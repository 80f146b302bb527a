"""What a failure tells: other beliefs about the arguments, the most telling first, each with the reason in words.

Read are the operation that failed with what it was given, the condition that did not hold, the expression that was
running with the values of its names, and the numbers in the message. Each proposal is tried: a wrong one costs a run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace

import torch

from autoplan.capture.feeding.arguments import Arguments, usual
from autoplan.capture.feeding.blame import none_names
from autoplan.capture.feeding.conditions import asked_by_condition
from autoplan.capture.feeding.consumers import Demand, demand_of
from autoplan.capture.feeding.failure import Failure
from autoplan.capture.feeding.messages import UNPACKED, told_by_message
from autoplan.capture.feeding.resize import larger, of_kind, of_rank, resized
from autoplan.capture.feeding.wants import Path, State, Want
from autoplan.capture.feeding.watch import is_direct, origin

__all__ = ["proposals"]

Proposal = tuple[State, str]

_NONE = re.compile(r"NoneType|None\b")


def proposals(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[Proposal]:
    """Other states, the most telling first."""
    for found in (_other, _consumer, _condition, _none, _keys, _message):
        why = f"{type(failure.error).__name__}: {failure.first_line[:120]}"
        for state in found(failure, arguments, model):
            yield state, why
    yield from _usual(failure, arguments, model)


def _consumer(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """What the operation with weights wants that failed."""
    call = failure.watch.failed
    demand = demand_of(call) if call is not None else None
    if demand is None or not isinstance(demand.tensor, torch.Tensor):
        return
    state, tensor = failure.state, demand.tensor
    for path in origin(tensor):
        leaf = state.at(path)
        if leaf is None:
            continue
        if demand.kind == "ids":
            yield from _as_ids(state, path, leaf, demand)
            continue
        floating = [state] if tensor.is_floating_point() else list(of_kind(state, path, "float"))
        for one in floating:
            yield from _sized(one, path, demand)
        if not tensor.is_floating_point():
            yield from floating


def _other(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """A layer got what other layers made, and it does not fit: another argument may be meant for it."""
    call = failure.watch.failed
    demand = demand_of(call) if call is not None else None
    if demand is None or not isinstance(demand.tensor, torch.Tensor) or is_direct(demand.tensor):
        return
    for parameter in arguments.optional[:4]:
        if not failure.state.holds(parameter.name):
            for want in arguments.usual(parameter, model):
                if want.is_tensor:
                    yield failure.state.with_want((parameter.name,), want)
                    break


def _as_ids(state: State, path: Path, leaf: Want, demand: Demand) -> Iterator[State]:
    if leaf.kind == "ids" and leaf.below == demand.below and len(leaf.shape) < 3:
        return
    shapes = [leaf.shape] if len(leaf.shape) <= 2 else []
    for shape in dict.fromkeys([*shapes, ("batch", "length"), ("batch",)]):
        yield state.with_want(path, replace(leaf, kind="ids", below=demand.below, shape=shape))


def _sized(state: State, path: Path, demand: Demand) -> Iterator[State]:
    """The right number of dims first, then the right sizes at them."""
    tensor, leaf = demand.tensor, state.at(path)
    assert leaf is not None
    channels = next((size for _, size in demand.sizes), 0)
    if demand.ranks and tensor.dim() not in demand.ranks:
        for rank in demand.ranks:
            yield from of_rank(state, path, len(leaf.shape) + rank - tensor.dim(), channels)
    if is_direct(tensor) and not tensor.is_floating_point():  # whole numbers were a guess, and so was their shape
        for rank in demand.ranks[:1]:
            yield from of_rank(state, path, rank, channels)
    for dim, size in demand.sizes:
        if -tensor.dim() <= dim < tensor.dim() and tensor.shape[dim] != size:
            if is_direct(tensor) and tuple(tensor.shape) == leaf.sizes(state.sizes):
                yield from state.with_dim(path, dim % tensor.dim(), size)
            yield from resized(state, (path,), tensor.shape[dim], size)
    if is_direct(tensor) and len(leaf.shape) in (2, 3) and demand.spatial is None:
        for rank in demand.ranks:
            yield from of_rank(state, path, rank, channels)


def _condition(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    for place in reversed(failure.places[-3:]):
        yield from asked_by_condition(place, failure.state)
        found = place.condition()
        if found is None:
            continue
        for name in [n.id for n in ast.walk(found[0]) if isinstance(n, ast.Name)]:
            if name in place.frame.f_locals and place.value(name) is None:
                yield from _given(failure, arguments, model, name)
        if found is not None:
            return


def _none(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """Something is None that is needed: the argument of that name, or one that may have become it."""
    if not _NONE.search(failure.text):
        return
    names = [name for place in reversed(failure.places) for name in none_names(place)]
    names += [word for place in failure.places[-1:] for word in re.findall(r"\w+", place.text)]
    for name in dict.fromkeys(names):
        yield from _given(failure, arguments, model, name)
    for parameter in arguments.optional:
        yield from _given(failure, arguments, model, parameter.name, most=2)


def _given(failure: Failure, arguments: Arguments, model: torch.nn.Module, name: str, most: int = 6) -> Iterator[State]:
    parameter = arguments.find(name)
    if parameter is None:
        return
    for place, want in enumerate(arguments.usual(parameter, model)):
        if place >= most:
            return
        now = dict(failure.state.wants).get(name)
        if want.kind != "none" and (now is None or now.kind == "none"):
            yield failure.state.with_want((name,), want)


def _keys(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """A key of a dict, or a dict where a tensor was given."""
    state = failure.state
    held = [name for name, want in state.wants if want.kind == "dict"]
    if isinstance(failure.error, KeyError) and failure.error.args:
        key = failure.error.args[0]
        for name in held:
            for want in _of_key(key, model):
                yield state.with_want((name, key), want)
    for place in reversed(failure.places[-2:]):
        node = place.expression()
        for one in ast.walk(node) if node is not None else ():
            if isinstance(one, ast.Subscript) and isinstance(one.value, ast.Name):
                found = place.value(one.value.id)
                key = one.slice.value if isinstance(one.slice, ast.Constant) else None
                for path in origin(found) if isinstance(key, str) else ():
                    for want in _of_key(str(key), model):
                        yield state.with_want(path, Want("dict", items=((str(key), want),)))
        for name in [n for n in held if n in place.names()]:
            for want in list(_of_key("x", model))[:1]:
                yield state.with_want((name, "x"), want)
    lists = [name for name, want in state.wants if want.kind == "list"]
    for name in lists:
        items = dict(state.wants)[name].items
        got = UNPACKED.search(failure.text)
        if isinstance(failure.error, IndexError) or got:
            wanted = int(got[1]) if got else len(items) + 1
            more = tuple((at, items[0][1]) for at in range(wanted)) if items else ()
            yield state.with_want((name,), Want("list", items=more))


def _of_key(key: object, model: torch.nn.Module) -> Iterator[Want]:
    import inspect

    parameter = inspect.Parameter(re.sub(r"\W", "_", f"{key}") or "x", inspect.Parameter.KEYWORD_ONLY)
    yield from usual(parameter, model)


def _message(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    yield from told_by_message(failure, model)


def _usual(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[Proposal]:
    """What such arguments usually are: of the blamed, of the others, and of those that may be left out."""
    tops = list(dict.fromkeys(str(path[0]) for path in failure.paths))
    for number, name in enumerate((*tops, *(n for n, _ in failure.state.wants if n not in tops))):
        parameter = arguments.find(name)
        if parameter is None:
            continue
        for want in arguments.usual(parameter, model, parameter in arguments.required[:1]):
            yield failure.state.with_want((name,), want), f"{'it' if number == 0 else 'such'} is usually so"
    for parameter in arguments.optional:
        if not failure.state.holds(parameter.name) and parameter.name in failure.text:
            for want in list(arguments.usual(parameter, model))[:3]:
                yield failure.state.with_want((parameter.name,), want), "the message names it"
    yield from ((state, "larger") for state in larger(failure.state, failure.paths))
