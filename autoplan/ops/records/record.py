"""The record of an op, which holds all that is known of it, and the two tables of records: aten ops and Python calls.

An in-place op (`add_`) has the record of its plain form. A `PythonCall` says where a torch function differs from the op
that it becomes; a call without one uses the record of the op of its name.
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
    Extent,
    Linear,
    Product,
    Random,
    Recurrent,
    Reduction,
    Shows,
    Supposed,
)
from autoplan.ops.records.on_shards import NO_SIZES, Local, Sizes, SplitOp, as_written
from autoplan.ops.records.site import Answer, Site
from autoplan.values import Op
from autoplan.values.reasons import NotPlaced

Dims = Callable[[Site], Answer]
Reduces = Callable[[SplitOp], Reduction | NotPlaced | None]
Runs = Callable[[Local], Any]
Over = Callable[[Op, int], list[int]]  # (the op, the number of dims of its first input)
Reads = Callable[[Op, Extent], tuple[int, int] | None]  # the first and last position, relative to that of the result
Moves = Callable[[Op, list[Any], Any, int], list[Any]]  # (op, a value per dim, one for new dims, dims after)


@dataclass(frozen=True)
class OpRecord:
    """One op. Fields that affect numbers have no default: adding an op means to decide about each of these."""

    name: str
    dims: Dims  # relates the dims of its outputs to those of its inputs
    sizes: Sizes  # which of its literal arguments are sizes
    reduces: Reduces  # what it sums over, and how ranks reduce that
    linear: Linear  # whether a partial sum may pass it
    random: Random  # whether it draws random numbers
    runs: Runs  # how it runs on a rank's shards
    shows: Shows = Shows.NOTHING
    product: Product | None = None
    along: Along | None = None
    alike: bool = False  # the values that it makes or adds are equal everywhere
    drawn: Drawn = Drawn.PASSED
    over: Over | None = None  # the dims over which it takes a statistic
    moves: Moves | None = None  # for a view that keeps dims intact: where each goes
    reads: Reads | None = None  # the positions of its first input that a result is made of, alike for every position
    detaches: bool = False  # no gradient comes back
    overwrites: bool = False  # overwrites its first input with its second
    tells: bool = False  # Python learns values from it: another run may branch differently
    supposed: Supposed | None = None  # the result to assume where values are unknown


@dataclass(frozen=True)
class PythonCall:
    """A torch function as Python calls it, with what differs from the op that it becomes.

    `pays`: its reduction as a whole where its ops run over a split dim, whatever theirs are. `settles`: a reduction
    that only calls that say so can have among their ops, since ranks replace the call. `divides`: by the lengths that
    it takes. `statistics`: the number of statistics per row of a norm. `loss_of_columns`: a loss that ranks can compute
    from shards of the columns of scores. `follows`: the length of its results is read off "another" argument, off "all"
    of them, or off how "long" a row is. `assigns`: it returns nothing, and its first argument is the result. `causal`:
    the argument that makes attention causal.
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
        """Return whether it is a linear layer."""
        return self.product is not None and self.product.of_rows


class Decided(TypedDict):
    """The fields of an op without a default."""

    sizes: Sizes
    reduces: Reduces
    linear: Linear
    random: Random
    runs: Runs


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
    reads: Reads
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


# The name of ops and calls that analysis removed from a trace: they have no inputs and no outputs.
REMOVED = "removed"

OPS: dict[str, OpRecord] = {}
CALLS: dict[str, PythonCall] = {}


def nothing(_: SplitOp) -> None:
    """Return no reduction: the op runs over no dim, each position is independent."""


def kept_whole(_: SplitOp) -> None:
    """Return no reduction: the op runs over dims that are never sharded, since its dim rule forbids it by an event."""


def unknown(_: Site) -> Answer:
    """Return no dims: there is no exact rule, so that no axis the op touches is split."""
    return None


# What is decided alike for many ops
INDEPENDENT: Decided = {
    "sizes": NO_SIZES, "reduces": nothing, "linear": Linear.NO, "random": NEVER, "runs": as_written}  # fmt: skip
LINEAR: Decided = {**INDEPENDENT, "linear": Linear.EACH}
LINEAR_FIRST: Decided = {**INDEPENDENT, "linear": Linear.FIRST}
UNSPLIT: Decided = {**INDEPENDENT, "reduces": kept_whole}


def op(
    *names: str, sizes: Sizes, reduces: Reduces, linear: Linear, random: Random, runs: Runs, **more: Unpack[_OfOp]
) -> Callable[[Dims], Dims]:
    """Register records of these ops (and their in-place forms). The decorated function relates their dims."""

    def register(dims: Dims) -> Dims:
        for name in names:
            assert name not in OPS, f"two records of {name}"
            OPS[name] = OpRecord(name, dims, sizes, reduces, linear, random, runs, **more)
        _forget()
        return dims

    return register


def python_call(*names: str, becomes: str = "", **said: Unpack[_OfCall]) -> None:
    """Register calls by these names, as the op that they become unless overridden. Calls that become several ops must
    give sizes, linear and random."""
    for name in names:
        assert name not in CALLS, f"two records of the call {name}"
        assert becomes in OPS or {"sizes", "linear", "random"} <= said.keys(), f"{name}: no record handles it"
        CALLS[name] = replace(_of_op(becomes) if becomes else _UNKNOWN, name=name, **said)
    _forget()


_UNKNOWN_OP = OpRecord("", unknown, NO_SIZES, nothing, Linear.NO, NEVER, as_written)
_UNKNOWN = PythonCall("", "", NO_SIZES, Linear.NO, NEVER)
_SHARED = {field.name for field in fields(OpRecord)} & {field.name for field in fields(PythonCall)}


def _of_op(name: str) -> PythonCall:
    return PythonCall(becomes=name, **{field: getattr(OPS[name], field) for field in _SHARED})


# The methods that Python calls for `x += y` and for `x[...] = y`.
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_WRITING = {f"__i{name}__" for name in _OPERATORS} | {"__setitem__"}


def writes_in_place(name: str) -> bool:
    """Return whether an op or a call of this name changes its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name in _WRITING


def _plain(name: str) -> str:
    """Return the name of the plain form of an in-place op."""
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


@cache
def op_record(name: str) -> OpRecord:
    """Return the record of an op or of its plain form. Without one, no dim that the op touches is split."""
    return OPS.get(name) or OPS.get(_plain(name)) or replace(_UNKNOWN_OP, name=name)


@cache
def call_record(name: str) -> PythonCall:
    """Return the record of a call, or that of the op of this name; a blank one for unknown calls."""
    for form in (name, _plain(name)):
        if form in CALLS:
            return CALLS[form]
        if form in OPS:
            return _of_op(form)
    return replace(_UNKNOWN, name=name)


def _forget() -> None:
    op_record.cache_clear()
    call_record.cache_clear()
