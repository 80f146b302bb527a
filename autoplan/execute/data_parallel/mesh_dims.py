"""The purpose of each dim of a device mesh, by its name.

One mesh carries every kind of parallelism; `parallelize` must take its own dims, leave other known ones alone and say
so, and refuse an unknown name: unused ranks would silently train copies.

Two dims are set up elsewhere, but matter here. Ranks of context parallelism ("cp") hold other positions of the same
sequences, so their gradients are averaged like those of other batches: FSDP2 shards over both dims, flattened into one.
Pipeline stages ("pp") run several micro-batches in a row, so gathered parameters are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.distributed.device_mesh import DeviceMesh

from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.torch_internals import flattened
from autoplan.execute.agreement import Voters
from autoplan.execute.collectives import RankGroup
from autoplan.values import Plan

ALIASES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "dp_shard": ("dp_shard", "dp", "fsdp", "dp_shard_cp"),
    "dp_replicate": ("dp_replicate",),
    "ep": ("ep",),
}
LEFT_ALONE = ("cp", "pp")
_MADE_WITH = 'make it with init_device_mesh(device, shape, mesh_dim_names=("dp_shard", "tp"))'
WITH_CONTEXT = "dp_shard_cp"  # the usual name of the two dims, flattened


@dataclass(frozen=True)
class MeshDims:
    """The dims of a mesh by purpose. `tp`: a 1-D mesh, or None. `data`: FSDP2's mesh, 2-D for HSDP, or None. `ep`:
    ranks that hold different experts, apart from those of tp."""

    tp: DeviceMesh | None
    data: DeviceMesh | None
    names: dict[str, str]
    notes: tuple[str, ...] = ()
    ep: DeviceMesh | None = None
    stages: int = 1
    context: DeviceMesh | None = None  # ranks of "cp" without dp_shard: nothing is sharded over them

    @property
    def voters(self) -> Voters:
        """Return the ranks that must know if one of them fails."""
        return Voters.of(self.tp, self.ep, self.data, self.context)

    @property
    def tp_size(self) -> int:
        return 1 if self.tp is None else self.tp.size()

    @property
    def ep_size(self) -> int:
        return 1 if self.ep is None else self.ep.size()

    def for_context(self) -> MeshDims:
        """Return the dims for a plan that shards the sequence: over ranks of "cp" alone no weight is sharded."""
        notes = tuple(note for note in self.notes if "'cp'" not in note)
        if "dp_shard" in self.names:
            return replace(self, notes=notes)
        return replace(self, data=None, context=self.data, notes=notes)

    def check_experts(self, tp_size: int, ep_size: int) -> None:
        """Raise where an "ep" dim would hold copies because the plan places no experts on its ranks."""
        if self.ep_size > 1 and not tp_size == 1 < ep_size:
            placed = f"experts on the {tp_size} ranks of tp" if ep_size > 1 else "no experts on different ranks"
            ranks = f"mesh has {self.ep_size} ranks in" if self.names["ep"] == "ep" else "mesh_dims names 'ep' as"
            raise PlanMismatchError(
                f"the {ranks} {self.names['ep']!r}, but the plan places {placed}",
                hint=f"plan with tp_size=1, ep_size={self.ep_size}, or remove that dim from the mesh",
            )


def read_mesh(mesh: DeviceMesh, mesh_dims: Mapping[str, str] | None = None) -> MeshDims:
    """Return the dims of `mesh` by purpose. `mesh_dims={"tp": name}` overrides the usual names."""
    if not isinstance(mesh, DeviceMesh):
        raise AutoplanError(f"mesh={mesh!r} is not a device mesh", hint=_MADE_WITH)
    if mesh_dims is not None and not (
        isinstance(mesh_dims, Mapping) and all(isinstance(part, str) for pair in mesh_dims.items() for part in pair)
    ):
        raise AutoplanError(f"mesh_dims={mesh_dims!r}", hint='pass {"tp": name of a mesh dim}')
    dims = mesh.mesh_dim_names
    if not dims:
        raise AutoplanError("the device mesh has no dim names, so the purpose of its dims is unknown", hint=_MADE_WITH)
    names = _by_purpose(mesh, dims, dict(mesh_dims or {}))
    replicate, shard = names.get("dp_replicate"), names.get("dp_shard")
    if replicate is not None and shard is None:
        if mesh[replicate].size() > 1:
            raise AutoplanError(
                f"the mesh has {replicate!r} but no dim to shard over: FSDP2 replicates only shards",
                hint="name that dim dp_shard, or add a dp_shard dim (size 1 is enough)",
            )
        replicate = None
    data, context = _with_context(mesh, dims, shard, replicate)
    left = [name for name in dims if name in LEFT_ALONE and name not in names.values()]
    notes = tuple(f"mesh dim {name!r} is ignored: its parallelism is set up elsewhere" for name in left)
    tp, ep = (mesh[names[purpose]] if purpose in names else None for purpose in ("tp", "ep"))
    stages = mesh["pp"].size() if "pp" in left else 1
    return MeshDims(tp, data, names, (*notes, *context), ep, stages)


def _with_context(
    mesh: DeviceMesh, dims: tuple[str, ...], shard: str | None, replicate: str | None
) -> tuple[DeviceMesh | None, tuple[str, ...]]:
    """Return FSDP2's mesh, which includes the ranks of context parallelism, and a note."""
    if "cp" not in dims or mesh["cp"].size() == 1 or (shard is not None and shard not in dims):
        # a dim that the caller flattened includes it
        return None if shard is None else (mesh[shard] if replicate is None else mesh[(replicate, shard)]), ()
    joined = ("cp",) if shard is None else (shard, "cp")
    if dims.index(joined[0]) + len(joined) - 1 != dims.index("cp"):
        raise AutoplanError(
            f"the mesh has separate dims {joined[0]!r} and 'cp' ({list(dims)}), but gradients are summed over both",
            hint=f"put 'cp' right after {joined[0]!r}, or flatten the dims and name the result: "
            'mesh_dims={"dp_shard": name}',
        )
    note = f"gradients are averaged over {' and '.join(map(repr, joined))} together"
    if shard is None:
        return mesh["cp"], (note,)
    flat = flattened(mesh[joined], WITH_CONTEXT)
    return (flat if replicate is None else DeviceMesh._concatenate([mesh[replicate], flat])), (note,)


