"""Which tp should I take: the plan at other legal sizes, and what a training step needs of a rank at each.

A size is planned by itself: what divides at one does not at another. Planning and recording share one run of the model,
so a size takes about a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import Any

from autoplan.common.errors import AutoplanError, IndivisibleError
from autoplan.emit.pages.markup import WhatIf
from autoplan.emit.tables.estimate_table import shown_sizes
from autoplan.forecast.asked import Asked
from autoplan.forecast.devices import Device
from autoplan.forecast.estimate import estimate_with
from autoplan.forecast.step import Steps
from autoplan.hf.source import Model, resolve
from autoplan.values import Plan
from autoplan.values.estimate import Estimate

_LENGTHS = (2048, 512)  # tokens of a sequence: some models know few positions
_MOST = 6


@dataclass(frozen=True)
class Sizes:
    """A plan and an estimate for each size of tp; `why`: there is none, or not for all of them."""

    plans: Mapping[int, Plan] = field(default_factory=dict)
    estimates: Mapping[int, Estimate] = field(default_factory=dict)
    why: str = ""


def estimated_sizes(
    model: Model,
    plan: Plan,
    device: Device,
    *,
    inputs: Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> Sizes:
    """One training step of one sequence on each rank of {"tp": n}, for the plan's own size and those near it."""
    steps = Steps(resolve(model, trust_remote_code=trust_remote_code, inputs=inputs), plan, inputs)
    plans = _planned(steps, plan)
    found: dict[int, Estimate] = {}
    why = ""
    for length in _LENGTHS:
        try:
            found = {plan.tp_size: _estimate(steps, plan, plan.tp_size, length, device)}
            break
        except AutoplanError as error:
            why = why or error.message.splitlines()[0]
    if not found:
        return Sizes(plans, why=why)
    why = ""
    for tp in plans:
        try:
            found.setdefault(tp, _estimate(steps, plan, tp, length, device))
        except AutoplanError as error:
            why = f"at tp {tp}: {error.message.splitlines()[0]}"
    return Sizes(plans, dict(sorted(found.items())), why)


def other_sizes(
    model: Model, plan: Plan, device: Device, mesh: Mapping[str, int], *, trust_remote_code: bool = False,
    sequence_parallel: bool = False, **asked: Any,
) -> dict[int, WhatIf]:  # fmt: skip
    """The plan at the other sizes that are shown, drawn without sequence parallelism; with a `mesh` of ranks a step
    there, on as many ranks. `asked`: the other fields of `Asked`."""
    steps = Steps(resolve(model, trust_remote_code=trust_remote_code))
    ranks = prod(mesh.values())
    found: dict[int, WhatIf] = {}
    for tp, made in _planned(steps, plan).items():
        if tp == plan.ranks:
            continue
        estimate = None
        if mesh and ranks % tp == 0:
            sizes = (("dp_shard", ranks // tp), ("tp", tp))
            along = sequence_parallel and tp > 1
            question = Asked(sizes, **asked, sequence_parallel=along, experts=1 < tp == made.ep_size)
            with suppress(AutoplanError):  # at this size no step can be: the page shows the plan
                estimate = estimate_with(steps, question, device)
        found[tp] = WhatIf(made, estimate)
    return found


def _planned(steps: Steps, plan: Plan) -> dict[int, Plan]:
    """The plan, and those at the sizes nearest to its own; sizes that cannot be planned are left out."""
    found = {plan.tp_size: plan}
    near = sorted(shown_sizes(plan), key=lambda size: abs(size.bit_length() - plan.tp_size.bit_length()))
    for tp in near[:_MOST]:
        try:
            found.setdefault(tp, steps.plan(tp, tp if 1 < plan.tp_size == plan.ep_size else 1))
        except IndivisibleError:
            continue
    return dict(sorted(found.items()))


def _estimate(steps: Steps, plan: Plan, tp: int, length: int, device: Device) -> Estimate:
    mesh, experts = (("tp", tp),), 1 < plan.tp_size == plan.ep_size
    if plan.tp_size == 1 < plan.ep_size:
        mesh, experts = (("ep", plan.ep_size),) if tp == 1 else mesh, False
    along = plan.sequence_parallel and tp > 1
    return estimate_with(steps, Asked(mesh, 1, length, sequence_parallel=along, experts=experts and tp > 1), device)
