"""What cutting streams along the sequence changes against plain tensor parallelism, and what ends a walk."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoplan.analyse.placement.callflow import Crossing
from autoplan.analyse.placement.calls import SequenceWork
from autoplan.values import Boundary, CallRewrite, Finding, SequenceName
from autoplan.values.not_placed import WholeSequence


@dataclass(frozen=True)
class HaloAt:
    """The dim of positions that a module takes in, how many before and after its own it reads, and what it returns."""

    dim: int
    reach: tuple[int, int]
    output: tuple[Any, ...]
    output_dim: int


@dataclass
class SequencePlacement:
    """The changes against plain tensor parallelism. Keys are crossings; values the sequence dim, from the end."""

    scatters: dict[tuple[Crossing, str], int] = field(default_factory=dict)  # side "input" or "output"
    gathers: dict[tuple[Crossing, str], int] = field(default_factory=dict)  # whole readers: backward takes a shard
    gather_sums: dict[tuple[Crossing, str], int] = field(default_factory=dict)  # replace an AllReduceGradient
    reduce_scatters: dict[Crossing, int] = field(default_factory=dict)  # replace an AllReduce
    returned_shards: dict[Crossing, int] = field(default_factory=dict)  # of blocks, which others may collect
    values: set[int] = field(default_factory=set)  # all that are cut
    reduced: set[int] = field(default_factory=set)  # sums over their positions, and what is made of these alone
    # under context parallelism (context.py): scatters and gathers whose gradient is left a part of a sum, what is
    # returned whole, and sums of gradients that are not needed
    own: set[tuple[Crossing, str]] = field(default_factory=set)
    partial_gathers: set[tuple[Crossing, str]] = field(default_factory=set)
    scaled: set[Crossing] = field(default_factory=set)
    dropped: set[tuple[Crossing, str]] = field(default_factory=set)
    summed_back: set[tuple[Crossing, str]] = field(default_factory=set)  # gradients that must be summed, too
    heads: dict[Crossing, int] = field(default_factory=dict)  # where modules return what the model returns cut
    unreturned: set[Crossing] = field(default_factory=set)  # of these: where the model returns a loss only
    picked: dict[Crossing, int] = field(default_factory=dict)  # and where it comes from, before positions are picked
    # and where projections run on own positions (exchange.py): what is shown as whole, what is exchanged (the dims of
    # positions and of pieces, and their layout), what no longer happens, and what is read whole
    shown: dict[tuple[Crossing, str], int] = field(default_factory=dict)
    exchanges: dict[tuple[Crossing, str], tuple[int, int, str]] = field(default_factory=dict)
    halos: dict[Crossing, HaloAt] = field(default_factory=dict)  # what modules take in (parallel.py)
    undone: set[Boundary] = field(default_factory=set)
    summing: set[str] = field(default_factory=set)  # modules in which the gradient of what is gathered is partial
    whole_parameters: set[int] = field(default_factory=set)
    whole_modules: set[str] = field(default_factory=set)
    summed_parameters: set[int] = field(default_factory=set)
    random: set[str] = field(default_factory=set)
    shared: dict[int, set[int]] = field(
        default_factory=dict
    )  # values without positions -> calls on shards that read it
    attended: dict[int, SequenceName] = field(default_factory=dict)  # calls that attend with own queries (windows.py)
    calls: tuple[CallRewrite, ...] = ()  # what they become
    work: SequenceWork = field(default_factory=SequenceWork)  # of calls amid code that sees shards
    names: dict[Crossing, SequenceName] = field(default_factory=dict)  # which sequence a crossing is about
    flattened: set[Crossing] = field(default_factory=set)
    whole: list[WholeSequence] = field(default_factory=list)  # what runs on the whole sequence, and why
    pairs: tuple[Finding, ...] = ()  # values with two dims of the whole sequence (parallel.py)
    refused: tuple[WholeSequence, ...] = ()  # why there is no sequence parallelism

    def name_crossings(self, name: str) -> None:
        """Say of every crossing which sequence it is about."""
        keys = [*self.scatters, *self.gathers, *self.gather_sums]
        crossings = (*(b for b, _ in keys), *self.reduce_scatters, *self.returned_shards)
        self.names = {crossing: SequenceName(name, crossing in self.flattened) for crossing in crossings}
        self.attended = dict.fromkeys(self.attended, SequenceName(name))
        self.work = self.work.named(name)

    @property
    def applies(self) -> bool:
        return not self.refused


class Refused(Exception):
    """No boundary can be found, and for what."""

    def __init__(self, reason: WholeSequence) -> None:
        super().__init__(str(reason))
        self.reason = reason


class Restart(Exception):
    """A boundary was added that changes what earlier calls see."""
