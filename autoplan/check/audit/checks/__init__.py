"""The checks of `autoplan audit`, in the order in which they run and are listed.

Each file is one check: `NAME`, a docstring that is its documentation, and `run(subject, found)`, which yields findings
(`found` are those of the checks before it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

from autoplan.check.audit.checks import (
    adapters,
    coverage,
    dead_keys,
    dialects,
    edges,
    embeddings,
    experts,
    frozen,
    gradient_norm,
    gradients,
    head_counts,
    heads_gather,
    layers,
    layouts,
    mixed_parameters,
    norms,
    numbers,
    overlaps,
    packed,
    pairing,
    prefixes,
    quantised,
    rounding,
    runtime,
    sequence,
    tied,
    units,
    wrapping,
)
from autoplan.check.audit.subject import Subject
from autoplan.values import Finding

__all__ = ["CHECKS", "Check"]


@dataclass(frozen=True)
class Check:
    """One check: its name in findings, its documentation, and what it does."""

    name: str
    about: str
    run: Callable[[Subject, tuple[Finding, ...]], Iterable[Finding]]

    @staticmethod
    def of(module: ModuleType) -> Check:
        return Check(module.NAME, (module.__doc__ or "").strip(), module.run)


CHECKS = tuple(
    Check.of(module)
    for module in (
        dead_keys, prefixes, overlaps, dialects, coverage,  # does the plan reach the model?
        pairing, edges, layouts, packed, units, head_counts, norms, gradients, tied, experts, sequence,
        wrapping,  # is it right?
        embeddings, heads_gather, adapters, frozen, quantised,  # and what is around it?
        layers, mixed_parameters, gradient_norm,
        runtime, numbers, rounding,  # what carrying it out shows
    )
)  # fmt: skip
