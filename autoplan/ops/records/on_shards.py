"""One op under splits: `SplitOp` tells which dims of its arguments are split, `Local` runs it on one rank's shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autoplan.axes.terms import Term
from autoplan.common.layout import Layout
from autoplan.values import Op, Ref, Trace


class _Dims(Protocol):
    """What the dims of tensors are (`analyse.infer.Axes`)."""

    @property
    def identities(self) -> set[int]: ...

    def of(self, tensor: int) -> tuple[Term, ...]: ...


class Splits(Protocol):
    """What ranks hold (`analyse.shards.Shards`)."""

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
    """A recorded op, and questions about what of it is split."""

    shards: Splits
    op: Op

    def told(self, position: int, name: str, default: Any = None) -> Any:
        """An argument as it was recorded, by position, else by name."""
        return self.op.args[position] if len(self.op.args) > position else self.op.kwargs.get(name, default)

    def terms(self, position: int) -> tuple[Term, ...]:
        """The dims of the position-th argument; none if it is no tensor."""
        given = self.op.args[position] if len(self.op.args) > position else None
        return self.shards.axes.of(given.id) if isinstance(given, Ref) else ()

    def layout(self, position: int, dim: int) -> Layout | None:
        """How a dim of the position-th argument is split."""
        given = self.op.args[position] if len(self.op.args) > position else None
        layouts = self.shards.layouts(given.id) if isinstance(given, Ref) else ()
        return layouts[dim] if layouts else None

    def is_split(self, position: int, dim: int) -> bool:
        return self.layout(position, dim) is not None

    def size(self, position: int, dim: int) -> int:
        """The whole size of a dim of the position-th argument."""
        tensor: int = self.op.args[position].id
        return self.shards.trace.tensors[tensor].shape[dim]

    def is_identity(self, position: int) -> bool:
        """Is the position-th argument an identity matrix? Nothing is summed over in a product with it."""
        given = self.op.args[position]
        return isinstance(given, Ref) and given.id in self.shards.axes.identities


@dataclass
class Local(SplitOp):
    """One op on one rank. What leaves a partial result sets `reducing`, and `weight` for its part in the sum.

    `exchanged`: ranks exchange, but the result is no sum. `recorded`: the result on whole inputs. `on_ranks`: an
    argument of each rank.
    """

    function: Any
    args: list[Any]
    kwargs: dict[str, Any]
    rank: int
    outputs: list[int]
    reducing: bool = False
    weight: float = 1.0
    exchanged: bool = False
    recorded: Sequence[Any] = ()
    on_ranks: Callable[[int], Sequence[Any]] = lambda position: ()

    def call(self) -> Any:
        return self.function(*self.args, **self.kwargs)

    @property
    def shape(self) -> tuple[int, ...]:
        """What this rank's first output should look like."""
        return self.shards.local_shape(self.outputs[0], self.rank)

    def held(self, layout: Layout) -> Sequence[int]:
        """The positions along a split dim that this rank has."""
        return layout.rows(self.rank, self.shards.tp)

    def argument(self, position: int, name: str, default: Any) -> Any:
        """An argument as this rank passes it."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


def as_written(local: Local) -> Any:
    """On shards it does what is right by itself, told what it was told."""
    return local.call()


def recorded(local: Local) -> Any:
    """Nothing can be computed (empty memory, random numbers): a rank takes its shard of the recorded value."""
    return list(local.recorded)
