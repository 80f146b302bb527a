"""All that is known of an op, in one record, and the two tables of records.

Analysis asks how dims follow, which literals are sizes, where ranks must sum, whether a sum can wait, what is random.
Replay asks how the op runs on shards. If each of them kept lists of its own, the lists would drift; so each op has one
record, in the file of its family, and whoever asks reads it there. The in-place form of an op (`add_`) has the
record of the plain form.

A model's Python calls torch by other names than those of the ops it becomes (`x @ w`, `F.linear`, `F.layer_norm`).
`PythonCall` says what is different about such a call; a call without one is answered for by the op of its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from typing import Any, Literal

from autoplan.ops.records.on_shards import Local, SplitOp, as_written
from autoplan.ops.records.site import Answer, Site
from autoplan.ops.records.sizes import NO_SIZES, Sizes
from autoplan.values.reasons import NotPlaced

__all__ = [
    "ALWAYS",
    "CALLS",
    "NEVER",
    "OPS",
    "Along",
    "Drawn",
    "Linear",
    "OpRecord",
    "Product",
    "PythonCall",
    "Random",
    "Reduction",
    "Runs",
    "Shows",
    "by_rate",
    "call_record",
    "kept_whole",
    "nothing",
    "op",
    "python_call",
    "op_record",
    "unknown",
    "writes_in_place",
]


class Reduction(StrEnum):
    """What ranks must do where an op runs over a dim of which each has a shard."""

    SUM = "sum"  # each rank has a part of the sum
    MEAN = "mean"  # each rank has the mean of its shard
    NORM = "norm"  # a norm's statistics run over all ranks
    VARIANCE = "variance"  # a variance or standard deviation
    LENGTH = "length"  # the length of a vector
    EMBEDDING = "embedding"  # a lookup in a table whose rows are sharded
    ROW = "row"  # the same for one row, told by its number
    GATHER = "gather"  # a product whose result is put together, by decision
    ATTENTION = "attention"  # projections and attention in one call, on a rank's heads


class Linear(StrEnum):
    """May a partial sum pass the op, to be summed later?"""

    # Not linear; or linear, yet the sum is done before it: what a product multiplies it with would need a sum itself,
    # and a part or a statistic of a value is mostly read together with the value.
    NO = "no"
    # The same between calls. In the middle of a call, where nobody can pay, linear in all of its tensors together.
    WITHIN = "within"
    EACH = "each"  # linear in each of its tensors, while the others are whole
    FIRST = "first"  # linear in its first tensor only
    ADDS = "adds"  # adds a bias, of which each rank adds its part, or another partial sum
    SUBTRACTS = "subtracts"  # as linear as a sum, but what is taken away changes its sign: sums do not pass


class Shows(StrEnum):
    """What of its first input the first output shows. What shows a weight is a weight."""

    NOTHING = "nothing"
    RESHAPED = "reshaped"  # all of it, in the same order and memory
    VIEWED = "viewed"  # the same memory, in parts or in another order
    COPIED = "copied"  # all of it, elsewhere or in another precision
    PICKED = "picked"  # some of its elements, elsewhere
    REPEATED = "repeated"  # all of its elements, several times


@dataclass(frozen=True)
class Random:
    """When an op draws random numbers: never, always, or where a rate says so (dropout, in training)."""

    when: Literal["never", "always", "rate"]
    rate: tuple[int, str, float] = (-1, "", 1.0)  # where the rate stands, its name, and what it is if it is not told

    def __bool__(self) -> bool:
        return self.when != "never"

    def may_draw(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Does the op draw when it is called so, if the model is trained?"""
        if self.when != "rate":
            return self.when == "always"
        position, name, default = self.rate
        rate = args[position] if len(args) > position >= 0 else kwargs.get(name, default)
        return bool(rate != 0.0)

    def has_rate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Could the op draw if it were called again from here? A model that is evaluated tells a rate of 0 where it
        tells another one in training; where none is told at all, the default stays."""
        position, name, default = self.rate
        told = len(args) > position >= 0 or name in kwargs
        return self.when == "always" or (self.when == "rate" and (told or default != 0.0))


NEVER = Random("never")
ALWAYS = Random("always")


def by_rate(position: int, name: str = "p", default: float = 0.5) -> Random:
    """Draws where the argument that is its rate is not 0."""
    return Random("rate", (position, name, default))


@dataclass(frozen=True)
class Product:
    """Where the operands of a product are that sums over their common dim, and the bias if it takes one.

    `out`: the dim of the weight that the result has, and where the result has it. None: no such product is gathered.
    """

    value: int
    weight: int
    bias: int | None = None
    out: tuple[int, int] | None = None


@dataclass(frozen=True)
class Along:
    """What an op does to positions along a dim: it "picks" some, "parts" them, or "scatters" them to other places.

    `dim`: which argument says the dim.
    """

    what: str
    dim: int = 1


class Drawn(StrEnum):
    """How an op is drawn in the picture of a block (`analyse/picture`)."""

    PASSED = "passed"  # no box: a view or an elementwise op
    CONTRACTION = "contraction"
    CONVOLUTION = "convolution"
    LOOKUP = "lookup"
    ROWS = "rows"  # a lookup, if it is of a weight
    NORM = "norm"
    ATTENTION = "attention"
    SPLIT = "split"
    STATISTIC = "statistic"
    SOFTMAX = "softmax"
    TOPK = "topk"
    CUMSUM = "cumsum"
    SUM = "sum"
    PICK = "pick"
    SCATTER = "scatter"
    ACTIVATION = "activation"  # no box, but what it is joined to knows
    ADD = "add"
    MUL = "mul"
    CAT = "cat"


Dims = Callable[[Site], Answer]
Reduces = Callable[[SplitOp], Reduction | NotPlaced | None]
Runs = Callable[[Local], Any]


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


@dataclass(frozen=True)
class PythonCall:
    """A torch function as Python calls it: what of the op that it becomes is said otherwise.

    `pays`: what it is as a whole where its ops run over a split dim, whatever they are one by one. `settles`: what only
    calls that say so can have among their ops, for ranks do it in the place of the call. `divides`: by the lengths that
    it takes. `loss_of_columns`: a loss that ranks can compute of scores of which each holds some columns.
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
    pays: Reduction | NotPlaced | None = None
    settles: Reduction | None = None
    divides: bool = False
    loss_of_columns: bool = False


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
    *names: str,
    sizes: Sizes,
    reduces: Reduces,
    linear: Linear,
    random: Random,
    runs: Runs,
    shows: Shows = Shows.NOTHING,
    product: Product | None = None,
    along: Along | None = None,
    alike: bool = False,
    drawn: Drawn = Drawn.PASSED,
) -> Callable[[Dims], Dims]:
    """Register records of these ops (and their in-place forms). The decorated function says how their dims follow."""

    def register(dims: Dims) -> Dims:
        for name in names:
            assert name not in OPS, f"two records of {name}"
            OPS[name] = OpRecord(
                name, dims, sizes, reduces, linear, random, runs, shows, product, along, alike, drawn
            )  # fmt: skip
        _forget()
        return dims

    return register


