"""What the fields of a record can say: small closed sets of answers, and values that say where arguments stand."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal


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
    # The same between calls. Inside a fused call, where no collective can be inserted, linear in all of its tensors.
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
    """When an op draws random numbers: never, always, or where a rate says so (dropout, in training).

    `along`: it draws along so many dims from the front (negative: along all but so many at the end), and the others
    share what was drawn; 0: along all. `batched`: how many dims it takes a batch with; given fewer, it draws along one
    less. `jointly`: its numbers depend on each other, so that a part of them is no draw by itself.
    """

    when: Literal["never", "always", "rate"]
    rate: tuple[int, str, float] = (-1, "", 1.0)  # where the rate stands, its name, and what it is if it is not told
    along: int = 0
    batched: int = 0
    jointly: bool = False

    def draws_along(self, dim: int, rank: int) -> bool:
        """Are other numbers drawn for each position of this dim, of so many dims?"""
        front = self.along + rank if self.along < 0 else self.along - (rank < self.batched)
        return not self.along or dim < front

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
        """Could the op draw if called again? In eval mode the recorded rate is 0; it could be non-zero in training."""
        position, name, default = self.rate
        told = len(args) > position >= 0 or name in kwargs
        return self.when == "always" or (self.when == "rate" and (told or default != 0.0))


NEVER = Random("never")
ALWAYS = Random("always")


def by_rate(position: int, name: str = "p", default: float = 0.5, *, along: int = 0, batched: int = 0) -> Random:
    """Draws where the argument that is its rate is not 0."""
    return Random("rate", (position, name, default), along, batched)


@dataclass(frozen=True)
class Product:
    """Which operands sum over their common dim, and the bias. `out`: the weight's dim that the result has, and where
    (None: such a product is never gathered); `inner`: the dim that is summed over."""

    value: int
    weight: int
    bias: int | None = None
    out: tuple[int, int] | None = None
    inner: int = -2

    @property
    def of_rows(self) -> bool:
        """Does the weight lie as a linear layer's does, out x in?"""
        return self.inner == -1


@dataclass(frozen=True)
class Recurrent:
    """How many gates lie in the rows of a recurrent weight, how many states a step hands on, and whether a call is one
    step."""

    gates: int
    states: int
    one_step: bool


class Supposed(StrEnum):
    """What an op finds, where its answer must be made up."""

    POSITIONS = "positions"  # spread over all that there are
    TRUE = "true"  # a comparison that holds
    FALSE = "false"  # a mask that masks nothing


@dataclass(frozen=True)
class Along:
    """What an op does to positions along a dim: "picks", "parts" or "scatters" them. `dim`: the argument that says the
    dim."""

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
    GATED = "gated"  # two halves, multiplied
    CHOICE = "choice"  # of one value or another, position by position
