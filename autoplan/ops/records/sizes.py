"""The literals of a call that are sizes, and what they measure: for those of a split dim, a rank must pass another
number (`analyse/splits/literal_sizes.py`). Positions count arguments as passed; `names` are their keywords."""

from __future__ import annotations

from dataclasses import dataclass


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
    """The shape of a constant-filled value. `defined`: its contents are known (unlike empty memory)."""

    first: int = 0
    defined: bool = True


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
