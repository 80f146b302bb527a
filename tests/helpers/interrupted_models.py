"""Models that are sharded while something interrupts it: a dense one, experts, a hybrid, one of several modes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from mesh_toys import WIDTH, Part, deep, ids, model_of, plan_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autoplan
from autoplan.common.options import Wish
from autoplan.hf.source import resolve
from autoplan.planning import draft_plan
from autoplan.values import Plan

__all__ = ["HOW", "KINDS", "apply_to", "build_of", "mesh_for", "plan_for", "whole"]

KINDS = ("small", "toy", "mixtral", "bamba", "llava")
HOW = ("tp", "tp, dp", "tp, checkpointing", "tp, dp, checkpointing")


class Small(nn.Module):
    """Few modules, so that every line can be tried."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Part(), Part()])
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x + self.shift


MADE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "small": (Small, {"x": torch.linspace(-1, 1, 30 * WIDTH).view(6, 5, WIDTH)}),
    "toy": (lambda: deep(depth=1), {"ids": ids(), "use_cache": False}),
}


@cache
def plan_for(kind: str) -> Plan:
    if kind not in MADE:
        return plan_of(kind, 2)
    build, inputs = MADE[kind]
    return draft_plan(resolve(build(), inputs=inputs), Wish(2)).plan


def build_of(kind: str) -> Callable[[], nn.Module]:
    return MADE[kind][0] if kind in MADE else lambda: model_of(kind)


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
