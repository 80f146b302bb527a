"""Run a plan by its own library (DeepSpeed's is imitated) on simulated ranks, against the unsharded model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from autoplan.capture.dry_run import quiet
from autoplan.check.audit.executors import autotp_sharding, not_imitated, torch_sharding, transformers_sharding
from autoplan.check.audit.lines import ForeignPlan
from autoplan.check.verify.on_ranks import Sharding, mesh_of, sharding_of
from autoplan.common.errors import AutoplanError
from autoplan.common.options import Wish
from autoplan.common.patterns import starred
from autoplan.values import Plan, Report

_LIBRARIES = {"torch": torch_sharding, "transformers": transformers_sharding, "deepspeed": autotp_sharding}
_TINY_TP = 2
_LARGEST_TP = 8
_CHECKS = ("forward",)


@dataclass(frozen=True)
class AuditRun:
    """The results on ranks, or why there are none. `full_size`: the clone has the model's sizes; `thawed`: frozen
    parameters that require grad after sharding."""

    report: Report | None = None
    reason: str = ""
    tiny: Any = None
    full_size: bool = False
    thawed: tuple[str, ...] = ()

    @property
    def numbers(self) -> Report | None:
        """The report, if it proves anything: where the unsharded model's own numbers are NaN it does not."""
        odd = self.report is not None and any(f.kind == "not-comparable" for f in self.report.findings)
        return None if odd else self.report


def drafted(source: Any, wish: Wish, model: Any, captured: Any = None, choices: Any = None) -> Plan | None:
    """Return what analysis does for a wish, alone or with these choices; None if it cannot."""
    from autoplan.planning import draft_plan

    try:
        return draft_plan(source, wish, choices=choices, module=model, captured=captured).plan
    except AutoplanError:
        return None


def try_on_ranks(source: Any, plan: ForeignPlan, tp_size: int, right: Plan | None = None) -> AuditRun:
    """Run the plan on a tiny clone, at `tp_size` where the clone is the model itself, else at 2."""
    from autoplan.check.verify.clone import clone_of

    if not plan.lines or tp_size == 1:
        return AuditRun(reason="there is nothing to run")
    try:
        clone = clone_of(source)
    except (AutoplanError, ImportError) as error:
        return AuditRun(reason=f"no tiny clone: {str(error).splitlines()[0]}")
    if plan.plan is not None:
        same = _shapes(clone.model) == _shapes(source.module())
        return _try_ours(clone, source, plan, same, right)
    return run_on(clone, source.module(), plan, tp_size)


def run_on(clone: Any, model: Any, plan: ForeignPlan, tp_size: int) -> AuditRun:
    """Run a foreign plan on a tiny clone of a model."""
    from autoplan.check.verify.sharded import check_sharding

    same = _shapes(clone.model) == _shapes(model)
    size = tp_size if same and tp_size <= _LARGEST_TP else _TINY_TP
    if plan.dialect == "deepspeed" and (why := not_imitated(clone.model, plan.raw, size)):
        return AuditRun(reason=why, tiny=clone)
    thawed: set[str] = set()
    # A clone is built anew: what is frozen in every block of the model is frozen in it too
    trained = {starred(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    of_model = {starred(name) for name, _ in model.named_parameters()}
    for name, parameter in clone.model.named_parameters():
        if starred(name) in of_model - trained:
            parameter.requires_grad_(False)
    sharding = sharding_for(plan)

    def shard(model: Any, mesh: Any) -> Any:
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        model = sharding.shard(model, mesh)
        after = dict(model.named_parameters())
        thawed.update(name for name in frozen if name in after and after[name].requires_grad)
        return model

    with quiet():  # torch logs what cannot run with its traceback: here that is an answer
        report = check_sharding(clone.model, clone.feeds, replace(sharding, shard=shard), size, checks=_CHECKS)
    return AuditRun(report, tiny=clone, full_size=same and size == tp_size, thawed=tuple(thawed))


def sharding_for(plan: ForeignPlan) -> Sharding:
    """Return how the plan's own library carries it out."""
    return _LIBRARIES[plan.dialect](plan.raw) if plan.plan is None else sharding_of(plan.plan)


def _try_ours(clone: Any, source: Any, foreign: ForeignPlan, same: bool, right: Plan | None) -> AuditRun:
    from autoplan.check.verify.verify import verify_source

    plan, checks = foreign.plan, ("parameters", *_CHECKS)
    assert plan is not None
    if same:
        from autoplan.check.verify.sharded import check_sharding

        how: Any = {"checks": checks, "dims": mesh_of(plan)}
        return AuditRun(check_sharding(clone.model, clone.feeds, sharding_of(plan), plan.ranks, **how), tiny=clone)
    if right is not None and right.runtime != plan.runtime:
        return AuditRun(reason="the clone's sizes differ from the plan's", tiny=clone)
    return AuditRun(verify_source(source, plan, _TINY_TP, checks=checks), tiny=clone)


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
