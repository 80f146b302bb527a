"""Values for the fields of a record: small closed sets of answers, and positions of arguments."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal


class Reduction(StrEnum):
    """The reduction that ranks must do where an op runs over a dim that is sharded."""

    SUM = "sum"  # each rank has a part of the sum
    MEAN = "mean"  # each rank has the mean of its shard
    NORM = "norm"  # a norm's statistics run over all ranks
    VARIANCE = "variance"  # a variance or standard deviation
    LENGTH = "length"  # the length of a vector
    EMBEDDING = "embedding"  # a lookup in a table whose rows are sharded
    ROW = "row"  # the same for one row, given its index
    GATHER = "gather"  # a product whose result is gathered, by decision
    ATTENTION = "attention"  # projections and attention in one call, on the local heads


class Linear(StrEnum):
    """The way in which a partial sum may pass the op, to be summed later."""

    # Not linear; or linear, but reduced before it: delaying the all-reduce past a product would force another one on
    # the other operand, and a slice or a statistic of a value is mostly read together with the value.
    NO = "no"
    # As NO between calls. Inside a fused call, where no collective can be inserted, linear in all of its tensors.
    WITHIN = "within"
    EACH = "each"  # linear in each of its tensors, while the others are replicated
    FIRST = "first"  # linear in its first tensor only
    ADDS = "adds"  # adds a bias, of which each rank adds its part, or another partial sum
    SUBTRACTS = "subtracts"  # linear, but the subtrahend changes its sign: sums do not pass


class Shows(StrEnum):
    """The relation of the first output to the first input. What shows a weight is a weight."""

    NOTHING = "nothing"
    RESHAPED = "reshaped"  # all of it, in the same order and memory
    VIEWED = "viewed"  # the same memory, sliced or in another order
    COPIED = "copied"  # all of it, elsewhere or in another precision
    PICKED = "picked"  # some of its elements, elsewhere
    REPEATED = "repeated"  # all of its elements, several times


@dataclass(frozen=True)
class Random:
    """The condition for drawing random numbers: never, always, or if a rate is not 0 (dropout, in training).

    `along`: it draws along this many dims from the front (negative: along all but this many at the end), and the others
    share the numbers; 0: along all. `batched`: its number of dims with a batch; given fewer, it draws along one less.
    `jointly`: its numbers depend on each other, so that a part of them is no draw by itself.
    """

    when: Literal["never", "always", "rate"]
    rate: tuple[int, str, float] = (-1, "", 1.0)  # position, name and default of the rate
    along: int = 0
    batched: int = 0
    jointly: bool = False

    def draws_along(self, dim: int, rank: int) -> bool:
        """Return whether each position of this dim, of `rank` dims, gets numbers of its own."""
        front = self.along + rank if self.along < 0 else self.along - (rank < self.batched)
        return not self.along or dim < front

    def __bool__(self) -> bool:
        return self.when != "never"

    def may_draw(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the op draws when called with these arguments, if the model is trained."""
        if self.when != "rate":
            return self.when == "always"
        position, name, default = self.rate
        rate = args[position] if len(args) > position >= 0 else kwargs.get(name, default)
        return bool(rate != 0.0)

    def has_rate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the op could draw if called again: a rate of 0 in eval mode may be another in training."""
        position, name, default = self.rate
        passed = len(args) > position >= 0 or name in kwargs
        return self.when == "always" or (self.when == "rate" and (passed or default != 0.0))


NEVER = Random("never")
ALWAYS = Random("always")


def by_rate(position: int, name: str = "p", default: float = 0.5, *, along: int = 0, batched: int = 0) -> Random:
    """Return that an op draws random numbers unless the argument that is its rate is 0."""
    return Random("rate", (position, name, default), along, batched)


@dataclass(frozen=True)
class Product:
    """Operands that sum over their common dim, and the bias. `out`: the weight's dim that the result has, and its place
    there (None: such a product is never gathered); `inner`: the dim that is summed over."""

    value: int
    weight: int
    bias: int | None = None
    out: tuple[int, int] | None = None
    inner: int = -2

    @property
    def of_rows(self) -> bool:
        """Return whether the weight has the layout of a linear layer's, out x in."""
        return self.inner == -1


@dataclass(frozen=True)
class Recurrent:
    """The number of gates in the rows of a recurrent weight, the number of states of a step, and whether a call is one
    step."""

    gates: int
    states: int
    one_step: bool


class Supposed(StrEnum):
    """The result to assume for an op whose values are unknown."""

    POSITIONS = "positions"  # spread over all that there are
    TRUE = "true"  # a comparison that holds
    FALSE = "false"  # a mask that masks nothing


@dataclass(frozen=True)
class Along:
    """An op's treatment of positions along a dim: it "picks", "parts" or "scatters" them. `dim`: the argument for the
    dim."""

    what: str
    dim: int = 1


@dataclass(frozen=True)
class Extent:
    """A dim of an op's first input, of `dims`: its length there and in the result. `lengths`: the numbers in the call
    that are such a length, read off a tensor."""

    dim: int
    dims: int
    length: int
    result: int
    lengths: frozenset[int]


class Drawn(StrEnum):
    """The way an op is drawn in the picture of a block (`analyse/picture`)."""

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
    ACTIVATION = "activation"  # no box, but the next join records it
    ADD = "add"
    MUL = "mul"
    CAT = "cat"
    GATED = "gated"  # two halves, multiplied
    CHOICE = "choice"  # between two values, position by position
