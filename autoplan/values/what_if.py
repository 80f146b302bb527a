"""A plan in another case than the one that is looked at, with what it costs there."""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.values.estimate import Estimate
from autoplan.values.plan import Plan

__all__ = ["WhatIf"]


@dataclass(frozen=True)
class WhatIf:
    """The same model at another size of tp, or as another row of a choice runs it."""

    plan: Plan
    estimate: Estimate | None = None
