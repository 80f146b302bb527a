"""The mesh that a forecast is asked about: names of dims and their sizes, as `parallelize` would read them."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch.distributed.device_mesh import DeviceMesh

from autoplan.common.errors import AutoplanError
from autoplan.common.options import MOST_RANKS, check_argument, check_count
from autoplan.execute.data_parallel.mesh_dims import ALIASES, LEFT_ALONE

_HINT = "write it like dp_shard=8,tp=8"


def mesh_sizes(
    mesh: DeviceMesh | Mapping[str, int] | str, *, priced: tuple[str, ...] = ()
) -> tuple[tuple[str, int], ...]:
    """("dp_shard", 8), ("tp", 8) of a mesh, of {"dp_shard": 8, "tp": 8}, or of "dp_shard=8,tp=8".

    `priced`: dims that others run, and that may be there all the same.
    """
    if isinstance(mesh, DeviceMesh):
        sizes = tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    elif isinstance(mesh, Mapping):
        for name, size in mesh.items():
            check_argument("a name of a mesh dim", name, str, 'write the mesh like {"dp_shard": 8, "tp": 8}')
            check_count(f"mesh[{name!r}]", size)
        sizes = tuple(mesh.items())
    else:
        check_argument("mesh", mesh, str, "give a DeviceMesh, a dict of sizes, or text like dp_shard=8,tp=8")
        sizes = tuple(_parsed(mesh, part) for part in mesh.split(","))
    _check(sizes, priced)
    return sizes


def _parsed(mesh: str, part: str) -> tuple[str, int]:
    name, _, size = (text.strip() for text in part.partition("="))
    if not (size.isascii() and size.isdigit() and len(size) < 9) or int(size) < 1:
        raise AutoplanError(f"the mesh {mesh!r} has no size for {name!r}", hint=_HINT)
    return name, int(size)


def _check(sizes: tuple[tuple[str, int], ...], priced: tuple[str, ...]) -> None:
    """What `parallelize` would refuse, or what no forecast is made of."""
    names = [name for name, _ in sizes]
    if not names:
        raise AutoplanError("the mesh has no dims", hint="for one rank write dp_shard=1")
    for purpose, aliases in ALIASES.items():
        same = [name for name in names if name in aliases]
        if len(same) > 1:
            raise AutoplanError(f"the mesh dims {', '.join(same)} could all be {purpose!r}", hint="name one of them")
    for name, size in sizes:
        if size > 1 and name in priced:
            continue
        if size > 1 and name in LEFT_ALONE:
            hint = "leave it out, and say what one stage or one part of a sequence has"
            raise AutoplanError(f"nothing is forecast of the mesh dim {name!r}", hint=hint)
        if size > 1 and not any(name in aliases for aliases in ALIASES.values()):
            known = ", ".join(name for aliases in ALIASES.values() for name in aliases)
            what = f"the mesh dim {name!r} of {size} ranks has no known purpose"
            raise AutoplanError(what, hint=f"known are {known}")
    found = {purpose: size for purpose, aliases in ALIASES.items() for name, size in sizes if name in aliases}
    if found.get("dp_replicate", 1) > 1 and "dp_shard" not in found:
        raise AutoplanError("the mesh has 'dp_replicate' and no dim to shard over", hint="add dp_shard=1, or more")
    if found.get("tp", 1) > 1 and found.get("ep", 1) > 1:
        raise AutoplanError(
            f"the mesh has {found['tp']} ranks in 'tp' and {found['ep']} in 'ep'",
            hint="experts lie on the ranks of tp (ep_size=), or on ranks of their own with tp=1",
        )
    ranks = prod(size for _, size in sizes)
    if ranks > MOST_RANKS:
        raise AutoplanError(f"the mesh has {ranks} ranks", hint=f"give up to {MOST_RANKS}")
