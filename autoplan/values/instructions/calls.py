"""Instructions for calls of torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from autoplan.values.estimate import Cost
from autoplan.values.instructions.base import Amount, Collective, Instruction, Move, Spread, instruction

# What is done to one call of a module's own Python, where neither a boundary nor a stored integer can do it.


@dataclass(frozen=True)
class CallSite:
    """Where a call stands: the torch function, and its place in the code, "forward:12:8-30>repeat_kv:3:20-41".

    Only some of the calls there may be meant: the `time`-th of a module's run (from 1), those whose first argument has
    so many `dims` (-1: is no tensor), those whose first argument is not `width` wide.
    """

    function: str
    place: str
    time: int | None = None
    dims: int | None = None
    width: int | None = None

    def __str__(self) -> str:
        """
        >>> print(CallSite("view", "forward:3:8-20", time=2))
        view at forward:3:8-20, time 2
        """
        more = [f"time {self.time}"] if self.time is not None else []
        given = "no tensor" if self.dims == -1 else f"{self.dims} dims"
        more += [f"where it is given {given}"] if self.dims is not None else []
        more += [f"where its last dim is not {self.width}"] if self.width is not None else []
        return ", ".join([f"{self.function} at {self.place}", *more])


@dataclass(frozen=True)
class LiteralArgument:
    """A number at `path` in a call's arguments: what each rank's Python passes there, and what each must pass."""

    path: tuple[Any, ...]
    passed: tuple[int, ...]
    wanted: tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """A dim of one of a call's outputs, of which a rank keeps its shard."""

    output: int
    dim: int
    layout: str


@dataclass(frozen=True)
class CallRewrite(Instruction):
    """A call that runs otherwise on a rank. What any of them may need besides what its kind does:

    `arguments`: numbers to pass in place of those written. `copies`: paths of arguments whose gradient is summed.
    `cuts`: outputs that are made whole, of which a rank keeps its shard. `sometimes`: a run may leave the call out.
    """

    site: CallSite
    arguments: tuple[LiteralArgument, ...] = field(default=(), kw_only=True)
    copies: tuple[tuple[Any, ...], ...] = field(default=(), kw_only=True)
    cuts: tuple[Cut, ...] = field(default=(), kw_only=True)
    sometimes: bool = field(default=False, kw_only=True)

    in_styles: ClassVar[bool] = False

    @property
    def moves(self) -> tuple[Move, ...]:
        copied = (Move(Collective.ALL_REDUCE, Amount.ARGUMENT, backward=True, path=path) for path in self.copies)
        return (*self.own_moves, *copied)

    @property
    def own_moves(self) -> tuple[Move, ...]:
        """What the call itself moves, by its kind."""
        return self.collectives

    @property
    def reduces(self) -> bool:
        """Does the call put together what ranks hold parts of?"""
        return bool(self.collectives)

    def bare(self) -> RewriteCall:
        """The same without what its kind does."""
        more = {"arguments": self.arguments, "copies": self.copies, "cuts": self.cuts, "sometimes": self.sometimes}
        return RewriteCall(self.pattern, self.site, **more)  # type: ignore[arg-type]

    def said(self, ranks: int) -> str:
        done = [
            *(["sizes made local"] if self.arguments else []),
            *(["gradients of its inputs summed"] if self.copies else []),
            *([self.says] if self.says else []),
            *(["output cut to the rank's shard"] if self.cuts else []),
        ]
        return f"{self.pattern}: {self.site}: {', '.join(done) or 'changed'}"

    def beyond_styles(self) -> str:
        return f"the call of {self.site.function} in {self.pattern} must be changed"

    def layouts(self) -> Iterator[str]:
        yield from super().layouts()
        yield from (cut.layout for cut in self.cuts)

    def problem(self, ranks: int) -> str:
        odd = (a for a in self.arguments if not len(a.passed) == len(a.wanted) == ranks)
        if (one := next(odd, None)) is not None:
            return f"its argument {list(one.path)} has numbers for {len(one.wanted)} ranks, not {ranks}"
        return ""


