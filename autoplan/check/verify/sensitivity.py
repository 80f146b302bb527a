"""How far does rounding alone move a model? The limit below which a difference says nothing.

Double precision is far below every mistake in most models. Not in all: dozens of layers without norms, kinks and sines
on the way, and a change in the last bit of the weights moves gradients by 1e-5 of their size. Sums over ranks are such
a change. So where a sharded model is only slightly off, the unsharded one is run again on weights that differ in their
last bit; what that moves is no mistake of the plan's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from autoplan.capture.copies import copied
from autoplan.check.verify.compare import Tolerance
from autoplan.values import Finding

if TYPE_CHECKING:
    from autoplan.check.verify.checks import Check
    from autoplan.check.verify.subject import Group, Observation, Subject

_SLIGHT = 1e3  # times the limit: what is further off is a mistake, whatever the model does to rounding
_MARGIN = 10.0  # a sharded model rounds in more places than its weights
_RUNS = 3

Errors = Mapping["Group", Mapping[str, float]]  # of each tensor


def tolerance_of(
    check: Check, subject: Subject, reference: Observation, errors: Errors, usual: Tolerance
) -> tuple[Tolerance, list[Finding]]:
    """The tolerance for a model with these errors; wider, with a note, where rounding alone moves it as far."""
    from autoplan.check.verify.checks import judge

    error = _largest(errors)
    if not usual.limit < error <= _SLIGHT * usual.limit:
        return usual, []
    others = (check.run(_last_bits_changed(subject, seed)) for seed in range(_RUNS))
    moved = max(_largest(judge(check, reference, [other], usual)[1]) for other in others)
    if error > _MARGIN * moved:
        return usual, []
    text = (
        f"off by {error:.1e}, but the unsharded model moves by {moved:.1e} when its weights change in the last bit: "
        f"{_MARGIN:g} times that is allowed"
    )
    return replace(usual, limit=max(usual.limit, _MARGIN * moved)), [Finding(check.name, "note", "", text)]


def _largest(errors: Errors) -> float:
    return max((error for found in errors.values() for error in found.values()), default=0.0)


def _last_bits_changed(subject: Subject, seed: int) -> Any:
    """The subject on weights each of which is, or is not, the next larger number."""
    model = copied(subject.model)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                up = torch.rand(parameter.shape, generator=generator) < 0.5
                larger = torch.nextafter(parameter, torch.full_like(parameter, torch.inf))
                parameter.copy_(torch.where(up, larger, parameter))
    return replace(subject, model=model, collectives={})
