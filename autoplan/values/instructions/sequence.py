"""What is done where a value enters or leaves the part of the model whose stream is cut along the sequence."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.values.costs import Cost
from autoplan.values.instructions.base import Collective, Move, Spread, instruction
from autoplan.values.instructions.boundaries import Boundary, SequenceName

__all__ = [
    "AllGatherSequence",
    "AllGatherSequenceSumGradient",
    "NoteShard",
    "ReduceScatterSequence",
    "ScatterSequence",
    "SequenceBoundary",
]


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
class NoteShard(SequenceBoundary):
    """Nothing is changed: a value is noted to be a shard of the positions, in case a caller collects it."""

    takes = Spread.SEQUENCE_SHARD
    gives = Spread.SEQUENCE_SHARD
    says = "{what} is a shard of the sequence, gathered where the model returns it"
    cost = None
    turn = 6
    collectives = ()