@instruction
@dataclass(frozen=True)
class RewriteCall(CallRewrite):
    """Run as written, with other numbers, sums of its inputs' gradients, or its outputs cut."""

    takes = Spread.ANY
    gives = Spread.ANY
    says = ""
    cost = None
    collectives = ()


@instruction
@dataclass(frozen=True)
class SumCall(CallRewrite):
    """A call that sums over an axis of which each rank holds a part: the parts are summed, a bias is added once."""

    takes = Spread.SHARD
    gives = Spread.REPLICATE
    says = "output summed over ranks"
    cost = Cost("sum", "call")
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
@dataclass(frozen=True)
class MeanCall(CallRewrite):
    """A mean over an axis of which each rank holds an equal part: the means of the parts are averaged."""

    takes = Spread.SHARD
    gives = Spread.REPLICATE
    says = "output averaged over ranks"
    cost = Cost("mean", "call")
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
@dataclass(frozen=True)
class NormCall(CallRewrite):
    """layer_norm or rms_norm over the last `dims` dims, which are `count` numbers on all ranks together. Its statistics
    are summed over ranks, forward and backward: the squares, and before them, where it takes two, the mean."""

    dims: int
    count: int
    statistics: int

    takes = Spread.SHARD
    gives = Spread.SHARD
    says = "statistics summed over ranks (norm)"
    cost = Cost("norm", "call")
    collectives = (Move(Collective.ALL_REDUCE, Amount.ROWS), Move(Collective.ALL_REDUCE, Amount.ROWS, backward=True))

    @property
    def own_moves(self) -> tuple[Move, ...]:
        return tuple(Move(move.collective, move.of, move.backward, self.statistics) for move in self.collectives)


@instruction
@dataclass(frozen=True)
class VarianceCall(CallRewrite):
    """`var` or `std` over `dims` (from the end), of which rank r holds `held[r]` positions. Ranks gather each other's
    mean and variance and put them together. `correction` is what is taken off the count."""

    dims: tuple[int, ...]
    keepdim: bool
    correction: int
    held: tuple[int, ...]

    takes = Spread.SHARD
    gives = Spread.REPLICATE
    says = "each rank's mean and variance gathered"
    cost = Cost("variance", "call")
    collectives = (Move(Collective.ALL_GATHER, Amount.MEAN_AND_VARIANCE),)

    def problem(self, ranks: int) -> str:
        short = f"it says what {len(self.held)} ranks hold, not {ranks}" if len(self.held) != ranks else ""
        return short or super().problem(ranks)


@instruction
@dataclass(frozen=True)
class LengthCall(CallRewrite):
    """Lengths of vectors along `dims` (from the end), of which each rank holds a part: their squares are summed. A
    function that `divides` by the lengths sums their gradient, too."""

    dims: tuple[int, ...]
    keepdim: bool
    divides: bool

    takes = Spread.SHARD
    gives = Spread.REPLICATE
    says = "squares summed over ranks (length)"
    cost = Cost("length", "call")
    collectives = (Move(Collective.ALL_REDUCE, Amount.LENGTHS),)

    @property
    def own_moves(self) -> tuple[Move, ...]:
        back = Move(Collective.ALL_REDUCE, Amount.LENGTHS, backward=True)
        return (*self.collectives, back) if self.divides else self.collectives


@instruction
@dataclass(frozen=True)
class EmbeddingCall(CallRewrite):
    """A lookup in a table of which each rank holds a run of the `rows`: foreign ids give zeros, the rows are summed."""

    rows: int

    takes = Spread.REPLICATE
    gives = Spread.REPLICATE
    says = "ids of other ranks masked, rows summed over ranks"
    cost = Cost("embedding", "call")
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
@dataclass(frozen=True)
class RowCall(CallRewrite):
    """table[number] or table[ids], of a table of which each rank holds a run of the `rows`: others than the owner of a
    row give zeros."""

    rows: int

    takes = Spread.SHARD
    gives = Spread.REPLICATE
    says = "row of the rank that has it summed over ranks"
    cost = Cost("row", "call")
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
@dataclass(frozen=True)
class GatherCall(CallRewrite):
    """A product whose pieces along `dim` are gathered into the order of `layout`."""

    dim: int
    layout: str

    takes = Spread.REPLICATE
    gives = Spread.REPLICATE
    says = "output gathered from all ranks"
    cost = Cost("gather", "call")
    collectives = (Move(Collective.ALL_GATHER),)


