"""Calls with a cache where ranks attend with own queries: each rank runs them whole, on all positions.

A cache collects the keys and values that the model's own code hands to it, which are those of own positions there: the
next call would count, mask and attend to these alone. Where nothing but the sequence is sharded each rank has all
weights, so such a call is run as on one device. A cache of own positions is marked, and refused when it comes back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from autoplan.common.conventions import conventions
from autoplan.common.errors import PlanMismatchError
from autoplan.common.nested import flatten_tensors
from autoplan.execute.checkpointing.policies import is_cache
from autoplan.execute.vocabulary.own_positions import own_of
from autoplan.values import AttendAcross, Exchange, Plan, ReduceScatterSequence, SequenceBoundary

_MARK = "_autoplan_own_positions"


def can_run_whole(plan: Plan) -> bool:
    """Return whether ranks attend with own queries, and could run everything whole: they have all weights, and what is
    done to their values is done at boundaries, for own positions."""
    if not plan.runtime.of(AttendAcross) or any(rule.dim is not None for rule in plan.runtime.parameters):
        return False
    alike = (SequenceBoundary, AttendAcross)
    parts = (Exchange, ReduceScatterSequence)
    return all(isinstance(one, alike) and not isinstance(one, parts) for one in plan.runtime.instructions)


def runs_whole(arguments: dict[str, Any]) -> bool:
    """Return whether a call with these is run whole: it is given a cache, or told to make one, and has no gradient."""
    switch = conventions().cache_switch
    caches = {name: value for name, value in arguments.items() if is_cache(value)}
    for name, value in caches.items():
        if hasattr(value, _MARK):
            raise PlanMismatchError(
                f"{name} holds a rank's own positions: the call that made it did not ask for one, or had gradients",
                hint=f"pass {switch}=False, or {switch}=True from the first call on, under torch.no_grad()",
            )
    own = any(own_of(tensor) is not None for _, tensor in flatten_tensors(arguments))
    wanted = bool(caches) or arguments.get(switch) is True
    return wanted and not (own or torch.is_grad_enabled() or torch.compiler.is_compiling())


def mark_caches(values: Iterable[Any]) -> None:
    """Mark the caches of a call that ran on own positions."""
    for value in values:
        if is_cache(value):
            setattr(value, _MARK, True)
