"""Instructions at boundaries of modules, also along the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from autoplan.values.estimate import Cost
from autoplan.values.instructions.base import Collective, Instruction, Move, Spread, instruction

# What is done to one tensor where it enters or leaves a module, on every call.

Side = Literal["input", "output"]


@dataclass(frozen=True)
class SequenceName:
    """Which sequence a value's positions are of. `flattened`: they lie in one dim with the batch, as the minor part."""

    name: str
    flattened: bool = False


@dataclass(frozen=True)
class Boundary(Instruction):
    """A tensor at a module's entry or exit, at `path` in its arguments or in what it returns.

    `turn`: where several stand at one place, which comes first. `at_exit`: of the model's own outputs it is done last
    of all, and only to what was returned. `gradients_only`: forward nothing happens. `stream_end`: on this side of a
    block it begins or ends a stream of shards, and belongs to no block.
    """

    side: Side
    path: tuple[Any, ...]

    turn: ClassVar[int] = 3
    at_exit: ClassVar[bool] = False
    gradients_only: ClassVar[bool] = False
    stream_end: ClassVar[str] = ""
    in_styles: ClassVar[bool] = True

    def said(self, ranks: int) -> str:
        what = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path).removeprefix(".")
        return f"{self.pattern}: {self.says.format(what=f'{self.side} {what}'.strip(), tp=ranks)}"

    @property
    def communicates(self) -> bool:
        return True


@instruction
@dataclass(frozen=True)
class AllReduceGradient(Boundary):
    """Identity forward; backward the gradient, of which each rank has a part, is summed (Megatron's f)."""

    takes = Spread.REPLICATE
    gives = Spread.PARTIAL_GRADIENT
    says = "the gradient of {what} is summed over ranks (backward)"
    cost = None  # told at each module that reads the value
    turn = 4
    gradients_only = True
    collectives = (Move(Collective.ALL_REDUCE, backward=True),)


@instruction
@dataclass(frozen=True)
class AllReduce(Boundary):
    """Forward the parts that ranks hold are summed; identity backward (Megatron's g)."""

    takes = Spread.PARTIAL
    gives = Spread.REPLICATE
    says = "{what} is summed over ranks (forward)"
    cost = Cost("sum")
    turn = 1
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
@dataclass(frozen=True)
class MeanOverRanks(Boundary):
    """A mean over an axis of which each rank holds an equal part: the means of the parts are summed, divided by tp."""

    takes = Spread.PARTIAL
    gives = Spread.REPLICATE
    says = "{what} is averaged over ranks (forward)"
    cost = None
    turn = 1
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
@dataclass(frozen=True)
class ScaleGradient(Boundary):
    """Identity forward; backward a gradient that every rank has whole is divided by tp, and so is one part of a sum.
    With a `layout`, only on the segments along `dim` that every rank holds."""

    dim: int | None = None
    layout: str | None = None

    takes = Spread.PARTIAL_GRADIENT
    gives = Spread.REPLICATE
    says = "the gradient of {what} is divided by {tp} where every rank holds the value (backward)"
    cost = None
    turn = 5
    gradients_only = True
    collectives = ()


@instruction
@dataclass(frozen=True)
class AllGather(Boundary):
    """Forward the pieces along `dim` are gathered into the order of `layout`; backward a rank keeps its piece."""

    dim: int
    layout: str

    takes = Spread.SHARD
    gives = Spread.REPLICATE
    says = "{what} is gathered from all ranks (forward), its gradient sliced (backward)"
    cost = Cost("gather")
    turn = 2
    at_exit = True
    collectives = (Move(Collective.ALL_GATHER),)


@instruction
@dataclass(frozen=True)
class WithholdPartial(Boundary):
    """A branch's part of a sum is kept back for the next branch of the block, which adds it to its own; it gives zeros.
    Under sequence parallelism these are zeros of a shard: of `sequence`, which lies along `dim`."""

    dim: int | None = None
    sequence: SequenceName | None = None

    takes = Spread.PARTIAL
    gives = Spread.REPLICATE
    says = "{what} is withheld (forward), and summed together with the branch that follows"
    cost = Cost("sum", with_next_branch=True)
    turn = 1
    collectives = ()  # the branch that joins it does the sum


@instruction
@dataclass(frozen=True)
class JoinPartial(Boundary):
    """To a branch's part of a sum is added what the branch before it withheld."""

    takes = Spread.PARTIAL
    gives = Spread.PARTIAL
    says = "to {what} is added what the branch before it withheld (forward)"
    cost = None
    turn = 0
    collectives = ()


# What is done where a value enters or leaves the part of the model whose stream is cut along the sequence.


@dataclass(frozen=True)
class SequenceBoundary(Boundary):
    """One whose value has the positions of `sequence` along `dim`."""

    dim: int
    sequence: SequenceName


@instruction
@dataclass(frozen=True)
class ScatterSequence(SequenceBoundary):
    """Forward a rank keeps its own positions of a whole value; backward the whole gradient is gathered."""

    takes = Spread.REPLICATE
    gives = Spread.SEQUENCE_SHARD
    says = "{what} is cut along the sequence (forward), its gradient gathered (backward)"
    cost = None
    turn = 3
    stream_end = "input"
    collectives = (Move(Collective.ALL_GATHER, backward=True),)


