"""1,024 ranks without machines: how long one of them takes to apply a plan, and the bytes that planning once moves.

    python tests/benchmarks/plan_at_scale.py [MODEL] [--tp 8] [--world 1024]

The process group is torch's fake one: collectives return at once and move nothing. So what is timed is Python on one
rank, with FSDP2 over the rest of the mesh, on meta weights. Bytes are counted, not moved: what `plan_once` sends to
each rank, and what ranks say of themselves to be compared.
"""

from __future__ import annotations

import argparse
import pickle
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoplan
from autoplan.hf.source import resolve
from autoplan.once import packed_plan

SHAPES = Path(__file__).resolve().parents[2] / "examples" / "shapes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(SHAPES / "llama-3.1-70b"))
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--world", type=int, default=1024)
    asked = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=asked.world)
    mesh = init_device_mesh("cpu", (asked.world // asked.tp, asked.tp), mesh_dim_names=("dp_shard", "tp"))
    model = resolve(asked.model).module()
    start = time.perf_counter()
    plan = autoplan.plan(model, asked.tp, prove="none")
    planned = time.perf_counter() - start
    sent, said = len(packed_plan(plan)), len(pickle.dumps("0" * 16))
    start = time.perf_counter()
    tp_only = autoplan.parallelize(resolve(asked.model).module(), mesh["tp"], plan, check=False)
    alone = time.perf_counter() - start
    start = time.perf_counter()
    autoplan.parallelize(model, mesh, plan, check=False)
    applied = time.perf_counter() - start
    assert autoplan.applied(tp_only) is not None and torch.distributed.is_initialized()
    plain = len(str(plan.to_dict()))
    print(
        f"{Path(asked.model).name}, {asked.world:,} ranks (tp {asked.tp}, dp_shard {asked.world // asked.tp}), a rank:"
    )
    print(f"    plan, once                 {planned:8.2f} s")
    print(f"    apply, tp alone            {alone:8.2f} s")
    print(f"    apply, tp and FSDP2        {applied:8.2f} s")
    print(f"    plan, as text              {plain:8,} bytes")
    print(f"    plan, sent to each rank    {sent:8,} bytes")
    print(f"    compared beforehand        {said * asked.world:8,} bytes into each rank")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
