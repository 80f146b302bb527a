"""Derive inputs from an error's text: numbers of dims, kinds of numbers, sizes.

Libraries say these in so many ways that each number is taken for everything that it may be, and tried.

Keys of dicts, and lengths of lists and tuples, are derived here too; plain arguments are in told.py. A dict may be an
argument, an item of one, or built by the model from arguments: then the key belongs to the argument.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from math import isqrt, prod

import torch

from autoplan.capture.feeding.arguments import field_of, of_items, of_nodes, usual
from autoplan.capture.feeding.conditions import keys_asked_for, value_of
from autoplan.capture.feeding.failure import Failure, Place
from autoplan.capture.feeding.names import usual_names
from autoplan.capture.feeding.resize import of_kind, of_rank, of_vectors, resized
from autoplan.capture.feeding.wants import Path, State, Want
from autoplan.capture.feeding.watch import is_direct, origin
from autoplan.common.nested import flatten_tensors

_UNPACKED = re.compile(r"values to unpack \(expected (?:at least )?(\d+)(?:, got (\d+))?\)")
_NONE = re.compile(r"NoneType|None\b")
_RANKS = (
    re.compile(r"len\(dims\) = (\d+)"),
    re.compile(r"expected (\d) dims. Received"),
    re.compile(r"[Ee]xpected (?:input to be |a |an? input of )?(\d)-?D(?:imensional)?\b"),
    re.compile(r"(?:must be|be a|expects? a?|only supports?|needs|requires?) (\d)-?[dD]\b"),
)
_UNLIKE = re.compile(r"same number of dimensions: got (\d+) and (\d+)")
_SHAPES = re.compile(r"shape = \[([\d, ]*)\]")
_TURNED = re.compile(r"input\.dim\(\) = (\d+) is not equal to len\(dims\) = (\d+)")
_EXPANDED = re.compile(r"number of sizes provided \((\d+)\) must be greater or equal .* \((\d+)\)")
_DRAWN = re.compile(
    r"broadcastable with batch_shape\+event_shape: torch.Size\(\[[\d, ]*\]\) vs torch.Size\(\[([\d, ]*)\]\)"
)
_OUTSIDE = re.compile(r"index (-?\d+) is out of bounds for dimension (?P<dim>\d+) with size (?P<size>\d+)")
_SPLIT = re.compile(r"sum exactly to (\d+) .*split_sizes=\[([\d, ]+)\]")
_ASKED = re.compile(r"(?:[Ee]xpected|have length) (\d+)[,.]? (?:but )?[Gg]ot (\d+)")
_BATCHED = re.compile(r"of batch2 tensor to be: \[\d+, (\d+)\] but got: \[\d+, (\d+)\]")
_TOO_MANY = re.compile(r"not (?:supported|implemented) for (\d)D")
_DIM_RANGE = re.compile(r"Dimension out of range \(expected to be in range of \[-?\d+, \d+\], but got (-?\d+)\)")
_DTYPE = re.compile(
    r"dtype|scalar type|Long|Int\b|Float|Double|floating|index tensor|data type|must be (?:long|int|float)"
    r"|indices must be"
)
_NUMBER = re.compile(
    r"cannot be interpreted as an integer|must be (?:tuple of ints|int), not Tensor|received an invalid combination"
    r"|only integer tensors of a single element|an integer is required|must be int|Boolean value of Tensor"
)
_BELOW_NOTHING = re.compile(r"negative dimension (-\d+)")
_VIEWED = re.compile(r"shape '\[([\d, ]+)\]' is invalid for input of size (\d+)")


def told_by_message(failure: Failure) -> Iterator[State]:
    """Yield other states, the most specific first."""
    for derived in (_rank, _masks, _plain_number, _dtype, _sizes):
        yield from derived(failure)


def too_small(failure: Failure) -> bool:
    """Return whether the error says that a size is too small."""
    return "too small" in failure.text


def sizes_differ(failure: Failure) -> bool:
    """Return whether the error says that two sizes must match."""
    return "must match" in failure.text


def ranks_differ(text: str) -> bool:
    """Return whether an error says that two numbers of dims must match."""
    return "number of dim" in text


def lacks_a_value(failure: Failure) -> bool:
    """Return whether the error says that something is None."""
    return _NONE.search(failure.text) is not None


def is_named(failure: Failure, name: str) -> bool:
    """Return whether the error names an argument."""
    return name in failure.text


def unpacked(failure: Failure) -> tuple[int, int | None] | None:
    """Return how many values were expected in an unpacking, and how many there were, if the error says so."""
    match = _UNPACKED.search(failure.text)
    return (int(match[1]), int(match[2]) if match[2] else None) if match else None


def _rank(failure: Failure) -> Iterator[State]:
    """Yield states with other ranks: from an unpacking, a dim that does not exist, or a number in the message."""
    text, state = failure.text, failure.state
    parts = unpacked(failure)
    unlike = [(int(a), int(b)) for a, b in _UNLIKE.findall(text)]  # concatenated: both need the same rank
    for path, leaf in state.among(failure.blamed):
        for a, b in unlike:
            for rank in dict.fromkeys((a, b, len(leaf.shape) + b - a, len(leaf.shape) + a - b)):
                yield from of_rank(state, path, rank)
    if "D or 2D" in text:  # a cell, which takes one step
        yield from of_vectors(state, 2)
    shapes = [len(shape.split(",")) for shape in _SHAPES.findall(text)]
    for path, leaf in state.among(failure.paths[:4]):
        now, ranks = len(leaf.shape), []
        if parts:
            wanted, there = parts
            ranks += [now + wanted - there] if there is not None else [wanted, now - 1]
            ranks.append(wanted)
        outside = _DIM_RANGE.search(text)
        if outside:
            dim = int(outside[1])
            ranks += [dim + 1, now + 1] if dim >= 0 else [-dim, now + 1]
        if "For unbatched 2-D input" in text:
            ranks.append(3)
        if re.search(r"too many indices|0-d tensor|0-dim", text):
            ranks += [now + 1, now + 2]
        turned = _TURNED.search(text)
        if turned:
            ranks.append(now + int(turned[2]) - int(turned[1]))
        short = _EXPANDED.search(text)
        if short:
            ranks.append(now + int(short[1]) - int(short[2]))
        if len(shapes) == 2 and shapes[0] != shapes[1]:
            ranks += [now + shapes[0] - shapes[1], now + shapes[1] - shapes[0]]
        drawn = _DRAWN.search(text)  # from a distribution
        if drawn:
            ranks.append(len(drawn[1].split()))
        for pattern in _RANKS:
            ranks += [int(number) for number in pattern.findall(text)]
        if re.search(r"number of dimensions|must have .*dim", text):
            ranks += [now + 1, now - 1]
        if _TOO_MANY.search(text):
            ranks += [now - 1, now + 1]
        for rank in dict.fromkeys(ranks):
            yield from of_rank(state, path, rank, _first_channels(failure.model, rank))
            yield from of_rank(state, path, rank)


def _first_channels(model: torch.nn.Module, rank: int) -> int:
    kinds = {3: torch.nn.Conv1d, 4: torch.nn.Conv2d, 5: torch.nn.Conv3d}
    layers = (m for m in model.modules() if rank in kinds and isinstance(m, kinds[rank]))
    return next((m.in_channels for m in layers if isinstance(m.in_channels, int)), 0)


def _masks(failure: Failure) -> Iterator[State]:
    """Yield a state whose masks are numbers instead of booleans: all of them, since they share a convention."""
    if "bool tensor is not supported" in failure.text or "dtype bool" in failure.text.lower():
        state = failure.state
        for path, leaf in failure.state.leaves():
            if leaf.kind == "bool":
                state = state.with_want(path, replace(leaf, kind="ones"))
        yield state


def _plain_number(failure: Failure) -> Iterator[State]:
    """Yield states with a plain number in place of a tensor."""
    if not _NUMBER.search(failure.text):
        return
    for path in failure.blamed or failure.paths[:2]:
        yield failure.state.with_want(path, Want("size", value="length"))
        yield failure.state.with_want(path, Want("value", value=0))


def _dtype(failure: Failure) -> Iterator[State]:
    """Yield states with integers in place of floats, or the reverse."""
    if not _DTYPE.search(failure.text):
        return
    asks_ids = re.search(
        r"index tensor|indices|to have one of the following scalar types: Long|LongTensor", failure.text
    )
    order = ("ids", "float", "bool") if asks_ids else ("float", "ids", "bool", "complex")
    for path in failure.paths[:3]:
        for kind in order:
            yield from of_kind(failure.state, path, kind)


def index_outside(failure: Failure) -> tuple[int, int, int] | None:
    """Return the dim that was indexed beyond its end, the index and the size."""
    outside = _OUTSIDE.search(failure.text)
    return None if outside is None else (int(outside["dim"]), int(outside[1]), int(outside["size"]))


def _sizes(failure: Failure) -> Iterator[State]:
    """Yield states in which sizes that the message names are replaced by other numbers in it."""
    yield from _shorter(failure)
    numbers = list(dict.fromkeys(int(n) for n in re.findall(r"(?<![\w.])\d{1,6}(?![\w.]*\d)", failure.text)))[:10]
    products = [(int(a), int(b)) for a, b in re.findall(r"\(\d+x(\d+) and (\d+)x\d+\)", failure.text)]
    numbers = list(dict.fromkeys([*(n for pair in products for n in pair), *numbers]))[:12]
    state, paths = failure.state, failure.paths
    sizes = {n for path in paths if (leaf := state.at(path)) for n in leaf.sizes(state.sizes)[1:]}
    outside = index_outside(failure)
    if outside is not None and outside[1] >= 0:
        yield from resized(state, paths, outside[2], outside[1] + 1)
    for have, want in _BATCHED.findall(failure.text):
        yield from resized(state, failure.blamed, int(have), int(want))
    expected = _ASKED.search(failure.text)
    if expected:
        yield from resized(state, failure.blamed, int(expected[2]), int(expected[1]))
    split = _SPLIT.search(failure.text)
    if split:
        yield from resized(state, paths, int(split[1]), sum(map(int, split[2].split(","))))
    yield from _viewed(failure)
    pairs = [(have, want) for have in numbers for want in numbers if have != want and want > 1]
    pairs.sort(key=lambda pair: (pair[0] not in sizes, numbers.index(pair[0])))
    for have, want in pairs[:12]:
        yield from resized(state, paths, have, want)


def _shorter(failure: Failure) -> Iterator[State]:
    """Yield states with larger sizes, where a computed size was negative."""
    less = _BELOW_NOTHING.search(failure.text)
    if less is None:
        return
    for path in failure.blamed:
        leaf = failure.state.at(path)
        for size in leaf.sizes(failure.state.sizes)[1:] if leaf is not None else ():
            yield from resized(failure.state, (path,), size, size + int(less[1]))


def _viewed(failure: Failure) -> Iterator[State]:
    """Yield states in which one size of a failed view fits the number of elements."""
    viewed = _VIEWED.search(failure.text)
    if viewed is None:
        return
    shape = [int(n) for n in viewed[1].split(",")]
    for size in dict.fromkeys(shape) if min(shape) > 0 else ():
        wanted, rest = divmod(int(viewed[2]) * size, prod(shape))
        if not rest:
            yield from resized(failure.state, failure.paths, size, wanted)
    if len(shape) > 2 and shape[-1] == shape[-2] > 0 and min(shape) > 0:  # positions × positions
        have = isqrt(int(viewed[2]) // prod(shape[:-2]))
        if have**2 * prod(shape[:-2]) == int(viewed[2]):
            yield from resized(failure.state, failure.paths, have, shape[-1])


_FEW = 6


def keys(failure: Failure) -> Iterator[State]:
    """Yield states with a key that a dict lacks, a dict in place of a tensor, or a list as long as it is unpacked."""
    dicts, model = [path for path, _ in failure.state.holding("dict")], failure.model
    if isinstance(failure.error, KeyError) and failure.error.args:
        yield from _missing(failure, failure.error.args[0], dicts)
    for place in reversed(failure.places[-2:]):
        for path in dicts:
            yield from _asked(failure.state, path, keys_asked_for(place), model)
    for path in dicts:  # one that is gone through, for parts that have names
        if not failure.state.inner(path).items:
            for names in {tuple(m): None for m in model.modules() if isinstance(m, torch.nn.ModuleDict)}:
                yield failure.state.with_want(path, of_items("dict", {n: field_of(None, n) for n in names}, model))
    for place in reversed(failure.places[-2:]):
        yield from _subscripts(failure.state, place, model)
        for path in [p for p in dicts if p[0] in place.names()]:
            for want in list(_of_key("x", model))[:1]:
                yield failure.state.with_want((*path, "x"), want)


def _missing(failure: Failure, key: object, held: list[Path]) -> Iterator[State]:
    state, arguments, model = failure.state, failure.arguments, failure.model
    if not isinstance(key, str | int):
        yield from _from_table(failure, key)
        return
    if arguments.open and isinstance(key, str) and key.isidentifier() and not state.holds(key):
        yield from (state.with_want((key,), want) for want in itertools.islice(_of_key(key, model), _FEW))
    for parameter in arguments.optional if not held else ():  # a dict that may be left out
        yield from (state.with_want((parameter.name, key), want) for want in itertools.islice(_of_key(key, model), 3))
    for path in held:
        if key in dict(state.inner(path).items):
            continue
        wants = list(_of_key(key, model))
        if usual_names().has_edges(key for key, _ in state.inner(path).items):  # positions of nodes are points
            wants = sorted(map(of_nodes, wants), key=lambda want: want.kind == "positions")
        yield from (state.with_want((*path, key), want) for want in wants)


def _from_table(failure: Failure, key: object) -> Iterator[State]:
    """Yield states for `table[v] for v in names` in which the argument is or lists keys of the table."""
    paths = [path for _, tensor in flatten_tensors(key) for path in origin(tensor)]
    for place in failure.places[-2:]:
        node = place.expression()
        for inner in ast.walk(node) if node is not None else ():
            table = value_of(place, inner.value) if isinstance(inner, ast.Subscript) else None
            if isinstance(table, dict) and table and all(isinstance(key, str) for key in table):
                for path in dict.fromkeys(paths):
                    yield failure.state.with_want(path, Want("value", value=next(iter(table))))
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
