"""What a row of the corpus is: a published failure, the check that must see it, and how it should have been."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Setting:
    """A model, a plan for it, and what else `autoplan.audit` is told. Both are made anew for each use."""

    model: Callable[[], Any]
    plan: Callable[[Any], Any]
    tp_size: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """`check` must report `bad` at error or warn; `good` must have no error. `silent`: nothing raised in the wild."""

    row: int
    where: str
    what: str
    check: str
    bad: Setting
    good: Setting
    silent: bool = True
