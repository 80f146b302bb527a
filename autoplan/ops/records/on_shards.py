"""One op under splits: `SplitOp` tells which dims of its arguments are split, `Local` runs it on one rank's shards.

The literals of a call that are sizes, and what they measure: for those of a split dim, a rank must pass another
number (`analyse/splits/literal_sizes.py`). Positions count arguments as passed; `names` are their keywords.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autoplan.axes.terms import Term
from autoplan.common.layout import Layout
from autoplan.values import Op, Ref, Trace


class _Dims(Protocol):
    """The terms of tensor dims (`analyse.infer.Axes`)."""

    @property
    def identities(self) -> set[int]: ...

    def of(self, tensor: int) -> tuple[Term, ...]: ...


class Splits(Protocol):
    """The shards that ranks hold (`analyse.shards.Shards`)."""

    @property
    def trace(self) -> Trace: ...
    @property
    def tp(self) -> int: ...
    @property
    def axes(self) -> _Dims: ...

    def layout_of(self, term: Term) -> Layout | None: ...
    def is_split(self, tensor: int) -> bool: ...
    def layouts(self, tensor: int) -> tuple[Layout | None, ...]: ...
    def local_shape(self, tensor: int, rank: int) -> tuple[int, ...]: ...


@dataclass
class SplitOp:
    """A recorded op, with queries about its split dims."""

    shards: Splits
    op: Op

    def told(self, position: int, name: str, default: Any = None) -> Any:
        """Return an argument as it was recorded, by position, else by name."""
        return self.op.args[position] if len(self.op.args) > position else self.op.kwargs.get(name, default)

    def terms(self, position: int) -> tuple[Term, ...]:
        """Return the dims of the position-th argument; none if it is no tensor."""
        argument = self.op.args[position] if len(self.op.args) > position else None
        return self.shards.axes.of(argument.id) if isinstance(argument, Ref) else ()

    def layout(self, position: int, dim: int) -> Layout | None:
        """Return the layout of a dim of the position-th argument, if it is split."""
        argument = self.op.args[position] if len(self.op.args) > position else None
        layouts = self.shards.layouts(argument.id) if isinstance(argument, Ref) else ()
        return layouts[dim] if layouts else None

    def is_split(self, position: int, dim: int) -> bool:
        return self.layout(position, dim) is not None

    def size(self, position: int, dim: int) -> int:
        """Return the global size of a dim of the position-th argument."""
        tensor: int = self.op.args[position].id
        return self.shards.trace.tensors[tensor].shape[dim]

    def is_identity(self, position: int) -> bool:
        """Return whether the position-th argument is an identity matrix: a product with it sums over nothing."""
        argument = self.op.args[position]
        return isinstance(argument, Ref) and argument.id in self.shards.axes.identities


@dataclass
class Local(SplitOp):
    """One op on one rank. An op that leaves a partial result sets `reducing`, and `weight` for its part in the sum.

    `exchanged`: ranks exchange values, but the result is no sum. `recorded`: the result on the full inputs. `on_ranks`:
    an argument on each rank.
    """

    function: Any
    args: list[Any]
    kwargs: dict[str, Any]
    rank: int
    outputs: Sequence[int]
    reducing: bool = False
    weight: float = 1.0
    exchanged: bool = False
    recorded: Sequence[Any] = ()
    on_ranks: Callable[[int], Sequence[Any]] = lambda position: ()

    def call(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape that this rank's first output should have."""
        return self.shards.local_shape(self.outputs[0], self.rank)

    def held(self, layout: Layout) -> Sequence[int]:
        """Return the positions along a split dim that this rank has."""
        return layout.rows(self.rank, self.shards.tp)

    def argument(self, position: int, name: str, default: Any) -> Any:
        """Return an argument as this rank passes it."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


def as_written(local: Local) -> Any:
    """Run the op on shards with the same arguments, which is right by itself."""
    return local.call()


def recorded(local: Local) -> Any:
    """Return the rank's shard of the recorded value: nothing can be computed (empty memory, random numbers)."""
    return list(local.recorded)


@dataclass(frozen=True)
class NoSizes:
    """No argument is a size that could follow a split dim."""


@dataclass(frozen=True)
class OutputShape:
    """The shape of the result, as a tuple or as trailing integers; -1 adapts by itself."""

    first: int = 1
    names: tuple[str, ...] = ("shape", "size")


@dataclass(frozen=True)
class Unflattened:
    """The sizes into which one dim is unflattened."""

    dim: int = 1
    sizes: int = 2


@dataclass(frozen=True)
class Filled:
    """The shape of a constant-filled value."""

    first: int = 0


@dataclass(frozen=True)
class Identity:
    """The rows and columns of an identity matrix."""

    rows: int = 0
    columns: int = 1


@dataclass(frozen=True)
class MadeWhole:
    """The sizes of a value that varies by position: it is created at full size, and a rank keeps its shard."""


@dataclass(frozen=True)
class Lengths:
    """The lengths of pieces: one number for all, or one for each."""

    at: int = 1


@dataclass(frozen=True)
class PieceCount:
    """The number of pieces. `dim`: the default dim; `even`: sizes differ by at most one (else the last piece takes the
    remainder)."""

    at: int = 1
    dim: int | None = None
    even: bool = False


@dataclass(frozen=True)
class Bounds:
    """The start of a slice along a dim, and its end (or its length: `length`)."""

    dim: int
    start: int
    end: int
    length: bool = False


@dataclass(frozen=True)
class Indexed:
    """The slice bounds and positions of an indexing expression, the second argument."""


@dataclass(frozen=True)
class Repeats:
    """The number of repetitions of each dim, as a tuple or as trailing integers."""

    first: int = 1


@dataclass(frozen=True)
class RepeatEach:
    """The number of repetitions of each element along a dim. `length`: the argument for the result's length."""

    at: int = 1
    dim: int = 2
    length: int = 3


@dataclass(frozen=True)
class Groups:
    """The number of groups of channels. `weight`: the weight that has a group's channels as its second dim."""

    at: int
    weight: int | None = None


Sizes = (
    NoSizes | OutputShape | Unflattened | Filled | Identity | MadeWhole | Lengths | PieceCount | Bounds | Indexed
    | Repeats | RepeatEach | Groups
)  # fmt: skip

NO_SIZES = NoSizes()
SHAPE = OutputShape()
