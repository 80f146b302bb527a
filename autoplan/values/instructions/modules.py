"""Instructions for modules, and all instructions of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

from autoplan.values.estimate import Cost
from autoplan.values.instructions.base import Collective, Instruction, Move, Spread, instruction
from autoplan.values.instructions.boundaries import Side

# Instructions for a module's run, or for its attributes.


@dataclass(frozen=True)
class AroundModule(Instruction):
    """An instruction before and after each run of a module. `turn`: its order at the output, as at boundaries."""

    turn: ClassVar[int] = 0


@instruction
class VocabularyTable(AroundModule):
    """A table of `rows`, sharded by rows: ids (the module's input at `path`) of other ranks are masked, and the rows
    that were looked up are all-reduced."""

    rows: int
    path: tuple[Any, ...]

    takes, gives = Spread.REPLICATE, Spread.REPLICATE
    says = "out-of-range ids are masked, rows summed"
    cost = Cost("sum")
    in_styles = True
    turn = -1
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
class SplitLogits(AroundModule):
    """A vocabulary head, whose output of `columns` along `dim` stays sharded until the model returns it at `outputs`.

    There it is a DTensor, or gathered if requested; a loss in the model's own forward is computed from the shards. The
    model of a head without `outputs` returns nothing but such a loss.
    """

    columns: int
    dim: int = -1
    outputs: tuple[tuple[Any, ...], ...] = ()

    takes, gives = Spread.SHARD, Spread.SHARD
    says = "logits stay sharded"
    cost = None
    in_styles = True
    turn = 7
    collectives = ()
    always_communicates = True


@instruction
class LocalExperts(AroundModule):
    """A module whose experts are distributed over ranks: of `experts`, each rank holds an equal run.

    `tokens`, `index` and `weights` are paths of its inputs: the values, the experts chosen for each token, and their
    weights; `output` is that of its result. A rank leaves out tokens of experts that it does not hold, and numbers its
    own experts from 0. Without an `index` the tokens are sorted by expert in their first dim, of which a rank takes its
    part.
    """

    experts: int
    tokens: tuple[Any, ...]
    index: tuple[Any, ...] | None = None
    weights: tuple[Any, ...] | None = None
    output: tuple[Any, ...] = ()

    takes, gives = Spread.REPLICATE, Spread.PARTIAL
    says = "each rank computes {held} of {experts} experts"
    cost = None
    in_styles = False
    turn = -2
    collectives = ()  # a boundary all-reduces its output
    always_communicates = True

    def said(self, ranks: int) -> str:
        return f"{self.pattern}: {self.says.format(held=self.experts // ranks, experts=self.experts)}"

    def beyond_styles(self) -> str:
        return f"{self.pattern} places experts on different ranks, which tensor-parallel styles cannot express"

    def problem(self, ranks: int) -> str:
        return f"its {self.experts} experts are not divisible by {ranks} ranks" if self.experts % ranks else ""


@instruction
class ParallelBlock(AroundModule):
    """A block whose branches share a sum: a part that one withholds while the block runs is added by the next one."""

    takes, gives = Spread.ANY, Spread.ANY
    says = "the partial sum that one branch leaves is added by the next branch before the all-reduce"
    cost = None
    in_styles = True
    collectives = ()
    always_communicates = True


@instruction
class IntegerEdit(Instruction):
    """An integer that the module's own Python reads and that must be smaller on a rank.

    `attribute` is a name on the module ("num_heads"), or with a `holder` ("config") a name on that object, of which the
    module gets its own copy. `index` selects inside a list or tuple. `per_rank`: the values if `new` differs by rank.
    """

    attribute: str
    index: int | None
    old: int
    new: int
    per_rank: tuple[int, ...] | None = None
    holder: str = ""

    takes, gives = Spread.ANY, Spread.ANY
    says = "{what} {old} → {new}"
    cost = None
    in_styles = False
    collectives = ()

    @property
    def name(self) -> str:
        """Return the name as the module's code has it: "num_heads", "config.num_heads"."""
        return f"{self.holder}.{self.attribute}" if self.holder else self.attribute

    def on_rank(self, rank: int) -> int:
        """Return the new value on a rank."""
        return self.new if self.per_rank is None else self.per_rank[rank]

    def said(self, ranks: int) -> str:
        name = self.name if self.index is None else f"{self.name}[{self.index}]"
        new = f"{self.new}" if self.per_rank is None else f"{', '.join(map(str, self.per_rank))} by rank"
        return f"{self.pattern}: {self.says.format(what=name, old=self.old, new=new)}"

    def beyond_styles(self) -> str:
        return f"{self.name} of {self.pattern} must be {self.new} on a rank, not {self.old}"

    def problem(self, ranks: int) -> str:
        if self.per_rank is not None and len(self.per_rank) != ranks:
            return f"it has numbers for {len(self.per_rank)} ranks, not {ranks}"
        return ""


# All that is done to a live model, decided when the plan is made; and the capabilities of a plan.

Kind = TypeVar("Kind", bound=Instruction)


@dataclass(frozen=True)
class ParameterRule:
    """The sharding of parameters matching `pattern`. `layout` is the notation of `common/layout.py`; None: replicated.

    `read`: the part of the local shard that ranks of context parallelism, combined with that split, read, and how its
    gradient lies on them (its own pattern is empty).
    """

    pattern: str
    dim: int | None = None
    layout: str | None = None
    gradient: Literal["local", "sum", "shared"] = "local"
    divide: bool = False
    read: ParameterRule | None = None


@dataclass(frozen=True)
class OutputShape:
    """The shape of what the model returned at `path`: its number of dims, and the sizes that its weights determine.
    `features` are (dim, size): output features of products with weights. Batches and lengths are the caller's."""

    path: tuple[Any, ...]
    dims: int
    features: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Constant:
    """A value that modules take or return at `path`, constant in every recorded call. In another it may have a
    gradient, of which each rank computes a part. `sums`: it is all-reduced then; else the call is refused."""

    pattern: str
    side: Side
    path: tuple[Any, ...]
    sums: bool


@dataclass(frozen=True)
class Runtime:
    """The sharding of parameters, and what is done around them when the model runs."""

    parameters: tuple[ParameterRule, ...] = ()
    instructions: tuple[Instruction, ...] = ()
    random: tuple[str, ...] = ()  # module patterns whose random draws act on split values: each rank its own
    random_whole: tuple[str, ...] = ()  # and on replicated values: the same on every rank
    draws: bool = False  # random numbers are drawn in eval mode too
    outputs: tuple[tuple[Any, ...], ...] = ()  # paths of the outputs that the model returned
    shapes: tuple[OutputShape, ...] = ()  # of the outputs that have features
    given: tuple[str, ...] = ()  # the arguments that the model was called with
    unsummed: tuple[str, ...] = ()  # those whose gradient is partial and not summed
    constants: tuple[Constant, ...] = ()  # values without gradient that may have one in another call
    idle: tuple[str, ...] = ()  # module patterns with weights that no recorded call ran

    def of(self, kind: type[Kind]) -> tuple[Kind, ...]:
        """Return the instructions of one kind, or of all kinds that derive from it, in order."""
        return tuple(instruction for instruction in self.instructions if isinstance(instruction, kind))


HookKind: TypeAlias = tuple[str, str]  # modules by `like_modules`, the side of the hook
PICKING: HookKind = ("", "input")  # see `Capabilities.gathered`


@dataclass(frozen=True)
class Capabilities:
    """The features that a plan may use: the scoped function mode, and sharding the stream along the sequence.

    `whole`: patterns of modules whose parameters are replicated, because sharded they gave other results. `experts`:
    experts may be distributed over ranks, if requested. `idle`: a plan may split nothing. `one_stack`: of all stacks of
    blocks only the last is sharded along its sequence (the text's, behind towers). `gathered`: where context
    parallelism gathers the stream, or reduce-scatters a sum; None: where that moves less than an exchange. With
    `PICKING` in it, modules that pick positions take in the whole sequence.
    """

    scoped: bool = True
    sequence: bool = False
    whole: tuple[str, ...] = ()
    experts: bool = True
    idle: bool = False
    one_stack: bool = False
    gathered: tuple[HookKind, ...] | None = None

    def __str__(self) -> str:
        """Return what differs from the usual."""
        of = " of one stack" if self.one_stack else ""
        parts = (f"the stream{of} is sharded along the sequence" if self.sequence else "",
                "" if self.scoped else "no call inside a module's forward is rewritten",
                f"replicated: {', '.join(self.whole)}" if self.whole else "",
                "" if self.experts else "experts are not placed on different ranks")  # fmt: skip
        return "; ".join(filter(None, parts))
