"""What a plan was made for: it says places in source code and numbers of rows, which mean nothing in another model."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["UNKNOWN", "ForwardCode", "MadeFor", "Sizes", "Version", "SeenCode"]

UNKNOWN = "unknown"


@dataclass(frozen=True)
class Version:
    """A library with which a plan was made."""

    library: str
    version: str


@dataclass(frozen=True)
class ForwardCode:
    """The forward of a class some of whose calls are rewritten: places of calls are columns in its source.

    `code` is a hash of that source ("source:…"), or of the compiled code where there is no source ("compiled:…").
    """

    class_name: str
    code: str


@dataclass(frozen=True)
class Sizes:
    """The shapes that parameters of a pattern had: one, unless blocks differ."""

    pattern: str
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MadeFor:
    """See above. Versions are for the reader; code and sizes must be those of the model that a plan is applied to.

    `model`: a hash of all of its code and of the whole numbers that it and its config hold. `content`: a hash of what
    the plan said when it was made (steering.py), `UNKNOWN` for a file that does not say. Where one of them is not what
    it was, the plan is derived once more before it is applied.
    """

    versions: tuple[Version, ...] = ()
    forwards: tuple[ForwardCode, ...] = ()
    sizes: tuple[Sizes, ...] = ()
    model: str = field(default="", compare=False, repr=False)
    content: str = field(default="", compare=False, repr=False)


@dataclass(frozen=True)
class SeenCode:
    """A function that ran, and which ways its branches went.

    `place`: "package.module:Class.forward:12", the last its first line. `code`: the Python that compiled it, and a hash
    of what it compiled. `ways`: for each branch the offset of its instruction with "+" (it went on) or "-" (it jumped);
    the offset alone of a handler of exceptions; "offset>hash" for a call of another such function.
    """

    place: str
    code: str
    ways: str = ""
