"""What analysis found: facts about parameters and about classes of axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from autoplan.values.reasons import Reason, sentence

__all__ = ["ClassFact", "ParameterFact"]


@dataclass(frozen=True)
class ParameterFact:
    """What analysis says about one parameter or buffer (the names it has: more than one when tied).

    `dim` and `layout` say how it is cut (None: whole). `gradient` is "local" (what a rank computes is its own),
    "sum" (every rank holds a part of the whole gradient) or "shared" (rows that several ranks hold need summing).
    `divide`: a bias that is added before a sum over ranks, so each rank adds 1/tp of it. `why`: where it is whole.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    bytes: int
    buffer: bool = False
    dim: int | None = None
    layout: str | None = None
    gradient: Literal["local", "sum", "shared"] = "local"
    divide: bool = False
    axis: int | None = None  # ClassFact.id of the largest class that cuts it
    axes: tuple[int, ...] = ()  # of all of them
    why: tuple[Reason, ...] = ()
    how: Reason | None = None  # where it is cut in an unusual way: why so

    @property
    def reason(self) -> str:
        """`why`, as text."""
        return sentence(self.why)


@dataclass(frozen=True)
class ClassFact:
    """One axis class: its size, what it does (events), the parameters it sits in, and whether it is split.

    `reason` says why not, when it is not.
    """

    id: int
    size: int
    events: frozenset[str]
    parameters: tuple[tuple[str, int], ...]  # (first name, dim)
    split: bool
    reason: Reason | None = None
