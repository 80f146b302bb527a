"""What a rank does at a call that runs a recurrent network, of whose weights it holds some rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autoplan.values.costs import Cost
from autoplan.values.instructions.base import Amount, Collective, Move, Spread, instruction
from autoplan.values.instructions.calls import CallRewrite

__all__ = ["CellCall", "HeldRows", "RecurrentCall"]


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
        return tuple(Move(Collective.ALL_GATHER, Amount.ARGUMENT, path=held.path) for held in self.weights)

    def layouts(self) -> Iterator[str]:
        yield from super().layouts()
        yield from (held.layout for held in self.weights)


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
