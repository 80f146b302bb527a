"""What an instruction is: one thing done to a live model on every run, decided when the plan is made.

Each kind is a small frozen class, and everything that the rest of autoplan must know of it stands on the class: how the
value lies on ranks before and after, what moves between ranks, how a reader is told of it, whether other systems'
styles can say it. What it needs besides is one executor (execute/executors.py). So explanations, costs, traffic,
exports and plan files are the same for a kind that was added today.

`@instruction` puts a class on the list of those that plan files know, and refuses one that leaves anything unsaid.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, TypeVar

from autoplan.values.estimate import Cost


class Spread(StrEnum):
    """How a value lies on ranks."""

    REPLICATE = "replicate"  # whole on each rank, with a whole gradient
    PARTIAL_GRADIENT = "replicate, with a partial gradient"  # each rank's gradient is one part of a sum
    PARTIAL = "partial"  # each rank holds one part of a sum
    SHARD = "shard"  # each rank holds a piece of a dim
    SEQUENCE_SHARD = "shard along the sequence"
    ANY = "any"


class Collective(StrEnum):
    """What ranks do together."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_TO_ALL = "all_to_all"


class Amount(StrEnum):
    """Of what a collective moves the numbers."""

    VALUE = "value"  # the value at the boundary, or what the call returns
    ROWS = "rows"  # one number for each row of the value
    LENGTHS = "lengths"  # the lengths of vectors that the call takes
    MEAN_AND_VARIANCE = "mean and variance"  # of each rank, for each number that the call returns
    ARGUMENT = "argument"  # what the call is given at `path`

    @property
    def is_statistic(self) -> bool:
        """Is it put together from what each rank knows of its own part?"""
        return self in (Amount.ROWS, Amount.LENGTHS, Amount.MEAN_AND_VARIANCE)


@dataclass(frozen=True)
class Move:
    """One kind of collective on each run of the place, forward or backward; `times` of them."""

    collective: Collective
    of: Amount = Amount.VALUE
    backward: bool = False
    times: int = 1
    path: tuple[Any, ...] = ()

    @property
    def sums(self) -> bool:
        """Does every rank have the sum of the parts afterwards?"""
        return self.collective is Collective.ALL_REDUCE or self.of.is_statistic


@dataclass(frozen=True)
class Instruction:
    """One thing done at the modules that `pattern` means. Kinds derive from one of the bases below this one.

    A kind says of itself, once for all of its instructions: `takes` and `gives` (how the value lies on ranks before and
    after), `says` (what it does, as `explain` tells it), `cost` (what it costs a module that it stands at, None where
    that is told elsewhere), `in_styles` (do the styles of other systems do this by themselves?) and `collectives`.

    `over`: between which ranks, where context parallelism stands beside another split: "": of that one, "cp", or "all".
    """

    pattern: str
    over: Literal["", "cp", "all"] = field(default="", kw_only=True)

    takes: ClassVar[Spread]
    gives: ClassVar[Spread]
    says: ClassVar[str]
    cost: ClassVar[Cost | None]
    in_styles: ClassVar[bool]
    collectives: ClassVar[tuple[Move, ...]]

    @property
    def moves(self) -> tuple[Move, ...]:
        """What moves between ranks, forward and backward, because of this one instruction."""
        return self.collectives

    def said(self, ranks: int) -> str:
        """One line for `explain`."""
        return f"{self.pattern}: {self.says.format(tp=ranks)}"

    def beyond_styles(self) -> str:
        """Why the styles of other systems do not do this; "" where they do."""
        return "" if self.in_styles else self.said(1)

    def layouts(self) -> Iterator[str]:
        """The layouts that it names, in the notation of common/layout.py."""
        found = getattr(self, "layout", None)
        if found is not None:
            yield found

    def problem(self, ranks: int) -> str:
        """What in it cannot be meant for so many ranks; "" if nothing."""
        return ""

    @property
    def settles_partial(self) -> bool:
        """Does a partial value become a sum here?"""
        return self.takes is Spread.PARTIAL and self.gives is not Spread.PARTIAL

    @property
    def communicates(self) -> bool:
        """Do other ranks need something from the module because of it?"""
        return bool(self.moves)


INSTRUCTIONS: dict[str, type[Instruction]] = {}
_TO_SAY = ("takes", "gives", "says", "cost", "in_styles", "collectives")
Kind = TypeVar("Kind", bound=Instruction)


def instruction(kind: type[Kind]) -> type[Kind]:
    """Put a class on the list. One that leaves something unsaid is refused by name."""
    missing = [f"`{name}`" for name in _TO_SAY if not hasattr(kind, name)]
    if str(kind.__doc__).startswith((f"{kind.__name__}(", "None")):  # dataclasses write one of their own
        missing.append("a docstring")
    if "__dataclass_params__" not in vars(kind):
        missing.append("@dataclass(frozen=True)")
    if missing:
        raise TypeError(f"the instruction {kind.__name__} lacks {', '.join(missing)}")
    if kind.__name__ in INSTRUCTIONS:
        raise TypeError(f"there are two instructions named {kind.__name__}")
    INSTRUCTIONS[kind.__name__] = kind
    return kind