def python_call(
    *names: str,
    becomes: str = "",
    sizes: Sizes | None = None,
    linear: Linear | None = None,
    random: Random | None = None,
    shows: Shows | None = None,
    product: Product | None = None,
    along: Along | None = None,
    pays: Reduction | NotPlaced | None = None,
    settles: Reduction | None = None,
    divides: bool = False,
    loss_of_columns: bool = False,
) -> None:
    """Register calls by these names. What is not said is as the op says that they become; if they become several ops,
    sizes, linear and random must be said."""
    for name in names:
        assert name not in CALLS, f"two records of the call {name}"
        assert becomes in OPS or None not in (sizes, linear, random), f"{name}: no op answers for it"
        known = _of_op(becomes) if becomes else _UNKNOWN
        said = {"sizes": sizes, "linear": linear, "random": random, "shows": shows, "product": product, "along": along}
        given = {field: value for field, value in said.items() if value is not None}
        own = {"pays": pays, "settles": settles, "divides": divides, "loss_of_columns": loss_of_columns}
        CALLS[name] = replace(known, name=name, **given, **own)  # type: ignore[arg-type]
    _forget()


_UNKNOWN_OP = OpRecord("", unknown, NO_SIZES, nothing, Linear.NO, NEVER, as_written)
_UNKNOWN = PythonCall("", "", NO_SIZES, Linear.NO, NEVER)


def _of_op(name: str) -> PythonCall:
    known = OPS[name]
    return PythonCall(
        name, name, known.sizes, known.linear, known.random, known.shows, known.product, known.along, known.alike
    )  # fmt: skip


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
    """The record of an op; an in-place op has that of its plain form. Of an op without one nothing is known: all dims
    that it touches stay whole."""
    return OPS.get(name) or OPS.get(_plain(name)) or replace(_UNKNOWN_OP, name=name)


@cache
def call_record(name: str) -> PythonCall:
    """What is known of a call by its name: its own record, or that of the op of this name. Never None: of a call that
    nobody knows nothing is known."""
    for form in (name, _plain(name)):
        if form in CALLS:
            return CALLS[form]
        if form in OPS:
            return _of_op(form)
    return replace(_UNKNOWN, name=name)


def _forget() -> None:
    op_record.cache_clear()
    call_record.cache_clear()
