"""The checks of `autoplan audit`, in the order in which they run and are listed.

Each is a function: its name, a docstring that is its documentation, and what it does, `(check, subject, earlier)`,
which yields findings under the name `check` (`earlier` are those of the checks before it).

In: an Audited, which holds the plan against the model. Out: findings. May import: what check may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import getdoc

from autoplan.check.audit.checks import around, cuts, effects, on_ranks, quantised, reach
from autoplan.check.audit.subject import Audited
from autoplan.values import Finding


@dataclass(frozen=True)
class AuditCheck:
    """One check: its name in findings, its documentation, and what it does. `rows`: its hints are about rows of a plan,
    and nobody has audited a plan that follows them."""

    name: str
    about: str
    run: Callable[[Audited, tuple[Finding, ...]], Iterable[Finding]]
    rows: bool = False

    @staticmethod
    def of(
        function: Callable[[str, Audited, tuple[Finding, ...]], Iterator[Finding]], *, rows: bool = False
    ) -> AuditCheck:
        name = function.__name__.replace("_", "-")
        return AuditCheck(name, getdoc(function) or "", partial(function, name), rows)


# Does the plan reach the model, are its cuts right, and does the code around them go on to work?
_ABOUT_ROWS = (
    reach.dead_keys, reach.prefixes, reach.overlaps, reach.dialects, reach.coverage, cuts.pairing, cuts.edges,
    cuts.layouts, cuts.packed, cuts.units, cuts.head_counts, effects.norms, effects.gradients, effects.tied,
    effects.experts, effects.sequence, effects.wrapping,
)  # fmt: skip
_AROUND = (
    around.embeddings, around.heads_gather, around.adapters, around.frozen, quantised.quantised, around.layers,
    around.mixed_parameters, around.gradient_norm, on_ranks.runtime, on_ranks.numbers, on_ranks.rounding,
)  # fmt: skip
CHECKS = (*(AuditCheck.of(one, rows=True) for one in _ABOUT_ROWS), *map(AuditCheck.of, _AROUND))
