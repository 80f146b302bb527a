"""Instructions for calls of torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from autoplan.values.estimate import Cost
from autoplan.values.instructions.base import Amount, Collective, Instruction, Move, Spread, instruction
from autoplan.values.instructions.boundaries import SequenceName

# Instructions for one call of a module's own Python, where neither a boundary nor an integer edit is enough.


@dataclass(frozen=True)
class CallSite:
    """The place of a call: the torch function, and its position in the code, "forward:12:8-30>repeat_kv:3:20-41".

    Only some of the calls there may be meant: the `time`-th of a module's run (from 1), those whose first argument has
    `dims` dims (-1: is no tensor), those whose first argument is not `width` wide.
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
        shape = "no tensor" if self.dims == -1 else f"{self.dims} dims"
        more += [f"where given {shape}"] if self.dims is not None else []
        more += [f"where its last dim is not {self.width}"] if self.width is not None else []
        return ", ".join([f"{self.function} at {self.place}", *more])


@dataclass(frozen=True)
class LiteralArgument:
    """A number at `path` in a call's arguments: the one that each rank's Python passes, and the one it must pass."""

    path: tuple[Any, ...]
    passed: tuple[int, ...]
    wanted: tuple[int, ...]


@dataclass(frozen=True)
class LengthArgument:
    """A number at `path`, a multiple of a sequence's length `plus` a number: code passes that of a rank's positions,
    and the call runs on all; the other way round where it runs on a rank's `own`."""

    path: tuple[Any, ...]
    sequence: SequenceName
    plus: int = 0
    own: bool = False


@dataclass(frozen=True)
class Cut:
    """A dim of one of a call's outputs, of which a rank keeps its shard."""

    output: int
    dim: int
    layout: str


@dataclass(frozen=True)
class CallRewrite(Instruction):
    """A call that runs differently on a rank. Besides what its kind does, any of them may need:
    `arguments`: numbers to pass in place of those written. `lengths`: numbers to scale to all positions. `copies`:
    paths of arguments whose gradient is summed. `cuts`: outputs created at full size, of which a rank keeps its shard.
    `sometimes`: a run may leave the call out."""

    site: CallSite
    arguments: tuple[LiteralArgument, ...] = field(default=(), kw_only=True)
    lengths: tuple[LengthArgument, ...] = field(default=(), kw_only=True)
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
        """Return what the call itself moves, by its kind."""
        return self.collectives

    @property
    def reduces(self) -> bool:
        """Return whether the call combines parts that ranks hold."""
        return bool(self.collectives)

    def said(self, ranks: int) -> str:
        done = [
            *(["local sizes"] if self.arguments else []),
            *dict.fromkeys(f"the {'local' if each.own else 'global'} sequence length" for each in self.lengths),
            *(["gradients of its inputs summed"] if self.copies else []),
            *([self.says] if self.says else []),
            *(["output sliced to the rank's shard"] if self.cuts else []),
        ]
        return f"{self.pattern}: {self.site}: {', '.join(done) or 'changed'}"

    def beyond_styles(self) -> str:
        return f"calls of {self.site.function} in {self.pattern} must be rewritten"

    def layouts(self) -> Iterator[str]:
        yield from super().layouts()
        yield from (cut.layout for cut in self.cuts)

    def problem(self, ranks: int) -> str:
        odd = (a for a in self.arguments if not len(a.passed) == len(a.wanted) == ranks)
        if (literal := next(odd, None)) is not None:
            return f"its argument {list(literal.path)} has numbers for {len(literal.wanted)} ranks, not {ranks}"
        return ""


@instruction
class RewriteCall(CallRewrite):
    """A call that runs as written, with other numbers, sums of its inputs' gradients, or its outputs sliced."""

    takes, gives = Spread.ANY, Spread.ANY
    says = ""
    cost = None
    collectives = ()


@instruction
class SumCall(CallRewrite):
    """A call that sums over a sharded axis: the partial result is all-reduced, a bias is added once."""

    takes, gives = Spread.SHARD, Spread.REPLICATE
    says = "output summed over ranks"
    cost = Cost("sum", "call")
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
class ReduceScatterCall(CallRewrite):
    """A call that sums over a sharded axis, of which each rank keeps its own positions along `dim` (from the end)."""

    dim: int
    sequence: SequenceName

    takes, gives = Spread.SHARD, Spread.SEQUENCE_SHARD
    says = "output summed over ranks and sharded along the sequence"
    cost = Cost("sum", "call")
    collectives = (Move(Collective.REDUCE_SCATTER), Move(Collective.ALL_GATHER, backward=True))


