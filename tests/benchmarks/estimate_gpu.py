"""Estimated peak memory held against one real GPU: sharded models of real widths and few layers, with their update.

    make bench-gpu
    python tests/benchmarks/estimate_gpu.py [CASE] [DEVICE]

The GPU is rank 0 of a mesh whose other ranks are only said to be there (torch's fake process group): every tensor has
its real size, nothing is sent. Prints, for each case, `torch.cuda.max_memory_allocated` of a step, the estimate without
what no allocator sees, and the error; what the allocator reserved beyond that; and seconds of a step of one rank.
Without a GPU estimates are held against what an H100 showed (measured_h100.toml).
"""

from __future__ import annotations

import copy
import fcntl
import gc
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.distributed.tensor import DTensor

import autoplan
from autoplan.forecast.asked import Asked
from autoplan.forecast.devices import Device, load_device
from autoplan.forecast.estimate import estimate_with
from autoplan.forecast.sharded import fake_mesh
from autoplan.forecast.step import Setting, Steps, inputs_of, loss_of
from autoplan.hf.source import resolve
from autoplan.values.estimate import Estimate

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "helpers")]
from adapters import with_adapters  # noqa: E402
from estimate_memory import HOW, MODELS  # noqa: E402

DEVICE, GIB = "cuda", 2**30
RECORDED = Path(__file__).with_name("measured_h100.toml")
BATCH, SEQUENCE = 1, 2048
ALONE: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "alone": ({"tp": 1}, {}), "alone, blocks again": ({"tp": 1}, {"activation_checkpointing": True}),
    "lora, alone": ({"tp": 1}, {}),
}  # fmt: skip


@contextmanager
def own_turn() -> Iterator[None]:
    """One process at a time on the GPU, where several plan beside each other."""
    with (Path(tempfile.gettempdir()) / "autoplan_gpu_turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measured(steps: Steps, dims: dict[str, int], options: dict[str, Any]) -> tuple[int, int, float]:
    """Peak bytes, bytes reserved and seconds of the third step."""
    with fake_mesh(dims, device_type=DEVICE) as mesh:
        model = copy.deepcopy(steps.module)
        autoplan.parallelize(model, mesh, steps.plan(dims["tp"]), check=False, **options)
        model.to_empty(device=DEVICE)
        model.tie_weights()  # each name has a tensor of its own now
        autoplan.rebuild_buffers(model)
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            torch.nn.init.normal_(local.detach(), std=0.02)
        model.train()
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        given = inputs_of(steps, Setting(tp=dims["tp"], batch=BATCH, sequence=SEQUENCE))
        inputs = {name: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for name, v in given.items()}
        gc.collect()
        for _ in range(3):
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.synchronize()
            started = time.perf_counter()
            loss = loss_of(model(**inputs), None)
            assert loss is not None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            taken = time.perf_counter() - started
        return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), taken


@dataclass(frozen=True)
class Case:
    """A model, how it is run, and what is estimated of it."""

    model: str
    how: str
    steps: Steps
    dims: dict[str, int]
    options: dict[str, Any]
    found: Estimate
    size: int  # bytes that an allocator sees


def estimated(wanted: str, device: Device) -> Iterator[Case]:
    """The cases that begin with `wanted`, such as "dense tp 4"."""
    for name, build in MODELS.items():
        for lora in (False, True):
            ways = {how: one for how, one in {**ALONE, **HOW}.items()
                    if how.startswith("lora") == lora and f"{name} {how}".startswith(wanted)}  # fmt: skip
            steps = Steps(resolve(with_adapters(build()) if lora else build())) if ways else None
            for how, (dims, options) in ways.items():
                assert steps is not None
                found = estimate_with(steps, Asked(tuple(dims.items()), BATCH, SEQUENCE, **options), device)
                seen = found.peak - found.parts.overhead + device.workspace
                yield Case(name, how, steps, dims, options, found, seen)


def recorded() -> dict[str, Any]:
    """By model and how: GiB allocated, and by how many percent more was reserved; and on what device."""
    return tomllib.loads(RECORDED.read_text())


def main(wanted: str = "", device_name: str = "h100") -> None:
    there, known = torch.cuda.is_available(), recorded()
    device = load_device(device_name)
    table = Table("model", "how", "GPU GiB", "reserved", "estimate GiB", "off by", "GPU s", "estimate s", "where")
    for case in estimated(wanted, device):
        seconds, told = "", ""
        if there:
            with own_turn():
                peak, more, taken = measured(case.steps, case.dims, case.options)
                gc.collect()
                torch.cuda.empty_cache()
            seconds = f"{taken:.2f}"
            told = f"{case.found.time.total:.2f}" if case.found.time and case.dims == {"tp": 1} else ""
        elif case.how in known.get(case.model, {}):
            one = known[case.model][case.how]
            peak, more = one["allocated"] * GIB, one["allocated"] * GIB * (1 + one["reserved_percent_more"] / 100)
        else:
            continue
        table.add_row(case.model, case.how, f"{peak / GIB:.2f}", f"{more / peak - 1:+.0%}", f"{case.size / GIB:.2f}",
                      f"{case.size / peak - 1:+.1%}", seconds, told,
                      f"{case.found.where}, {case.found.phase}")  # fmt: skip
        print(case.model, case.how, f"{case.size / peak - 1:+.2%}", file=sys.stderr, flush=True)
    Console(width=170).print(f"on {torch.cuda.get_device_name() if there else known['device']}", table)


if __name__ == "__main__":
    main(*sys.argv[1:])