@instruction
@dataclass(frozen=True)
class AttentionCall(CallRewrite):
    """`multi_head_attention_forward` on a rank's own heads: its output projection is summed over ranks."""

    takes = Spread.PARTIAL_GRADIENT
    gives = Spread.REPLICATE
    says = "computed on the rank's heads, output summed over ranks"
    cost = Cost("attention", "call")
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
@dataclass(frozen=True)
class EqualPieces(CallRewrite):
    """Pieces along `dim` (from the end), equally long on the whole model, not on a rank: `pieces[r]` are rank r's."""

    dim: int
    pieces: tuple[tuple[int, ...], ...]

    takes = Spread.SHARD
    gives = Spread.SHARD
    says = "cut into the rank's own pieces"
    cost = None
    collectives = ()

    def problem(self, ranks: int) -> str:
        short = f"it has pieces for {len(self.pieces)} ranks, not {ranks}" if len(self.pieces) != ranks else ""
        return short or super().problem(ranks)


@instruction
@dataclass(frozen=True)
class DrawOnShards(CallRewrite):
    """A random draw on a rank's shard, in a module that also draws on whole values: from the rank's own stream."""

    takes = Spread.SHARD
    gives = Spread.SHARD
    says = "drawn from the rank's own random numbers"
    cost = None
    collectives = ()


# What a rank does at a call that runs a recurrent network, of whose weights it holds some rows.


@dataclass(frozen=True)
class HeldRows:
    """Where a weight stands in a call's arguments, and how its rows lie on ranks."""

    path: tuple[Any, ...]
    layout: str


@instruction
@dataclass(frozen=True)
class RecurrentCall(CallRewrite):
    """All steps in one call: the weights are gathered, and it runs whole. Backward a rank keeps the gradient of its
    rows."""

    weights: tuple[HeldRows, ...]

    takes = Spread.REPLICATE
    gives = Spread.REPLICATE
    says = "weights gathered from all ranks for this call, all steps computed on each"
    cost = Cost("gather of the weights", "call")
    collectives = (Move(Collective.ALL_GATHER, Amount.ARGUMENT),)

    @property
    def own_moves(self) -> tuple[Move, ...]:
        return tuple(Move(Collective.ALL_GATHER, Amount.ARGUMENT, path=weight.path) for weight in self.weights)

    def layouts(self) -> Iterator[str]:
        yield from super().layouts()
        yield from (weight.layout for weight in self.weights)


@instruction
@dataclass(frozen=True)
class CellCall(CallRewrite):
    """One step of a cell: each rank multiplies with the rows of the weights that it holds, which lie in `layout`.

    A cell has so many `gates` and `states`. Where a rank holds all gates of its hidden units ("4*48!"), the new states
    are gathered; else the gates are, and the step goes on whole. Backward the gradients of the step's input and of the
    states before it are summed.
    """

    layout: str
    gates: int
    states: int

    takes = Spread.PARTIAL_GRADIENT
    gives = Spread.REPLICATE
    says = "computed for the rank's rows of the gates, the new state gathered"
    cost = Cost("gather of the state", "call")
    collectives = (Move(Collective.ALL_GATHER),)

    @property
    def by_unit(self) -> bool:
        """Does a rank hold all gates of its hidden units?"""
        return "*" in self.layout or self.gates == 1

    @property
    def own_moves(self) -> tuple[Move, ...]:
        states = tuple(("args", 1, at) for at in range(self.states)) if self.states > 1 else (("args", 1),)
        given: tuple[tuple[Any, ...], ...] = (("args", 0), *(states if self.by_unit else states[:1]))
        gathered = self.states if self.by_unit else 2 * self.gates  # of the input and of the state
        back = (Move(Collective.ALL_REDUCE, Amount.ARGUMENT, backward=True, path=path) for path in given)
        return (Move(Collective.ALL_GATHER, times=gathered), *back)
