"""Ranks that are about to do different things are told so, before they wait for each other for ever.

Every rank of a mesh reads its own plan, often from its own disk. Where one of them differs, ranks would cut different
rows, or one would wait in a sum that nobody else joins. So hashes of the plan and of the options are compared first.
"""

from __future__ import annotations

import hashlib

import torch
from torch.distributed.device_mesh import DeviceMesh

from autoplan.common.errors import PlanMismatchError
from autoplan.common.options import TensorParallel
from autoplan.execute.collectives import RankGroup, all_gather_rows, mesh_device
from autoplan.values import Plan
from autoplan.values.steering import digest

__all__ = ["refuse_differing_plans"]


def refuse_differing_plans(meshes: list[DeviceMesh | None], plan: Plan, options: TensorParallel) -> None:
    """One exchange of a few bytes along each mesh dim; none where there is one rank. Raises on all ranks, or on none:
    whoever sees a difference along one dim says so along the next."""
    said = hashlib.sha256(f"{digest(plan)} {options}".encode()).digest()[:7]
    differ = False
    for mesh in meshes:
        for dim in range(mesh.ndim) if mesh is not None else ():
            assert mesh is not None
            group = RankGroup.of(mesh.get_group(dim))
            if group.size > 1:
                row = torch.tensor([[int.from_bytes(said), int(differ)]], device=mesh_device(mesh))
                rows = all_gather_rows(row, group, 0, [1] * group.size).tolist()
                differ = any(one[0] != rows[0][0] or one[1] for one in rows)
    if differ:
        raise PlanMismatchError(
            f"the ranks hold different plans or options; this one has a plan for {plan.model} at tp={plan.tp_size} "
            f"of the hash {digest(plan)}, made with "
            f"{', '.join(f'{one.library} {one.version}' for one in plan.made_for.versions) or 'unknown versions'}",
            hint="make the plan once and load the same file on every rank: plan.save(path), autoplan.load_plan(path)",
        )
