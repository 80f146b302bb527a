"""What a failure tells: other beliefs about the arguments, the most telling first, each with the reason in words.

Read are the operation that failed with what it was given, the condition that did not hold, the expression that was
running with the values of its names, and the numbers in the message. Each proposal is tried: a wrong one costs a run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from autoplan.capture.feeding.arguments import Arguments, usual
from autoplan.capture.feeding.blame import Place, none_names, places_of
from autoplan.capture.feeding.conditions import asked_by_condition
from autoplan.capture.feeding.consumers import Demand, demand_of
from autoplan.capture.feeding.resize import larger, multiples, of_kind, of_rank, resized
from autoplan.capture.feeding.wants import Path, State, Want
from autoplan.capture.feeding.watch import Watch, is_direct, origin

__all__ = ["Failure", "proposals"]

Proposal = tuple[State, str]

_UNPACKED = re.compile(r"values to unpack \(expected (?:at least )?(\d+)(?:, got (\d+))?\)")
_RANKS = (
    re.compile(r"len\(dims\) = (\d+)"),
    re.compile(r"expected (\d) dims. Received"),
    re.compile(r"[Ee]xpected (?:input to be |a |an? input of )?(\d)-?D(?:imensional)?\b"),
    re.compile(r"(?:must be|be a|expects? a?|only supports?|needs|requires?) (\d)-?[dD]\b"),
)
_TOO_MANY = re.compile(r"not (?:supported|implemented) for (\d)D")
_DIM_RANGE = re.compile(r"Dimension out of range \(expected to be in range of \[-?\d+, \d+\], but got (-?\d+)\)")
_DTYPE = re.compile(
    r"dtype|scalar type|Long|Int\b|Float|Double|floating|index tensor|data type|must be (?:long|int|float)"
    r"|indices must be"
)
_SMALL = re.compile(
    r"[Kk]ernel size|too small|Padding size|non-?empty|0 elements|zero-size|greater than|at least|[Ll]arger"
    r"|Sizes of tensors|invalid for input of size|non-zero size|index k out of range|more than 1 value|non-negative"
    r"|out of bounds"
)
_NONE = re.compile(r"NoneType|None\b")


@dataclass(frozen=True)
class Failure:
    """A run that did not end."""

    state: State
    error: Exception
    watch: Watch

    @cached_property
    def text(self) -> str:
        return str(self.error)

    @cached_property
    def places(self) -> list[Place]:
        return places_of(self.error)

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """The arguments that it is about, the surest first; all where nothing tells."""
        call = self.watch.failed
        of_call = [path for tensor in call.tensors() for path in origin(tensor)] if call is not None else []
        of_places = [path for place in reversed(self.places) for path in place.paths()]
        every = [path for path, _ in self.state.leaves()]
        known = [path for path in (*of_call, *of_places, *self.watch.last, *every) if path in every]
        return tuple(dict.fromkeys(known))

    @property
    def first_line(self) -> str:
        return next(iter(self.text.strip().splitlines()), "")


def proposals(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[Proposal]:
    """Other states, the most telling first."""
    for found in (_other, _consumer, _condition, _none, _keys, _rank, _pattern, _dtype, _range, _sizes, _larger):
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
        got = _UNPACKED.search(failure.text)
        if isinstance(failure.error, IndexError) or got:
            wanted = int(got[1]) if got else len(items) + 1
            more = tuple((at, items[0][1]) for at in range(wanted)) if items else ()
            yield state.with_want((name,), Want("list", items=more))


def _of_key(key: object, model: torch.nn.Module) -> Iterator[Want]:
    import inspect

    parameter = inspect.Parameter(re.sub(r"\W", "_", f"{key}") or "x", inspect.Parameter.KEYWORD_ONLY)
    yield from usual(parameter, model)


def _rank(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """How many dims: what was unpacked, a dim that is not there, a number in the message."""
    text, state = failure.text, failure.state
    unpacked = _UNPACKED.search(text)
    for path in failure.paths[:4]:
        leaf = state.at(path)
        if leaf is None:
            continue
        now, ranks = len(leaf.shape), []
        if unpacked:
            wanted = int(unpacked[1])
            got = int(unpacked[2]) if unpacked[2] else None
            ranks += [now + wanted - got] if got is not None else [wanted, now - 1]
            ranks.append(wanted)
        outside = _DIM_RANGE.search(text)
        if outside:
            dim = int(outside[1])
            ranks += [dim + 1, now + 1] if dim >= 0 else [-dim, now + 1]
        if re.search(r"too many indices|0-d tensor|0-dim", text):
            ranks += [now + 1, now + 2]
        for pattern in _RANKS:
            ranks += [int(found) for found in pattern.findall(text)]
        if re.search(r"number of dimensions|must have .*dim", text):
            ranks += [now + 1, now - 1]
        if _TOO_MANY.search(text):
            ranks += [now - 1, now + 1]
        for rank in dict.fromkeys(ranks):
            yield from of_rank(state, path, rank, _first_channels(model, rank))
            yield from of_rank(state, path, rank)


def _first_channels(model: torch.nn.Module, rank: int) -> int:
    kinds = {3: torch.nn.Conv1d, 4: torch.nn.Conv2d, 5: torch.nn.Conv3d}
    layers = (m for m in model.modules() if rank in kinds and isinstance(m, kinds[rank]))
    return next((m.in_channels for m in layers if isinstance(m.in_channels, int)), 0)


def _pattern(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """Of einops: what its pattern divides must divide, and how many dims it names."""
    text, state = failure.text, failure.state
    pattern = re.search(r'pattern "([^"]+?)->', text)
    shape = re.search(r"Input tensor shape: (?:torch\.Size\()?[\[(]([\d, ]*)[\])]", text)
    if not pattern or not shape:
        return
    got = [int(n) for n in re.findall(r"\d+", shape[1])]
    sizes = {name: int(n) for name, n in re.findall(r"'(\w+)': (\d+)", text)}
    groups = re.findall(r"\([^)]*\)|\.\.\.|\S+", pattern[1])
    if "..." not in groups and len(groups) != len(got):
        for path in failure.paths[:3]:
            leaf = state.at(path)
            if leaf is not None:
                rank = len(leaf.shape) + len(groups) - len(got)
                yield from of_rank(state, path, rank, _first_channels(model, rank))
                yield from of_rank(state, path, rank)
        return
    for group, have in zip(groups, got, strict=False):
        words = re.findall(r"\w+", group)
        product = 1
        for word in words:
            product *= sizes.get(word, int(word) if word.isdigit() else 1)
        if all(word in sizes or word.isdigit() for word in words) and product != have:
            yield from resized(state, failure.paths, have, product)
        elif product > 1 and have % product:
            yield from multiples(state, failure.paths, have, product)


def _dtype(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """Whole numbers where floats were given, or floats where whole numbers were."""
    if not _DTYPE.search(failure.text):
        return
    asks_ids = re.search(
        r"index tensor|indices|to have one of the following scalar types: Long|LongTensor", failure.text
    )
    order = ("ids", "float", "bool") if asks_ids else ("float", "ids", "bool", "complex")
    for path in failure.paths[:3]:
        for kind in order:
            yield from of_kind(failure.state, path, kind)


def _range(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """Ids that are too large, or a sequence that is longer than a table of positions."""
    if not isinstance(failure.error, IndexError | RuntimeError) or not re.search(
        r"out of (?:range|bounds)|smaller than num_classes|must be .*less than|larger than|interval", failure.text
    ):
        return
    state = failure.state
    limits = [int(n) for n in re.findall(r"with size (\d+)", failure.text)]
    for path in failure.paths[:3]:
        leaf = state.at(path)
        for below in (*limits, 2, 1):
            if leaf is not None and leaf.kind == "ids" and leaf.below != below:
                yield from of_kind(state, path, "ids", below)
    for limit in limits:
        yield from resized(state, failure.paths, state.sizes["length"], limit)
    for shorter in (8, 4):
        yield state.with_size("length", shorter)


def _sizes(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    """Numbers in the message that are sizes of arguments, and what stands beside them."""
    numbers = list(dict.fromkeys(int(n) for n in re.findall(r"(?<![\w.])\d{1,6}(?![\w.]*\d)", failure.text)))[:10]
    products = [(int(a), int(b)) for a, b in re.findall(r"\(\d+x(\d+) and (\d+)x\d+\)", failure.text)]
    numbers = list(dict.fromkeys([*(n for pair in products for n in pair), *numbers]))[:12]
    state, paths = failure.state, failure.paths
    sizes = {n for path in paths if (leaf := state.at(path)) for n in leaf.sizes(state.sizes)[1:]}
    pairs = [(have, want) for have in numbers for want in numbers if have != want and want > 1]
    pairs.sort(key=lambda pair: (pair[0] not in sizes, numbers.index(pair[0])))
    for have, want in pairs[:12]:
        yield from resized(state, paths, have, want)


def _larger(failure: Failure, arguments: Arguments, model: torch.nn.Module) -> Iterator[State]:
    if _SMALL.search(failure.text) or isinstance(failure.error, ZeroDivisionError):
        yield from larger(failure.state, failure.paths)


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
