"""Flows of real training (helpers/training_flows.py): between building a sharded model and stepping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_toys import mesh_of
from training_flows import FLOWS, every_flow

from autoplan.check.ranks.run import run_processes, run_ranks
from autoplan.common.errors import AutoplanError
from autoplan.execute.data_parallel.mesh_dims import read_mesh


@pytest.mark.long
@pytest.mark.gloo
def test_every_flow_trains_as_on_one_device(tmp_path: Path) -> None:
    for found in run_processes(every_flow, (tmp_path,), 4):
        assert set(found) == set(FLOWS)
        for name, errors in found.items():
            for what, error in errors.items():
                limit = 0.03 if "bfloat16" in what else 1e-6  # models compute their losses in float32
                assert error < limit, (name, what, error)


@pytest.mark.parametrize(
    ("sizes", "options", "data"),
    [
        ({"dp_shard": 2, "cp": 2}, {}, (4,)),
        ({"pp": 1, "dp_replicate": 2, "dp_shard": 1, "cp": 2, "tp": 1}, {}, (2, 2)),
        ({"cp": 2, "tp": 2}, {}, (2,)),
        ({"dp_shard": 4, "cp": 1}, {}, (4,)),
        ({"dp_shard": 2, "tp": 2}, {}, (2,)),
    ],
)
def test_gradients_are_averaged_over_context_parallel_ranks_too(sizes: Any, options: Any, data: Any) -> None:
    def rank_body(rank: int) -> tuple[int, ...]:
        mesh = read_mesh(mesh_of(**sizes), options).data
        assert mesh is not None
        return tuple(mesh.shape)

    assert run_ranks(rank_body, 4) == [data] * 4


def test_a_context_dim_that_cannot_be_sharded_over_is_refused_unless_flattened_by_the_caller() -> None:
    def rank_body(rank: int) -> None:
        with pytest.raises(AutoplanError, match="separate dims 'dp_shard' and 'cp'"):
            read_mesh(mesh_of(dp_shard=1, tp=2, cp=2))
        mesh = mesh_of(dp_shard=2, cp=2)
        mesh[("dp_shard", "cp")]._flatten("both")
        dims = read_mesh(mesh, {"dp_shard": "both"})
        assert dims.data is not None and dims.data.size() == 4

    torch.manual_seed(0)
    run_ranks(rank_body, 4)
