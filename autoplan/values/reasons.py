"""Reasons why something stays whole: a closed set of small values. Code asks their class and numbers, people read their
text.

Reasons arise deep inside the analysis and are read far away: by the planner, by checks, by exports, by whoever loads a
plan file. Each is a class of its own with its data in fields, and this file is the one place that makes text of them:
`str(reason)`. Nobody compares or parses that text. A new reason is a class here; files identify it by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from autoplan.values.not_placed import SENTENCES, Unplaceable

__all__ = [
    "REASONS",
    "AlreadySplit",
    "AxisWhole",
    "CutElsewhere",
    "CutOfRecurrent",
    "DifferedOnRanks",
    "DoesNotDivide",
    "ExpertsDoNotDivide",
    "ExpertsWhole",
    "GradientSummed",
    "InsideQuantisedBlock",
    "InsideScaledBlock",
    "KeptWhole",
    "Narrow",
    "NeedsRewriting",
    "NeedsSums",
    "NeverContracted",
    "NotNamed",
    "NotPlaced",
    "NothingToSplit",
    "OfDim",
    "OnBothDims",
    "MadeAnewInTraining",
    "Exchanged",
    "MixedWhole",
    "MixesNothing",
    "CutOtherwiseOverBoth",
    "OnlyExperts",
    "ReadAcross",
    "Reason",
    "ResidualStream",
    "SingleNumber",
    "SingleWeight",
    "SizeOfInput",
    "TableByColumns",
    "TooFewRows",
    "Unused",
    "sentence",
]


@dataclass(frozen=True)
class Reason:
    """The base of the classes below. `paths`: those of its fields that hold the path of a module or a parameter."""

    paths: ClassVar[tuple[str, ...]] = ()

    def with_paths(self, changed: Callable[[str], str]) -> Reason:
        """The same with each path changed, so that reasons that differ only in the number of a block become equal.

        >>> OfDim(0, 4, NotPlaced("ready-made", "add", "layers.3")).with_paths(lambda path: "layers.*").why.module
        'layers.*'
        """
        values = {name: getattr(self, name) for name in (field.name for field in fields(self))}
        inner = {name: value.with_paths(changed) for name, value in values.items() if isinstance(value, Reason)}
        own = {name: changed(values[name]) for name in self.paths if values[name] is not None}
        return replace(self, **inner, **own)


def sentence(reasons: Iterable[Reason]) -> str:
    """Return several reasons one after the other, each once."""
    return "; ".join(dict.fromkeys(map(str, reasons)))


# Reasons about one axis


@dataclass(frozen=True)
class DoesNotDivide(Reason):
    """The only reason that another tp size would remove."""

    size: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.size} is not divisible by tp={self.ranks}"


@dataclass(frozen=True)
class TooFewRows(Reason):
    """A vocabulary may be sharded unevenly, but every rank needs a row."""

    rows: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.rows} rows are too few for {self.ranks} ranks: each needs at least one"


@dataclass(frozen=True)
class SizeOfInput(Reason):
    def __str__(self) -> str:
        return "its size depends on the input"


@dataclass(frozen=True)
class ResidualStream(Reason):
    def __str__(self) -> str:
        return "it is the residual stream, which is replicated"


@dataclass(frozen=True)
class ReadAcross(Reason):
    """`events`, by name (axes/events.py): ops along the axis after which its positions are no longer independent."""

    events: tuple[str, ...]

    def __str__(self) -> str:
        return f"an op reads across it ({', '.join(self.events)})"


@dataclass(frozen=True)
class NeedsSums(Reason):
    events: tuple[str, ...]

    def __str__(self) -> str:
        return f"each of its ops would need an all-reduce ({', '.join(self.events)})"


@dataclass(frozen=True)
class NeverContracted(Reason):
    def __str__(self) -> str:
        return "no matmul reduces over this dim; sharding it saves no memory"


@dataclass(frozen=True)
class SingleWeight(Reason):
    def __str__(self) -> str:
        return "only one weight has this axis, so no other op benefits from sharding it"


@dataclass(frozen=True)
class Narrow(Reason):
    """`least`: the width from which a split is worth it."""

    least: int

    def __str__(self) -> str:
        return f"all its dims are smaller than {self.least}: sharding would cost more than it saves"


@dataclass(frozen=True)
class OnBothDims(Reason):
    def __str__(self) -> str:
        return "both dims of one weight have it"


@dataclass(frozen=True)
class InsideScaledBlock(Reason):
    def __str__(self) -> str:
        return "it lies inside a block of numbers that share one scale"


@dataclass(frozen=True)
class InsideQuantisedBlock(Reason):
    """Another tp size may remove it. `size`: of the dim of `weight` (a pattern) that is stored in blocks.

    `uneven`: the largest shard of it, if it were split unevenly between blocks; 0: it cannot be.
    """

    weight: str
    size: int
    ranks: int
    block: int
    uneven: int = 0

    def __str__(self) -> str:
        local_size = f"{self.size / self.ranks:g} of {self.size}"
        parts = self.size / self.ranks / self.block
        blocks_held = f"{parts:g} quantised blocks of {self.block} in {self.weight}"
        blocks = -(-self.size // self.block)
        blocks_held += f" (there are {blocks} for {self.ranks} ranks)" if blocks < self.ranks else ""
        return f"at tp={self.ranks} a rank would hold {local_size}, {blocks_held}"


@dataclass(frozen=True)
class AlreadySplit(Reason):
    """A weight is split once. `cheaper`: along the other axis, because ranks then exchange less."""

    cheaper: bool = False

    def __str__(self) -> str:
        if self.cheaper:
            return "its weights are sharded along another axis, with less communication"
        return "its weights are already sharded along another axis"


@dataclass(frozen=True)
class NotPlaced(Reason):
    """The split would need something that no mechanism can do: `what`, met at a `call` of `module` ("" the model).

    `op`, `argument`, `count`: further details in the sentence of `what` (values/not_placed.py).
    """

    what: Unplaceable
    call: str = ""
    module: str | None = None
    op: str = ""
    argument: str = ""
    count: float = 0

    paths = ("module",)

    def __str__(self) -> str:
        """
        >>> print(NotPlaced("across", "sort", "layers.0", op="sort"))
        sort over a sharded dim (sort in layers.0)
        """
        text = SENTENCES[self.what].format(call=self.call, op=self.op, argument=self.argument, count=self.count)
        if self.module is None:
            return text
        place = self.module or "the model"
        return f"{text} ({self.call} in {place})" if self.call else f"{text} (in {place})"


@dataclass(frozen=True)
class NeedsRewriting(Reason):
    """Only used where calls may not be changed."""

    call: str
    module: str

    paths = ("module",)

    def __str__(self) -> str:
        return f"{self.call} in {self.module} would need its literals rewritten"


@dataclass(frozen=True)
class AxisWhole(Reason):
    """An axis that the solver gave up on the way, with the reason."""

    size: int
    why: Reason

    def __str__(self) -> str:
        return f"an axis of {self.size} is not sharded: {self.why}"


# Reasons from what was requested


@dataclass(frozen=True)
class KeptWhole(Reason):
    """`line` of `plan` says so."""

    plan: str
    parameter: str
    line: str

    paths = ("parameter",)

    def __str__(self) -> str:
        return f"{self.plan} replicates {self.parameter} ({self.line})"


@dataclass(frozen=True)
class CutElsewhere(Reason):
    """`line` of `plan` shards it along another dim; None: along none that it has."""

    plan: str
    parameter: str
    dim: int | None
    line: str

    paths = ("parameter",)

    def __str__(self) -> str:
        return f"{self.plan} shards {self.parameter} along dim {self.dim} ({self.line})"


@dataclass(frozen=True)
class NotNamed(Reason):
    """`plan` decides about all weights, and has no line for this one."""

    plan: str
    parameter: str

    paths = ("parameter",)

    def __str__(self) -> str:
        return f"{self.plan} does not name {self.parameter}, so it is replicated"


@dataclass(frozen=True)
class DifferedOnRanks(Reason):
    def __str__(self) -> str:
        return "with it sharded, a tiny clone's results differed on simulated ranks"


@dataclass(frozen=True)
class MadeAnewInTraining(Reason):
    def __str__(self) -> str:
        return "this weight is computed differently in training (a norm is estimated), which was not recorded"


@dataclass(frozen=True)
class OnlyExperts(Reason):
    def __str__(self) -> str:
        return "only experts are placed on different ranks"


@dataclass(frozen=True)
class Exchanged(Reason):
    def __str__(self) -> str:
        return "each rank applies it to its own positions; ranks then exchange positions for heads"


@dataclass(frozen=True)
class MixesNothing(Reason):
    def __str__(self) -> str:
        return "no op that mixes positions treats its units independently: each rank applies it to its own positions"


@dataclass(frozen=True)
class MixedWhole(Reason):
    size: int
    ranks: int

    def __str__(self) -> str:
        return (
            f"{self.size} units, which ops that mix positions treat independently, are not divisible by "
            f"{self.ranks} ranks: the ranks of cp compute the same ones, on all positions"
        )


@dataclass(frozen=True)
class CutOtherwiseOverBoth(Reason):
    def __str__(self) -> str:
        return "its units are sharded over tp and cp together, not over tp alone"


# Reasons about experts


@dataclass(frozen=True)
class ExpertsDoNotDivide(Reason):
    experts: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.experts} experts are not divisible by {self.ranks} ranks"


@dataclass(frozen=True)
class ExpertsWhole(Reason):
    """The axis of a module's experts is not split; `why`, if that is known."""

    why: Reason | None = None

    def __str__(self) -> str:
        return "its experts are replicated" + (f" ({self.why})" if self.why is not None else "")


