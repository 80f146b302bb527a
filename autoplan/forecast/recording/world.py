"""A world of as many ranks as wanted, in one process, in which nothing is sent.

Shapes, messages and memory of one rank need the mesh, not the other ranks. torch's fake process group answers every
collective at once; whatever process group is alive meanwhile is set aside, and put back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from autoplan.capture.dry_run import enter_first_in_a_lasting_thread
from autoplan.common.errors import AutoplanError
from autoplan.patches.simulated_ranks import world_per_thread


@contextmanager
def fake_mesh(dims: Mapping[str, int], rank: int = 0, device_type: str = "cpu") -> Iterator[DeviceMesh]:
    """A mesh of these dims ({"dp_shard": 8, "tp": 8}) as rank `rank` sees it."""
    ranks = 1
    for size in dims.values():
        ranks *= size
    if not 0 <= rank < ranks:
        raise AutoplanError(f"there is no rank {rank}: the mesh has {ranks}", hint=f"choose 0 to {ranks - 1}")
    enter_first_in_a_lasting_thread()
    with world_per_thread():
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            yield init_device_mesh(device_type, tuple(dims.values()), mesh_dim_names=tuple(dims))
        finally:
            dist.destroy_process_group()