@instruction
class CallOverPositions(CallRewrite):
    """A sum, or `mean`, over the positions of `sequence` along `dim` (from the end) of its first input, of which each
    rank has its own: parts are all-reduced, and so are the parts of the gradient that ranks have."""

    dim: int
    sequence: SequenceName
    mean: bool

    takes, gives = Spread.SEQUENCE_SHARD, Spread.REPLICATE
    says = "parts of all positions summed over ranks, and their gradients"
    cost = Cost("sum", "call")
    collectives = (Move(Collective.ALL_REDUCE), Move(Collective.ALL_REDUCE, backward=True))


@instruction
class MeanCall(CallRewrite):
    """A mean over an axis with equal shards: the means of the shards are averaged."""

    takes, gives = Spread.SHARD, Spread.REPLICATE
    says = "output averaged over ranks"
    cost = Cost("mean", "call")
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
class NormCall(CallRewrite):
    """layer_norm or rms_norm over the last `dims` dims, with `count` elements over all ranks. Its statistics are
    all-reduced, forward and backward: the squares, and before them, if it takes two statistics, the mean."""

    dims: int
    count: int
    statistics: int

    takes, gives = Spread.SHARD, Spread.SHARD
    says = "statistics summed over ranks (norm)"
    cost = Cost("norm", "call")
    collectives = (Move(Collective.ALL_REDUCE, Amount.ROWS), Move(Collective.ALL_REDUCE, Amount.ROWS, backward=True))

    @property
    def own_moves(self) -> tuple[Move, ...]:
        return tuple(Move(move.collective, move.of, move.backward, self.statistics) for move in self.collectives)


@instruction
class VarianceCall(CallRewrite):
    """`var` or `std` over `dims` (from the end), of which rank r holds `held[r]` positions. Ranks gather each other's
    mean and variance and combine them. `correction` is subtracted from the count."""

    dims: tuple[int, ...]
    keepdim: bool
    correction: int
    held: tuple[int, ...]

    takes, gives = Spread.SHARD, Spread.REPLICATE
    says = "mean and variance of each rank gathered"
    cost = Cost("variance", "call")
    collectives = (Move(Collective.ALL_GATHER, Amount.MEAN_AND_VARIANCE),)

    def problem(self, ranks: int) -> str:
        short = f"it lists shards of {len(self.held)} ranks, not {ranks}" if len(self.held) != ranks else ""
        return short or super().problem(ranks)


@instruction
class LengthCall(CallRewrite):
    """Lengths of vectors along sharded `dims` (from the end): the squares are all-reduced. A function that `divides` by
    the lengths all-reduces their gradient, too."""

    dims: tuple[int, ...]
    keepdim: bool
    divides: bool

    takes, gives = Spread.SHARD, Spread.REPLICATE
    says = "squares summed over ranks (vector norm)"
    cost = Cost("length", "call")
    collectives = (Move(Collective.ALL_REDUCE, Amount.LENGTHS),)

    @property
    def own_moves(self) -> tuple[Move, ...]:
        back = Move(Collective.ALL_REDUCE, Amount.LENGTHS, backward=True)
        return (*self.collectives, back) if self.divides else self.collectives


@instruction
class EmbeddingCall(CallRewrite):
    """A lookup in a table whose `rows` are sharded: ids of other ranks give zeros, and the rows are all-reduced."""

    rows: int

    takes, gives = Spread.REPLICATE, Spread.REPLICATE
    says = "out-of-range ids masked, rows summed over ranks"
    cost = Cost("embedding", "call")
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
class RowCall(CallRewrite):
    """table[number] or table[ids], of a table whose `rows` are sharded: ranks that do not own a row give zeros."""

    rows: int

    takes, gives = Spread.SHARD, Spread.REPLICATE
    says = "the row is summed over ranks (zero except on its owner)"
    cost = Cost("row", "call")
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
class GatherCall(CallRewrite):
    """A product whose shards along `dim` are gathered into the order of `layout`."""

    dim: int
    layout: str

    takes, gives = Spread.REPLICATE, Spread.REPLICATE
    says = "output all-gathered"
    cost = Cost("gather", "call")
    collectives = (Move(Collective.ALL_GATHER),)


@instruction
class AttentionCall(CallRewrite):
    """`multi_head_attention_forward` on a rank's own heads: its output projection is all-reduced. `layout`: of the rows
    of all heads, where a mask has them all and a rank takes those of its own."""

    layout: str | None = None

    takes, gives = Spread.PARTIAL_GRADIENT, Spread.REPLICATE
    says = "computed on the rank's heads, output summed over ranks"
    cost = Cost("attention", "call")
    collectives = (Move(Collective.ALL_REDUCE),)


