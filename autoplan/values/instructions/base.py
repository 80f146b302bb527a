"""Instructions: the base class of things done to a live model on every run, decided when the plan is made.

Each kind is a small frozen class, and everything that the rest of autoplan must know of it is declared on the class:
how the value lies on ranks before and after, what moves between ranks, how it is described to a reader, whether other
systems' styles can express it. Besides, it needs one executor (execute/executors.py). So explanations, costs, traffic,
exports and plan files work at once for a kind that was added today.

`@instruction` makes a class a frozen dataclass that plan files know, and refuses one with missing declarations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

from autoplan.values.estimate import Cost


class Spread(StrEnum):
    """The way in which a value lies on ranks."""

    REPLICATE = "replicate"  # replicated, with a full gradient
    PARTIAL_GRADIENT = "replicate, with a partial gradient"  # each rank's gradient is one part of a sum
    PARTIAL = "partial"  # each rank holds one part of a sum
    SHARD = "shard"  # each rank holds a shard of a dim
    SEQUENCE_SHARD = "shard along the sequence"
    ANY = "any"


class Collective(StrEnum):
    """The collective operations of ranks."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


class Amount(StrEnum):
    """The tensor whose elements a collective moves."""

    VALUE = "value"  # the value at the boundary, or what the call returns
    ROWS = "rows"  # one number for each row of the value
    LENGTHS = "lengths"  # the lengths of vectors that the call takes
    MEAN_AND_VARIANCE = "mean and variance"  # of each rank, for each number that the call returns
    OF_NEIGHBOUR = "some positions of the ranks next to it"  # as many in a sequence of any length
    ARGUMENT = "argument"  # the call's argument at `path`

    @property
    def is_statistic(self) -> bool:
        """Return whether it is combined from statistics that each rank has of its own shard."""
        return self in (Amount.ROWS, Amount.LENGTHS, Amount.MEAN_AND_VARIANCE)


@dataclass(frozen=True)
class Move:
    """One kind of collective on each run of the site, forward or backward; `times` of them."""

    collective: Collective
    of: Amount = Amount.VALUE
    backward: bool = False
    times: int = 1
    path: tuple[Any, ...] = ()

    @property
    def sums(self) -> bool:
        """Return whether every rank has the sum of the parts afterwards."""
        return self.collective is Collective.ALL_REDUCE or self.of.is_statistic


@dataclass(frozen=True)
class Instruction:
    """One thing done at the modules that `pattern` matches. Kinds derive from one of the bases below this one.

    A kind declares, once for all of its instructions: `takes` and `gives` (how the value lies on ranks before and
    after), `says` (its description in `explain`), `cost` (its cost for the module where it is placed, None where that
    is reported elsewhere), `in_styles` (whether the styles of other systems do this themselves) and `collectives`.

    `over`: the ranks involved if context parallelism is combined with another split: "" for its ranks, "cp", or "all".
    """

    pattern: str
    over: Literal["", "cp", "all"] = field(default="", kw_only=True)

    takes: ClassVar[Spread]
    gives: ClassVar[Spread]
    says: ClassVar[str]
    cost: ClassVar[Cost | None]
    in_styles: ClassVar[bool]
    collectives: ClassVar[tuple[Move, ...]]
    always_communicates: ClassVar[bool] = False  # also where nothing moves here

    @property
    def moves(self) -> tuple[Move, ...]:
        """Return what moves between ranks, forward and backward, because of this one instruction."""
        return self.collectives

    def said(self, ranks: int) -> str:
        """Return one line for `explain`."""
        return f"{self.pattern}: {self.says.format(tp=ranks)}"

    def beyond_styles(self) -> str:
        """Return why the styles of other systems do not do this; "" if they do."""
        return "" if self.in_styles else self.said(1)

    def layouts(self) -> Iterator[str]:
        """Yield the layouts that it names, in the notation of common/layout.py."""
        layout = getattr(self, "layout", None)
        if layout is not None:
            yield layout

    def problem(self, ranks: int) -> str:
        """Return the contradiction of its fields to this number of ranks; "" if there is none."""
        return ""

    @property
    def communicates(self) -> bool:
        """Return whether other ranks need something from the module because of it."""
        return self.always_communicates or bool(self.moves)


INSTRUCTIONS: dict[str, type[Instruction]] = {}
_TO_SAY = ("takes", "gives", "says", "cost", "in_styles", "collectives")
Kind = TypeVar("Kind", bound=Instruction)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def instruction(kind: type[Kind]) -> type[Kind]:
    """Make a class a frozen dataclass and register it. One with missing declarations is refused by name."""
    kind = dataclass(frozen=True)(kind)
    missing = [f"`{name}`" for name in _TO_SAY if not hasattr(kind, name)]
    if str(kind.__doc__).startswith((f"{kind.__name__}(", "None")):  # dataclasses generate one of their own
        missing.append("a docstring")
    if missing:
        raise TypeError(f"instruction {kind.__name__} lacks {', '.join(missing)}")
    if kind.__name__ in INSTRUCTIONS:
        raise TypeError(f"two instructions are named {kind.__name__}")
    INSTRUCTIONS[kind.__name__] = kind
    return kind
