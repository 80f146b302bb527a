"""Models that are sharded while something interrupts it: a dense one, experts, a hybrid, one of several modes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

from mesh_toys import deep, ids, model_of, plan_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoplan
from autoplan.common.options import Wish
from autoplan.hf.source import resolve
from autoplan.planning import draft_plan
from autoplan.values import Plan

__all__ = ["HOW", "KINDS", "apply_to", "build_of", "mesh_for", "plan_for", "whole"]

KINDS = ("toy", "mixtral", "bamba", "llava")
HOW = ("tp", "tp, dp", "tp, checkpointing", "tp, dp, checkpointing")


@cache
def plan_for(kind: str) -> Plan:
    if kind != "toy":
        return plan_of(kind, 2)
    inputs = {"ids": ids(), "use_cache": False}
    return draft_plan(resolve(deep(depth=1), inputs=inputs), Wish(2)).plan


def build_of(kind: str) -> Callable[[], nn.Module]:
    if kind != "toy":
        return lambda: model_of(kind)
    model = deep(depth=1)
    return lambda: copy.deepcopy(model)


def mesh_for(how: str) -> DeviceMesh:
    """Of four ranks; two where there is only tp."""
    sizes = [(name, 2) for name in ("dp", "tp") if name in how]
    names = tuple(name for name, _ in sizes)
    return init_device_mesh("cpu", tuple(size for _, size in sizes), mesh_dim_names=names)


def apply_to(kind: str, how: str) -> Callable[[nn.Module], Any]:
    mesh, plan, checkpointing = mesh_for(how), plan_for(kind), "checkpointing" in how
    return lambda model: autoplan.parallelize(model, mesh, plan, activation_checkpointing=checkpointing)


def whole(how: str) -> Callable[[nn.Module], bool]:
    """Was everything done that was asked for?"""

    def done(model: nn.Module) -> bool:
        known = autoplan.applied(model)
        if known is None or known.running is None or not known.hooked:
            return False
        return bool(known.units) == ("dp" in how) and bool(known.checkpointed) == ("checkpointing" in how)

    return done