@instruction
class AttendAcross(CallRewrite):
    """A fused attention of a rank's own queries: it gets the keys and values of all ranks, and its rows of the mask.
    Backward their gradients are summed, and each rank keeps those of its own positions. `gathers`: the arguments that
    are gathered, one where keys and values are made of the same."""

    sequence: SequenceName
    gathers: tuple[int, ...] = (1, 2)

    takes, gives = Spread.SEQUENCE_SHARD, Spread.SEQUENCE_SHARD
    says = "computed for own queries, with the keys and values of all ranks"
    cost = Cost("gather of keys and values", "call")
    collectives = (Move(Collective.ALL_GATHER, Amount.ARGUMENT), Move(Collective.REDUCE_SCATTER, Amount.ARGUMENT, True))

    @property
    def own_moves(self) -> tuple[Move, ...]:
        return tuple(replace(move, path=("args", at)) for move in self.collectives for at in self.gathers)


@instruction
class EqualPieces(CallRewrite):
    """Pieces along `dim` (from the end), equal in the full model but not on a rank: `pieces[r]` are rank r's."""

    dim: int
    pieces: tuple[tuple[int, ...], ...]

    takes, gives = Spread.SHARD, Spread.SHARD
    says = "sliced to the rank's own pieces"
    cost = None
    collectives = ()

    def problem(self, ranks: int) -> str:
        short = f"it has pieces for {len(self.pieces)} ranks, not {ranks}" if len(self.pieces) != ranks else ""
        return short or super().problem(ranks)


@instruction
class DrawOnShards(CallRewrite):
    """A random draw on a rank's shard, in a module that also draws on replicated values: from the rank's own stream."""

    takes, gives = Spread.SHARD, Spread.SHARD
    says = "random numbers drawn per rank"
    cost = None
    collectives = ()


# Instructions for a call that runs a recurrent network whose weights are sharded by rows.


@dataclass(frozen=True)
class HeldRows:
    """The path of a weight in a call's arguments, and the layout of its rows."""

    path: tuple[Any, ...]
    layout: str


@instruction
class RecurrentCall(CallRewrite):
    """All steps in one call: the weights are gathered, and it runs in full. Backward a rank keeps the gradient of its
    rows."""

    weights: tuple[HeldRows, ...]

    takes, gives = Spread.REPLICATE, Spread.REPLICATE
    says = "weights gathered for this call, every rank runs all steps"
    cost = Cost("gather of the weights", "call")
    collectives = (Move(Collective.ALL_GATHER, Amount.ARGUMENT),)

    @property
    def own_moves(self) -> tuple[Move, ...]:
        return tuple(Move(Collective.ALL_GATHER, Amount.ARGUMENT, path=weight.path) for weight in self.weights)

    def layouts(self) -> Iterator[str]:
        yield from super().layouts()
        yield from (weight.layout for weight in self.weights)


@instruction
class CellCall(CallRewrite):
    """One step of a cell: each rank multiplies by the rows of the weights that it holds, sharded by `layout`.

    A cell has this many `gates` and `states`. If a rank holds all gates of its hidden units ("4*48!"), the new states
    are gathered; else the gates are, and the step continues replicated. Backward the gradients of the step's input and
    of the previous states are all-reduced.
    """

    layout: str
    gates: int
    states: int

    takes, gives = Spread.PARTIAL_GRADIENT, Spread.REPLICATE
    says = "computed for the rank's rows of the gates, new state gathered"
    cost = Cost("gather of the state", "call")
    collectives = (Move(Collective.ALL_GATHER),)

    @property
    def by_unit(self) -> bool:
        """Return whether a rank holds all gates of its hidden units."""
        return "*" in self.layout or self.gates == 1

    @property
    def own_moves(self) -> tuple[Move, ...]:
        states = tuple(("args", 1, at) for at in range(self.states)) if self.states > 1 else (("args", 1),)
        paths: tuple[tuple[Any, ...], ...] = (("args", 0), *(states if self.by_unit else states[:1]))
        gathered = self.states if self.by_unit else 2 * self.gates  # of the input and of the state
        back = (Move(Collective.ALL_REDUCE, Amount.ARGUMENT, backward=True, path=path) for path in paths)
        return (Move(Collective.ALL_GATHER, times=gathered), *back)
