"""Reasons why something stays whole: a closed set of small values. Code asks their class and numbers, people read their
text.

Reasons arise deep inside the analysis and are read far away: by the planner, by checks, by exports, by whoever loads a
plan file. Each is a class of its own with its data in fields, and this file is the one place that makes text of them:
`str(reason)`. Nobody compares or parses that text. A new reason is a class here; files identify it by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, dataclass_transform

from autoplan.values.not_placed import SENTENCES, Unplaceable


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True)
class Reason:
    """The base of the classes below, which are frozen dataclasses too. `says`: its text, with its fields in braces;
    where more decides the text, a class has its own `__str__`. `paths`: fields that hold the path of a module or a
    parameter."""

    says: ClassVar[str] = ""
    paths: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(frozen=True)(cls)

    def __str__(self) -> str:
        return self.says.format(**vars(self))

    def with_paths(self, changed: Callable[[str], str]) -> Reason:
        """The same with each path changed, so that reasons that differ only in the number of a block become equal.

        >>> OfDim(0, 4, NotPlaced("ready-made", "add", "layers.3")).with_paths(lambda path: "layers.*").why.module
        'layers.*'
        """
        inner = {name: value.with_paths(changed) for name, value in vars(self).items() if isinstance(value, Reason)}
        own = {name: changed(getattr(self, name)) for name in self.paths if getattr(self, name) is not None}
        return replace(self, **inner, **own)


def _of_text(name: str, says: str) -> type[Reason]:
    """Return a reason without fields."""
    return type(name, (Reason,), {"says": says, "__module__": __name__})


def sentence(reasons: Iterable[Reason]) -> str:
    """Return several reasons one after the other, each once."""
    return "; ".join(dict.fromkeys(map(str, reasons)))


# Reasons about one axis

SizeOfInput = _of_text("SizeOfInput", "its size depends on the input")
ResidualStream = _of_text("ResidualStream", "it is the residual stream, which is replicated")
NeverContracted = _of_text("NeverContracted", "no matmul reduces over this dim; sharding it saves no memory")
SingleWeight = _of_text("SingleWeight", "only one weight has this axis, so no other op benefits from sharding it")
OnBothDims = _of_text("OnBothDims", "both dims of one weight have it")
InsideScaledBlock = _of_text("InsideScaledBlock", "it lies inside a block of numbers that share one scale")


class DoesNotDivide(Reason):
    """The only reason that another tp size would remove."""

    size: int
    ranks: int

    says = "{size} is not divisible by tp={ranks}"


class TooFewRows(Reason):
    """A vocabulary may be sharded unevenly, but every rank needs a row."""

    rows: int
    ranks: int

    says = "{rows} rows are too few for {ranks} ranks: each needs at least one"


class ReadAcross(Reason):
    """`events`, by name (axes/terms.py): ops along the axis after which its positions are no longer independent."""

    events: tuple[str, ...]

    def __str__(self) -> str:
        return f"an op reads across it ({', '.join(self.events)})"


class NeedsSums(Reason):
    events: tuple[str, ...]

    def __str__(self) -> str:
        return f"each of its ops would need an all-reduce ({', '.join(self.events)})"


class Narrow(Reason):
    """`least`: the width from which a split is worth it."""

    least: int

    says = "all its dims are smaller than {least}: sharding would cost more than it saves"


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


class AlreadySplit(Reason):
    """A weight is split once. `cheaper`: along the other axis, because ranks then exchange less."""

    cheaper: bool = False

    def __str__(self) -> str:
        if self.cheaper:
            return "its weights are sharded along another axis, with less communication"
        return "its weights are already sharded along another axis"


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


class NeedsRewriting(Reason):
    """Only used where calls may not be changed."""

    call: str
    module: str

    paths = ("module",)
    says = "{call} in {module} would need its literals rewritten"


class AxisWhole(Reason):
    """An axis that the solver gave up on the way, with the reason."""

    size: int
    why: Reason

    says = "an axis of {size} is not sharded: {why}"


# Reasons from what was requested

DifferedOnRanks = _of_text("DifferedOnRanks", "with it sharded, a tiny clone's results differed on simulated ranks")
MadeAnewInTraining = _of_text(
    "MadeAnewInTraining",
    "this weight is computed differently in training (a norm is estimated), which was not recorded",
)
SumsInside = _of_text(
    "SumsInside",
    "its module's own code would sum over ranks, where no positions can be exchanged: each rank of cp runs all of it",
)
OnlyExperts = _of_text("OnlyExperts", "only experts are placed on different ranks")
Exchanged = _of_text("Exchanged", "each rank applies it to its own positions; ranks then exchange positions for heads")
MixesNothing = _of_text(
    "MixesNothing",
    "no op that mixes positions treats its units independently: each rank applies it to its own positions",
)
CutOtherwiseOverBoth = _of_text(
    "CutOtherwiseOverBoth", "its units are sharded over tp and cp together, not over tp alone"
)


class KeptWhole(Reason):
    """`line` of `plan` says so."""

    plan: str
    parameter: str
    line: str

    paths = ("parameter",)
    says = "{plan} replicates {parameter} ({line})"


class CutElsewhere(Reason):
    """`line` of `plan` shards it along another dim; None: along none that it has."""

    plan: str
    parameter: str
    dim: int | None
    line: str

    paths = ("parameter",)
    says = "{plan} shards {parameter} along dim {dim} ({line})"


class NotNamed(Reason):
    """`plan` decides about all weights, and has no line for this one."""

    plan: str
    parameter: str

    paths = ("parameter",)
    says = "{plan} does not name {parameter}, so it is replicated"


class MixedWhole(Reason):
    size: int
    ranks: int
    own_queries: bool = False

    def __str__(self) -> str:
        how = "for its own queries" if self.own_queries else "the same ones, on all positions"
        return (
            f"{self.size} units, which ops that mix positions treat independently, are not divisible by "
            f"{self.ranks} ranks: each rank of cp computes {how}"
        )


# Reasons about experts


class ExpertsDoNotDivide(Reason):
    experts: int
    ranks: int

    says = "{experts} experts are not divisible by {ranks} ranks"


class ExpertsWhole(Reason):
    """The axis of a module's experts is not split; `why`, if that is known."""

    why: Reason | None = None

    def __str__(self) -> str:
        return "its experts are replicated" + (f" ({self.why})" if self.why is not None else "")


# Reasons about one parameter

# A table is sharded by its columns rather than by its rows.
TableByColumns = _of_text(
    "TableByColumns", "every rank looks up all ids; gathering columns moves half as much as summing sharded rows"
)
SingleNumber = _of_text("SingleNumber", "it is a single number")
Unused = _of_text("Unused", "it was not used in any recorded run")
NothingToSplit = _of_text("NothingToSplit", "none of its dims can be sharded")
# Not a reason why it is replicated, but the cost of that.
GradientSummed = _of_text("GradientSummed", "its gradient is summed over ranks")


class CutOfRecurrent(Reason):
    """The rows of a recurrent weight are sharded although no axis is split; the reason names what is gathered."""

    at_each_step: bool

    def __str__(self) -> str:
        if self.at_each_step:
            return "a step needs the full previous state: each rank computes its hidden units and gathers the new state"
        return "a step needs the full previous state: the weights are gathered for the call, which every rank runs"


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


REASONS: dict[str, type[Reason]] = {kind.__name__: kind for kind in Reason.__subclasses__()}