# Reasons about one parameter


@dataclass(frozen=True)
class CutOfRecurrent(Reason):
    """The rows of a recurrent weight are sharded although no axis is split; the reason names what is gathered."""

    at_each_step: bool

    def __str__(self) -> str:
        if self.at_each_step:
            return "a step needs the full previous state: each rank computes its hidden units and gathers the new state"
        return "a step needs the full previous state: the weights are gathered for the call, which every rank runs"


@dataclass(frozen=True)
class TableByColumns(Reason):
    """A table is sharded by its columns rather than by its rows."""

    def __str__(self) -> str:
        return "every rank looks up all ids; gathering columns moves half as much as summing sharded rows"


@dataclass(frozen=True)
class OfDim(Reason):
    """The reason why one axis in a dim of a parameter is whole. `size`: of the axis, `rows`: of the dim if larger."""

    dim: int
    size: int
    why: Reason
    rows: int = 0

    def __str__(self) -> str:
        """
        >>> print(OfDim(0, 16, NeverContracted()), OfDim(1, 8, ResidualStream(), rows=16), sep=chr(10))
        dim 0 (16): no matmul reduces over this dim; sharding it saves no memory
        dim 1 (a factor 8 of 16): it is the residual stream, which is replicated
        """
        size = f"a factor {self.size} of {self.rows}" if self.rows else self.size
        return f"dim {self.dim} ({size}): {self.why}"


@dataclass(frozen=True)
class SingleNumber(Reason):
    def __str__(self) -> str:
        return "it is a single number"


@dataclass(frozen=True)
class Unused(Reason):
    def __str__(self) -> str:
        return "it was not used in any recorded run"


@dataclass(frozen=True)
class NothingToSplit(Reason):
    def __str__(self) -> str:
        return "none of its dims can be sharded"


@dataclass(frozen=True)
class GradientSummed(Reason):
    """Not a reason why it is replicated, but the cost of that."""

    def __str__(self) -> str:
        return "its gradient is summed over ranks"


REASONS: dict[str, type[Reason]] = {kind.__name__: kind for kind in Reason.__subclasses__()}
