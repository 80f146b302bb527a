"""All that is known of an op, in one record, and the two tables of records: of aten ops and of Python's calls.

An in-place op (`add_`) has the record of its plain form. `PythonCall` says where a call of torch differs from the op
that it becomes; a call without one is answered for by the op of its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal, TypedDict, Unpack

from autoplan.ops.records.answers import (
    NEVER,
    Along,
    Drawn,
    Linear,
    Product,
    Random,
    Recurrent,
    Reduction,
    Shows,
    Supposed,
)
from autoplan.ops.records.on_shards import Local, SplitOp, as_written
from autoplan.ops.records.site import Answer, Site
from autoplan.ops.records.sizes import NO_SIZES, Sizes
from autoplan.values import Op
from autoplan.values.reasons import NotPlaced

Dims = Callable[[Site], Answer]
Reduces = Callable[[SplitOp], Reduction | NotPlaced | None]
Runs = Callable[[Local], Any]
Over = Callable[[Op, int], list[int]]  # of the op and how many dims its first input has
Moves = Callable[[Op, list[Any], Any, int], list[Any]]  # of the op, something for each dim, for a new dim, dims after


@dataclass(frozen=True)
class OpRecord:
    """One op. What decides about numbers has no default: whoever adds an op answers for each of these."""

    name: str
    dims: Dims  # how the dims of its outputs follow from those of its inputs
    sizes: Sizes  # which of the literals that it is told are sizes
    reduces: Reduces  # what it sums over, and how ranks do that together
    linear: Linear  # may a partial sum pass it
    random: Random  # does it draw random numbers
    runs: Runs  # how it runs on a rank's shards
    shows: Shows = Shows.NOTHING
    product: Product | None = None
    along: Along | None = None
    alike: bool = False  # what it makes or adds is the same at every position
    drawn: Drawn = Drawn.PASSED
    over: Over | None = None  # the dims that it takes a statistic over
    moves: Moves | None = None  # of a view that keeps dims whole: where each of them goes
    detaches: bool = False  # no gradient comes back
    overwrites: bool = False  # its first input becomes its second, whatever it held
    tells: bool = False  # Python gets to know what values it found: another run may go another way
    supposed: Supposed | None = None  # what it may be supposed to find where values are unknown


@dataclass(frozen=True)
class PythonCall:
    """A torch function as Python calls it: what of the op that it becomes is said otherwise.

    `pays`: what it is as a whole where its ops run over a split dim, whatever they are one by one. `settles`: what only
    calls that say so can have among their ops, for ranks do it in the place of the call. `divides`: by the lengths that
    it takes. `statistics`: how many numbers a row a norm takes. `loss_of_columns`: a loss that ranks can compute of
    scores of which each holds some columns. `follows`: how long its results are is read off "another" argument, off
    "all" of them, or off how "long" a row is. `assigns`: it returns nothing, for its first argument is what it makes.
    `causal`: where attention is told that it is.
    """

    name: str
    becomes: str
    sizes: Sizes
    linear: Linear
    random: Random
    shows: Shows = Shows.NOTHING
    product: Product | None = None
    along: Along | None = None
    alike: bool = False
    detaches: bool = False
    pays: Reduction | NotPlaced | None = None
    settles: Reduction | None = None
    divides: bool = False
    statistics: int = 0
    loss_of_columns: bool = False
    follows: Literal["", "another", "all", "long"] = ""
    assigns: bool = False
    causal: tuple[int, str] | None = None
    recurrent: Recurrent | None = None

    @property
    def is_layer(self) -> bool:
        """Is it a linear layer?"""
        return self.product is not None and self.product.of_rows


class _OfBoth(TypedDict, total=False):
    shows: Shows
    product: Product | None
    along: Along | None
    alike: bool
    detaches: bool


class _OfOp(_OfBoth, total=False):
    drawn: Drawn
    over: Over
    moves: Moves
    overwrites: bool
    tells: bool
    supposed: Supposed


class _OfCall(_OfBoth, total=False):
    sizes: Sizes
    linear: Linear
    random: Random
    pays: Reduction | NotPlaced
    settles: Reduction
    divides: bool
    statistics: int
    loss_of_columns: bool
    follows: Literal["another", "all", "long"]
    assigns: bool
    causal: tuple[int, str]
    recurrent: Recurrent


# What became of the ops and calls that analysis took out of a trace: nothing goes in, nothing comes out.
REMOVED = "removed"

OPS: dict[str, OpRecord] = {}
CALLS: dict[str, PythonCall] = {}


def nothing(_: SplitOp) -> None:
    """It runs over no dim: each position is worked on by itself."""


def kept_whole(_: SplitOp) -> None:
    """It runs over dims that no rank has a shard of: its dim rule leaves an event on them that forbids it."""


def unknown(_: Site) -> Answer:
    """No exact rule for its dims: all that it touches stays whole."""
    return None


def op(
    *names: str, sizes: Sizes, reduces: Reduces, linear: Linear, random: Random, runs: Runs, **more: Unpack[_OfOp]
) -> Callable[[Dims], Dims]:
    """Register records of these ops (and their in-place forms). The decorated function says how their dims follow."""

    def register(dims: Dims) -> Dims:
        for name in names:
            assert name not in OPS, f"two records of {name}"
            OPS[name] = OpRecord(name, dims, sizes, reduces, linear, random, runs, **more)
        _forget()
        return dims

    return register


def python_call(*names: str, becomes: str = "", **said: Unpack[_OfCall]) -> None:
    """Register calls by these names, as the op that they become unless said otherwise. Calls that become several ops
    must say sizes, linear and random."""
    for name in names:
        assert name not in CALLS, f"two records of the call {name}"
        assert becomes in OPS or {"sizes", "linear", "random"} <= said.keys(), f"{name}: no op answers for it"
        CALLS[name] = replace(_of_op(becomes) if becomes else _UNKNOWN, name=name, **said)
    _forget()


_UNKNOWN_OP = OpRecord("", unknown, NO_SIZES, nothing, Linear.NO, NEVER, as_written)
_UNKNOWN = PythonCall("", "", NO_SIZES, Linear.NO, NEVER)
_SHARED = {field.name for field in fields(OpRecord)} & {field.name for field in fields(PythonCall)}


def _of_op(name: str) -> PythonCall:
    return PythonCall(becomes=name, **{field: getattr(OPS[name], field) for field in _SHARED})


# What Python calls for `x += y` and for `x[...] = y`.
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_WRITING = {f"__i{name}__" for name in _OPERATORS} | {"__setitem__"}


def writes_in_place(name: str) -> bool:
    """Does an op or a call of this name change its first argument?"""
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITING


def _plain(name: str) -> str:
    """The name of the plain form of an in-place op."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@cache
def op_record(name: str) -> OpRecord:
    """The record of an op or of its plain form. Without one, all dims that the op touches stay whole."""
    return OPS.get(name) or OPS.get(_plain(name)) or replace(_UNKNOWN_OP, name=name)


@cache
def call_record(name: str) -> PythonCall:
    """The record of a call, or that of the op of this name; a blank one for unknown calls."""
    for form in (name, _plain(name)):
        if form in CALLS:
            return CALLS[form]
        if form in OPS:
            return _of_op(form)
    return replace(_UNKNOWN, name=name)


def _forget() -> None:
    op_record.cache_clear()
    call_record.cache_clear()