def _by_purpose(mesh: DeviceMesh, dims: tuple[str, ...], wanted: dict[str, str]) -> dict[str, str]:
    if unknown := sorted(set(wanted) - set(ALIASES)):
        raise AutoplanError(
            f"mesh_dims names {', '.join(map(repr, unknown))}, which parallelize does not support",
            hint=f"choose from {', '.join(ALIASES)}",
        )
    names: dict[str, str] = {}
    for purpose, aliases in ALIASES.items():
        if purpose in wanted:
            name = wanted[purpose]
            try:
                mesh[name]
            except (KeyError, RuntimeError, ValueError) as error:
                raise PlanMismatchError(
                    f"the mesh has no dim named {name!r} for {purpose!r} (it has {list(mesh.mesh_dim_names or ())})",
                    hint='name it: init_device_mesh(device, shape, mesh_dim_names=("tp",)), or correct mesh_dims',
                ) from error
            names[purpose] = name
            continue
        candidates = [name for name in aliases if name in dims and name not in wanted.values()]
        if len(candidates) > 1:
            raise AutoplanError(
                f"the mesh dims {', '.join(map(repr, candidates))} could all be {purpose!r}",
                hint=f'say which with mesh_dims={{"{purpose}": name}}; flatten them into one if you mean both',
            )
        if candidates:
            names[purpose] = candidates[0]
    odd = [name for name in dims if name not in names.values() and name not in LEFT_ALONE and mesh[name].size() > 1]
    # A named dim that is not in the mesh was flattened from several others (dp_shard_cp), which are then accounted for.
    if odd and not any(name not in dims for name in names.values()):
        raise AutoplanError(
            f"the mesh dim {odd[0]!r} of {mesh[odd[0]].size()} ranks has no known purpose",
            hint=f"known names are {', '.join(n for a in ALIASES.values() for n in a)}; say what it is with mesh_dims=",
        )
    return names


def tp_mesh_of(mesh: DeviceMesh, plan: Plan, names: dict[str, str] | None = None) -> DeviceMesh | None:
    """Return the 1-D mesh over which the plan splits; None if there is nothing to split over. It is "tp", or "ep" where
    the plan only places experts on different ranks, or "cp" where only the sequence is sharded."""
    purpose = "cp" if plan.cp_size == plan.ranks > 1 else "ep" if plan.tp_size == 1 < plan.ep_size else "tp"
    return _mesh_for(mesh, purpose, plan.cut_over, names)


def context_of(mesh: DeviceMesh, plan: Plan, names: dict[str, str] | None = None) -> dict[str, RankGroup]:
    """Return the groups of a plan that shards the sequence besides another split: its ranks ("cp"), and those of both
    ("all"), where the cp ranks of one rank of the other split are numbered consecutively."""
    split = tp_mesh_of(mesh, plan, names)
    if plan.cp_size in (1, plan.ranks) or split is None:
        return {}
    cut = _mesh_for(mesh, "cp", plan.cp_size, names)
    assert cut is not None and cut.mesh_dim_names is not None and split.mesh_dim_names is not None
    both = tuple(name for name in mesh.mesh_dim_names or () if name in (*cut.mesh_dim_names, *split.mesh_dim_names))
    every = RankGroup.of(flattened(mesh[both], "_".join(both)))
    outer, context = RankGroup.of(split), RankGroup.of(cut)
    return {"cp": context, "all": RankGroup(every.name, every.size, outer.rank * context.size + context.rank)}


def _mesh_for(mesh: DeviceMesh, purpose: str, size: int, names: dict[str, str] | None) -> DeviceMesh | None:
    wanted = (names or {}).get(purpose, purpose)
    dims = mesh.mesh_dim_names or ()
    if wanted in dims:
        submesh = mesh[wanted] if mesh.ndim > 1 else mesh
    elif size == 1:
        return None
    else:
        raise PlanMismatchError(
            f"the plan is for {purpose}={size}, but the mesh has no dim named {wanted!r} (dims: {list(dims)})",
            hint=f'name it: init_device_mesh(device, shape, mesh_dim_names=("{purpose}",)), or pass '
            f'mesh_dims={{"{purpose}": name}}',
        )
    if submesh.size() != size:
        raise PlanMismatchError(
            f"the plan is for {purpose}={size}, but the mesh dim {wanted!r} has {submesh.size()} ranks",
            hint=f"plan again with {purpose}_size={submesh.size()}",
        )
    return submesh
