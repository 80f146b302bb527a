"""The checks of `autoplan audit`, in the order in which they run and are listed.

Each file in the folders here is one check: `NAME`, a docstring that is its documentation, and `run(subject, found)`,
which yields findings (`found` are those of the checks before it).

In: an Audited, which holds the plan against the model. Out: findings. May import: what check may.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

from autoplan.check.audit.checks.around import (
    adapters,
    embeddings,
    frozen,
    gradient_norm,
    heads_gather,
    layers,
    mixed_parameters,
    quantised,
)
from autoplan.check.audit.checks.cuts import (
    edges,
    experts,
    gradients,
    head_counts,
    layouts,
    norms,
    packed,
    pairing,
    sequence,
    tied,
    units,
    wrapping,
)
from autoplan.check.audit.checks.on_ranks import numbers, rounding, runtime
from autoplan.check.audit.checks.reach import coverage, dead_keys, dialects, overlaps, prefixes
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
    def of(module: ModuleType) -> AuditCheck:
        rows = module.__name__.rpartition(".")[0].rpartition(".")[2] in ("reach", "cuts")
        return AuditCheck(module.NAME, (module.__doc__ or "").strip(), module.run, rows)


CHECKS = tuple(
    AuditCheck.of(module)
    for module in (
        # reach: does the plan reach the model?
        dead_keys, prefixes, overlaps, dialects, coverage,
        # cuts: is it right?
        pairing, edges, layouts, packed, units, head_counts, norms, gradients, tied, experts, sequence, wrapping,
        # around: and what is around it?
        embeddings, heads_gather, adapters, frozen, quantised, layers, mixed_parameters, gradient_norm,
        # on_ranks: what carrying it out shows
        runtime, numbers, rounding,
    )
)  # fmt: skip
