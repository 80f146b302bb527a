"""Instructions at boundaries of modules, also along the sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from autoplan.values.estimate import Cost
from autoplan.values.instructions.base import Amount, Collective, Instruction, Move, Spread, instruction

# Instructions for one tensor where it enters or leaves a module, on every call.

Side = Literal["input", "output"]


@dataclass(frozen=True)
class SequenceName:
    """The sequence that a value's positions belong to. `flattened`: merged with the batch, as the minor part."""

    name: str
    flattened: bool = False


@dataclass(frozen=True)
class Boundary(Instruction):
    """An instruction for a tensor among a module's inputs or outputs, at `path` in these.

    `turn`: the order of several at one place. `at_exit`: among the model's own outputs it is done last, and only to
    what was returned. `gradients_only`: forward nothing happens. `stream_end`: on this side of a block it begins or
    ends a sharded stream, and belongs to no block.
    """

    side: Side
    path: tuple[Any, ...]

    turn: ClassVar[int] = 3
    at_exit: ClassVar[bool] = False
    gradients_only: ClassVar[bool] = False
    stream_end: ClassVar[str] = ""
    in_styles: ClassVar[bool] = True
    always_communicates: ClassVar[bool] = True

    def said(self, ranks: int) -> str:
        place = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path).removeprefix(".")
        details = {"what": f"{self.side} {place}".strip(), "tp": ranks}
        return f"{self.pattern}: {self.says.format(**vars(self) | details)}"


@instruction
class AllReduceGradient(Boundary):
    """Identity forward; backward all-reduces the partial gradient (Megatron's f)."""

    takes, gives = Spread.REPLICATE, Spread.PARTIAL_GRADIENT
    says = "the gradient of {what} is summed over ranks (backward)"
    cost = None  # reported at each module that reads the value
    turn = 4
    gradients_only = True
    collectives = (Move(Collective.ALL_REDUCE, backward=True),)


@instruction
class AllReduce(Boundary):
    """Forward all-reduces the partial value; identity backward (Megatron's g)."""

    takes, gives = Spread.PARTIAL, Spread.REPLICATE
    says = "{what} is summed over ranks (forward)"
    cost = Cost("sum")
    turn = 1
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
class MeanOverRanks(Boundary):
    """A mean over an axis with equal shards: forward all-reduces the means of the shards and divides by tp."""

    takes, gives = Spread.PARTIAL, Spread.REPLICATE
    says = "{what} is averaged over ranks (forward)"
    cost = None
    turn = 1
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
class ScaleGradient(Boundary):
    """Identity forward; backward divides by tp a gradient that every rank has in full, so that it is one part of a sum.
    With a `layout`, only on the replicated segments along `dim`."""

    dim: int | None = None
    layout: str | None = None

    takes, gives = Spread.PARTIAL_GRADIENT, Spread.REPLICATE
    says = "the gradient of {what} is divided by {tp} where the value is replicated (backward)"
    cost = None
    turn = 5
    gradients_only = True
    collectives = ()


@instruction
class AllGather(Boundary):
    """Forward gathers the shards along `dim` into the order of `layout`; backward a rank keeps its shard."""

    dim: int
    layout: str

    takes, gives = Spread.SHARD, Spread.REPLICATE
    says = "{what} is all-gathered (forward), its gradient sliced (backward)"
    cost = Cost("gather")
    turn = 2
    at_exit = True
    collectives = (Move(Collective.ALL_GATHER),)


@instruction
class WithholdPartial(Boundary):
    """Withholds a branch's part of a sum for the next branch of the block, which adds it to its own, and returns zeros.
    Under sequence parallelism these are zeros of a shard: of `sequence`, along `dim`."""

    dim: int | None = None
    sequence: SequenceName | None = None

    takes, gives = Spread.PARTIAL, Spread.REPLICATE
    says = "{what} is left partial (forward), and summed together with the next branch"
    cost = Cost("sum", with_next_branch=True)
    turn = 1
    collectives = ()  # the branch that joins it is reduced


@instruction
class JoinPartial(Boundary):
    """Adds the part that the previous branch withheld to a branch's part of a sum."""

    takes, gives = Spread.PARTIAL, Spread.PARTIAL
    says = "the previous branch's partial sum is added to {what} (forward)"
    cost = None
    turn = 0
    collectives = ()


# Instructions where a value enters or leaves the region of the model whose stream is sharded along the sequence.


@dataclass(frozen=True)
class SequenceBoundary(Boundary):
    """A boundary whose value has the positions of `sequence` along `dim`."""

    dim: int
    sequence: SequenceName

    cost: ClassVar[Cost | None] = None  # of most: it is reported at the modules that read the value


@instruction
class ScatterSequence(SequenceBoundary):
    """Forward a rank keeps its own positions of a replicated value; backward gathers the full gradient."""

    takes, gives = Spread.REPLICATE, Spread.SEQUENCE_SHARD
    says = "{what} is sharded along the sequence (forward), its gradient gathered (backward)"
    stream_end = "input"
    collectives = (Move(Collective.ALL_GATHER, backward=True),)


@instruction
class OwnPositions(SequenceBoundary):
    """Forward a rank keeps its own positions of a replicated value; its gradient is thus partial, and is not reduced
    here: under context parallelism the gradient is reduced once, at the parameters that the value comes from."""

    takes, gives = Spread.PARTIAL_GRADIENT, Spread.SEQUENCE_SHARD
    says = "{what} is reduced to the rank's own positions (forward), its gradient is zero elsewhere (backward)"
    stream_end = "input"
    collectives = ()


