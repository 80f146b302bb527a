"""Everything that is done to a live model, decided when the plan is made; and what a plan may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from autoplan.values.instructions.base import Instruction
from autoplan.values.instructions.boundaries import Side

__all__ = ["Capabilities", "Constant", "OutputShape", "ParameterRule", "Runtime"]

Kind = TypeVar("Kind", bound=Instruction)


@dataclass(frozen=True)
class ParameterRule:
    """How parameters matching `pattern` lie on ranks. `layout` is the notation of `common/layout.py`; None: whole."""

    pattern: str
    dim: int | None = None
    layout: str | None = None
    gradient: Literal["local", "sum", "shared"] = "local"
    divide: bool = False


@dataclass(frozen=True)
class OutputShape:
    """What the model returned at `path`: of how many dims, and how long those are that its weights decide.

    `features` are (dim, size): output features of products with weights. Batches and lengths are the caller's.
    """

    path: tuple[Any, ...]
    dims: int
    features: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Constant:
    """What modules take or return at `path`: a constant in every recorded call. In another that may be something that
    has a gradient, of which each rank makes a part. `sums`: it is summed then; else the call is refused."""

    pattern: str
    side: Side
    path: tuple[Any, ...]
    sums: bool


@dataclass(frozen=True)
class Runtime:
    """How parameters lie on ranks, and what is done around them when the model runs."""

    parameters: tuple[ParameterRule, ...] = ()
    instructions: tuple[Instruction, ...] = ()
    random: tuple[str, ...] = ()  # module patterns whose random draws act on split values: each rank its own
    random_whole: tuple[str, ...] = ()  # and those that act on whole values: the same on every rank
    draws: bool = False  # are random numbers drawn in eval mode too?
    outputs: tuple[tuple[Any, ...], ...] = ()  # paths of what the model was seen to return
    shapes: tuple[OutputShape, ...] = ()  # of those that have features
    given: tuple[str, ...] = ()  # the arguments that the model was seen to be given
    unsummed: tuple[str, ...] = ()  # those of whose gradient each rank makes a part that is not summed
    constants: tuple[Constant, ...] = ()  # what had no gradient, and may have one in another call
    idle: tuple[str, ...] = ()  # module patterns: they hold weights, and no recorded call ran them

    def of(self, kind: type[Kind]) -> tuple[Kind, ...]:
        """The instructions of one kind, or of all kinds that derive from it, in order."""
        return tuple(one for one in self.instructions if isinstance(one, kind))


@dataclass(frozen=True)
class Capabilities:
    """What a plan may use: the scoped function mode, and cutting the stream along the sequence.

    `whole`: patterns of modules whose parameters stay whole, because cut they did not give the same. `experts`: experts
    may live on different ranks, where that is asked for.
    """

    scoped: bool = True
    sequence: bool = False
    whole: tuple[str, ...] = ()
    experts: bool = True

    def __str__(self) -> str:
        """What is out of the ordinary."""
        said = ("the stream is cut along the sequence" if self.sequence else "",
                "" if self.scoped else "no call inside a module's forward is changed",
                f"left whole: {', '.join(self.whole)}" if self.whole else "",
                "" if self.experts else "experts are not placed on different ranks")  # fmt: skip
        return "; ".join(filter(None, said))