@instruction
@dataclass(frozen=True)
class OwnPositions(SequenceBoundary):
    """Forward a rank keeps its own positions of a whole value; so is its gradient a part of a sum, which nothing sums
    here: under context parallelism whatever made the value has its gradient summed once, at its parameters."""

    takes = Spread.PARTIAL_GRADIENT
    gives = Spread.SEQUENCE_SHARD
    says = "of {what} a rank keeps its own positions (forward), its gradient is zero at the others (backward)"
    cost = None
    turn = 3
    stream_end = "input"
    collectives = ()


@instruction
@dataclass(frozen=True)
class AllGatherSequence(SequenceBoundary):
    """Forward all positions are gathered, for readers that every rank runs alike; backward a rank keeps its own."""

    takes = Spread.SEQUENCE_SHARD
    gives = Spread.REPLICATE
    says = "the whole sequence of {what} is gathered (forward), its gradient cut (backward)"
    cost = None
    turn = 2
    at_exit = True
    stream_end = "output"
    collectives = (Move(Collective.ALL_GATHER),)


@instruction
@dataclass(frozen=True)
class AllGatherSequenceSumGradient(SequenceBoundary):
    """Forward all positions are gathered, for readers of which each rank runs a part; backward the gradients are summed
    and each rank keeps its own positions of the sum."""

    takes = Spread.SEQUENCE_SHARD
    gives = Spread.PARTIAL_GRADIENT
    says = "the whole sequence of {what} is gathered (forward), its gradient summed and cut (backward)"
    cost = None  # told at each module that reads the value
    turn = 2
    collectives = (Move(Collective.ALL_GATHER), Move(Collective.REDUCE_SCATTER, backward=True))


@instruction
@dataclass(frozen=True)
class ReduceScatterSequence(SequenceBoundary):
    """Forward the parts that ranks hold are summed and each keeps its own positions; backward all are gathered."""

    takes = Spread.PARTIAL
    gives = Spread.SEQUENCE_SHARD
    says = "{what} is summed over ranks and cut along the sequence (forward), its gradient gathered (backward)"
    cost = Cost("sum", as_sequence_shard=True)
    turn = 1
    collectives = (Move(Collective.REDUCE_SCATTER), Move(Collective.ALL_GATHER, backward=True))


@instruction
@dataclass(frozen=True)
class WholeLength(SequenceBoundary):
    """A rank's own positions, for code that asks how long the sequence is and hands them on to modules that take own
    positions: it is told the whole length. Whatever else is done with them gathers the others first."""

    takes = Spread.SEQUENCE_SHARD
    gives = Spread.SEQUENCE_SHARD
    says = "{what} has a rank's own positions and the length of the whole sequence"
    cost = None
    turn = 6
    collectives = ()


@dataclass(frozen=True)
class Exchange(SequenceBoundary):
    """Ranks exchange positions for pieces of another dim, `feature`, which lie on them by `layout`."""

    feature: int
    layout: str

    cost = None
    turn = 2
    collectives = (Move(Collective.ALL_TO_ALL), Move(Collective.ALL_TO_ALL, backward=True))


@instruction
@dataclass(frozen=True)
class ExchangeToPieces(Exchange):
    """Forward each rank gives its own positions of the other ranks' heads, and has all positions of its own heads;
    backward the gradient goes the other way, added where several ranks hold a head."""

    takes = Spread.SEQUENCE_SHARD
    gives = Spread.SHARD
    says = "{what} is exchanged, own positions for own pieces (forward), its gradient back (backward)"


@instruction
@dataclass(frozen=True)
class ExchangeToPositions(Exchange):
    """Forward each rank gives the other ranks' positions of its own heads, and has all heads of its own positions;
    backward the gradient goes the other way."""

    takes = Spread.SHARD
    gives = Spread.SEQUENCE_SHARD
    says = "{what} is exchanged, own pieces for own positions (forward), its gradient back (backward)"


@instruction
@dataclass(frozen=True)
class LogitsOfPositions(SequenceBoundary):
    """Logits of a rank's own positions, where the model goes on to a loss of its own: it is made of those."""

    takes = Spread.SEQUENCE_SHARD
    gives = Spread.SEQUENCE_SHARD
    says = "of {what} a rank has its own positions, and a loss is made of those"
    cost = None
    turn = 6
    collectives = ()


@instruction
@dataclass(frozen=True)
class AllGatherPicked(SequenceBoundary):
    """All positions are gathered in a call that is told by a number which of them to go on with (`logits_to_keep`)."""

    takes = Spread.SEQUENCE_SHARD
    gives = Spread.SEQUENCE_SHARD
    says = "the whole sequence of {what} is gathered in calls without gradients that ask for some positions only"
    cost = None
    turn = 5
    collectives = ()  # in the calls that a plan is about there is none


@instruction
@dataclass(frozen=True)
class NoteShard(SequenceBoundary):
    """Nothing is changed: a value is noted to be a shard of the positions, in case a caller collects it."""

    takes = Spread.SEQUENCE_SHARD
    gives = Spread.SEQUENCE_SHARD
    says = "{what} is a shard of the sequence, gathered where the model returns it"
    cost = None
    turn = 6
    collectives = ()