@instruction
class AllGatherSequence(SequenceBoundary):
    """Forward gathers all positions, for replicated readers; backward a rank keeps its own."""

    takes, gives = Spread.SEQUENCE_SHARD, Spread.REPLICATE
    says = "{what} is gathered along the sequence (forward), its gradient sliced (backward)"
    turn = 2
    at_exit = True
    stream_end = "output"
    collectives = (Move(Collective.ALL_GATHER),)


@instruction
class AllGatherSequenceSumGradient(SequenceBoundary):
    """Forward gathers all positions, for sharded readers; backward reduce-scatters the gradients, so that each rank
    keeps its own positions of the sum."""

    takes, gives = Spread.SEQUENCE_SHARD, Spread.PARTIAL_GRADIENT
    says = "{what} is gathered along the sequence (forward), its gradient reduce-scattered (backward)"
    turn = 2
    collectives = (Move(Collective.ALL_GATHER), Move(Collective.REDUCE_SCATTER, backward=True))


@instruction
class ReduceScatterSequence(SequenceBoundary):
    """Forward reduce-scatters the partial value along the sequence; backward gathers all positions."""

    takes, gives = Spread.PARTIAL, Spread.SEQUENCE_SHARD
    says = "{what} is reduce-scattered along the sequence (forward), its gradient gathered (backward)"
    cost = Cost("sum", as_sequence_shard=True)
    turn = 1
    collectives = (Move(Collective.REDUCE_SCATTER), Move(Collective.ALL_GATHER, backward=True))


@instruction
class WholeLength(SequenceBoundary):
    """A rank's own positions, for code that asks for the length of the sequence and passes them to modules that take
    own positions: it sees the global length. Anything else done with them gathers the others first."""

    takes, gives = Spread.SEQUENCE_SHARD, Spread.SEQUENCE_SHARD
    says = "{what} holds the rank's own positions and reports the full sequence length"
    turn = 6
    collectives = ()


@dataclass(frozen=True)
class Exchange(SequenceBoundary):
    """An all-to-all between positions and shards of another dim, `feature`, which is sharded by `layout`."""

    feature: int
    layout: str

    turn = 2
    collectives = (Move(Collective.ALL_TO_ALL), Move(Collective.ALL_TO_ALL, backward=True))


@instruction
class ExchangeToPieces(Exchange):
    """Forward each rank sends its own positions of the other ranks' heads, and gets all positions of its own heads;
    backward the gradient goes the other way, summed where several ranks hold a head."""

    takes, gives = Spread.SEQUENCE_SHARD, Spread.SHARD
    says = "{what} is exchanged from own positions to own pieces (forward), its gradient back (backward)"


@instruction
class ExchangeToPositions(Exchange):
    """Forward each rank sends the other ranks' positions of its own heads, and gets all heads of its own positions;
    backward the gradient goes the other way."""

    takes, gives = Spread.SHARD, Spread.SEQUENCE_SHARD
    says = "{what} is exchanged from own pieces to own positions (forward), its gradient back (backward)"


@instruction
class Halo(SequenceBoundary):
    """A module that reads `before` positions before each one and `after` behind it gets a rank's own and as many around
    them, sent by the ranks before and after; of what it returns at `output` a rank keeps its own. Backward their
    gradient goes the other way and is added. In a call that gives the module something else, all positions are
    gathered (and gradients reduced)."""

    before: int
    output: tuple[Any, ...]
    output_dim: int
    after: int = 0

    takes, gives = Spread.SEQUENCE_SHARD, Spread.SEQUENCE_SHARD
    says = (
        "before {what} come the last {before} positions of the rank before, behind it the first {after} of the rank "
        "after (forward), their gradient back (backward)"
    )
    turn = 2
    collectives = (
        Move(Collective.ALL_TO_ALL, Amount.OF_NEIGHBOUR),
        Move(Collective.ALL_TO_ALL, Amount.OF_NEIGHBOUR, backward=True),
    )


@instruction
class LogitsOfPositions(SequenceBoundary):
    """Logits of a rank's own positions, from which the model goes on to compute its own loss.

    `returned`: whether the model returns them, too, and computes a loss in calls with targets only.
    """

    returned: bool = True

    takes, gives = Spread.SEQUENCE_SHARD, Spread.SEQUENCE_SHARD
    says = "{what} holds the rank's own positions, and the loss is computed on those"
    turn = 6
    collectives = ()


@instruction
class AllGatherPicked(SequenceBoundary):
    """Gathers all positions in a call where a number selects those to continue with (`logits_to_keep`)."""

    takes, gives = Spread.SEQUENCE_SHARD, Spread.SEQUENCE_SHARD
    says = "{what} is gathered along the sequence in calls without gradients that request only some positions"
    turn = 5
    collectives = ()  # there is none in the calls that a plan covers


@instruction
class NoteShard(SequenceBoundary):
    """Marks a value as a shard of the positions, unchanged, in case a caller collects it."""

    takes, gives = Spread.SEQUENCE_SHARD, Spread.SEQUENCE_SHARD
    says = "{what} is sharded along the sequence, and gathered where the model returns it"
    turn = 6
    collectives = ()
