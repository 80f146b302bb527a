"""At which sizes a tiny clone is verified: its own, or those of a plan for more ranks than are simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoplan.common.options import check_count, check_expert_size
from autoplan.values import Plan

__all__ = ["Sizes"]


@dataclass(frozen=True)
class Sizes:
    """Over how many ranks the clone is sharded, and what they are: those of tp, holding whole experts or not."""

    tp: int
    ep: int = 1

    @staticmethod
    def of(tp_size: int, ep_size: int | None, plan: Plan | None) -> Sizes:
        """As given; else as in a plan, at this many ranks."""
        check_count("tp_size", tp_size)
        if ep_size is not None:
            check_count("ep_size", ep_size)
        if plan is not None and plan.ep_size > 1:
            return Sizes(tp_size, tp_size) if plan.tp_size > 1 else Sizes(1, ep_size or max(tp_size, 2))
        check_expert_size(tp_size, ep_size or 1)
        return Sizes(tp_size, ep_size or 1)

    @staticmethod
    def of_mesh(mesh: Any, ep_size: int | None, plan: Plan | None) -> Sizes:
        """The sizes of real ranks: those of a dim "tp", or of a dim "ep" where nothing but experts is split."""
        if "tp" in mesh.mesh_dim_names or "ep" not in mesh.mesh_dim_names:
            return Sizes.of(mesh["tp"].size(), ep_size, plan)
        return Sizes(1, mesh["ep"].size())

    @property
    def ranks(self) -> int:
        return max(self.tp, self.ep)
