"""The ways through a model's own code that a plan knows: what ran while the model was recorded and tried."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SeenCode"]


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
