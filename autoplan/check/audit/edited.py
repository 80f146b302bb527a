"""A plan that is not word for word what was made for this model is derived once more before it is applied.

The problem: a plan file is edited, by hand or by accident, or the model that it was made for is another one by now.
Most such plans load, match and run, and some give other numbers. No look at the plan alone can tell. So a plan says
what it was when it was made (`made_for.content`), and for which model (`made_for.model`). Where one of the two is not
so, only what follows from the model now is applied: the plan is made once more, under the choices that it holds, and
must be the same in everything that steers the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from autoplan.check.pipeline import proven_plan
from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.options import Wish
from autoplan.decide.plan.chosen import choices_of_plan
from autoplan.execute.fits import made_anew, made_with, model_hash
from autoplan.execute.tensor_parallel import check_matches
from autoplan.hf.source import Source, resolve
from autoplan.values import Plan
from autoplan.values.plan import digest, steering

_SHOWN = 3


def held_against_model(model: nn.Module, plan: Plan, source: Source | None = None) -> Plan:
    """The plan, if nothing has changed since it was made, or if what is made now is the same; raises else.

    One that was put together in Python says nothing of how it was made, and passes.
    """
    if not plan.made_for.content:
        return plan
    changed = _changed(model, plan)
    if not changed:
        return plan
    check_matches(model, plan)
    try:
        source = resolve(model) if source is None else source
        wish = Wish(plan.tp_size, plan.ep_size, plan.sequence_parallel, uneven=plan.uneven)
        derived = proven_plan(source, wish, choices_of_plan(plan), source.module())
    except AutoplanError as error:
        raise PlanMismatchError(
            f"{changed}, and it cannot be derived once more: {error.message}", hint=_remedy(plan, error.hint)
        ) from error
    apart = list(_apart(_comparable(plan), _comparable(derived)))
    if apart:
        more = f" (and {len(apart) - _SHOWN} more)" if len(apart) > _SHOWN else ""
        raise PlanMismatchError(
            f"{changed}, and it is not what follows from {type(model).__name__}: {'; '.join(apart[:_SHOWN])}{more} "
            f"({made_with(plan)})",
            hint=_remedy(plan),
        )
    return replace(derived, model=plan.model)


def _changed(model: nn.Module, plan: Plan) -> str:
    """What is not as it was; "" if nothing."""
    if digest(plan) != plan.made_for.content:
        return f"the plan for {plan.model} was edited since it was made"
    if plan.made_for.model != model_hash(model) and not plan.packed:  # which its library builds of other modules
        return f"the plan for {plan.model} was made for other code or other numbers than {type(model).__name__} has"
    return ""


def _remedy(plan: Plan, hint: str = "") -> str:
    told = f"{hint}; or " if hint else ""
    return (
        f"{told}make it anew: {made_anew(plan)}; another choice of what is cut is overrides={{pattern: style}} of "
        "autoplan.plan; check=False applies the plan as it is"
    )


def _comparable(plan: Plan) -> dict[str, Any]:
    """What steers the model, without what says how it was made."""
    return {name: value for name, value in steering(plan).items() if name != "made_for"}


def _apart(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Where two pieces of plain data differ, each place once."""
    if isinstance(one, dict) and isinstance(other, dict):
        for name in dict.fromkeys((*one, *other)):
            path = f"{where}.{name}" if where else str(name)
            if name not in one:
                yield f"{path} is left out, where {other[name]!r:.80} follows"
            elif name not in other:
                yield f"{path} is {one[name]!r:.80}, where nothing follows"
            else:
                yield from _apart(one[name], other[name], path)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (mine, its) in enumerate(zip(one, other, strict=True)):
            yield from _apart(mine, its, f"{where}[{number}]")
    elif isinstance(one, list) and isinstance(other, list):
        yield f"{where} has {len(one)} items, where {len(other)} follow"
    elif one != other or type(one) is not type(other):
        yield f"{where} is {one!r:.80}, where {other!r:.80} follows"
