"""Which literals of a call are sizes, and of what: where one follows a split dim, a rank must pass another number
(`analyse/splits/literal_sizes.py`). Positions count arguments as passed; `names` are their keywords."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NoSizes:
    """It is told no size that could follow a split dim."""


@dataclass(frozen=True)
class OutputShape:
    """The shape of the result, as a tuple or as trailing integers; -1 follows by itself."""

    first: int = 1
    names: tuple[str, ...] = ("shape", "size")


@dataclass(frozen=True)
class Unflattened:
    """The sizes into which one dim is taken apart."""

    dim: int = 1
    sizes: int = 2


@dataclass(frozen=True)
class Filled:
    """The shape of a value that is alike everywhere. `defined`: its contents are known (not: empty memory)."""

    first: int = 0
    defined: bool = True


@dataclass(frozen=True)
class Identity:
    """Rows and columns of an identity matrix."""

    rows: int = 0
    columns: int = 1


@dataclass(frozen=True)
class MadeWhole:
    """Sizes of a value that differs from place to place: it is made whole, and a rank keeps its shard."""


@dataclass(frozen=True)
class Lengths:
    """How long pieces are: one number for all, or one for each."""

    at: int = 1


@dataclass(frozen=True)
class PieceCount:
    """How many pieces are made. `dim`: the default dim; `even`: sizes differ by at most one (else the last piece takes
    the remainder)."""

    at: int = 1
    dim: int | None = None
    even: bool = False


@dataclass(frozen=True)
class Bounds:
    """Where a slice along a dim begins, and where it ends (or how long it is: `length`)."""

    dim: int
    start: int
    end: int
    length: bool = False


@dataclass(frozen=True)
class Indexed:
    """Slice bounds and positions of an indexing expression, the second argument."""


@dataclass(frozen=True)
class Repeats:
    """How often each dim is repeated, as a tuple or as trailing integers."""

    first: int = 1


@dataclass(frozen=True)
class RepeatEach:
    """How often each element is repeated along a dim. `length`: the argument that may tell the result's length."""

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
