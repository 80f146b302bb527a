"""Measure the machine at hand, and write it as a device file: matmuls, attention, copies, and messages under torchrun.

Data sheets give peaks; a step reaches a share of them. What cannot be measured here (links, without other ranks) is
taken from a known device, and the file says so.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F

from autoplan.forecast.devices import Device

_SIZE = {"cuda": 8192, "cpu": 1024}
_ROUNDS = 10


@dataclass(frozen=True)
class Measured:
    """Operations a second of a matmul and of attention, bytes a second of a copy and of an all-reduce (None: alone)."""

    name: str
    memory: int
    matmul: float
    attention: float
    copy: float
    link: float | None
    ranks: int
    per_node: int = 1  # ranks of this job on this machine


def measure() -> Measured:
    """On the current device; under torchrun over all ranks as well."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    n = _SIZE[kind]
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=kind, dtype=dtype) for _ in range(2))
    q = torch.randn(1, 16, n // 2, 128, device=kind, dtype=dtype)
    whole = torch.empty(n * n, device=kind, dtype=torch.float32)
    matmul = 2 * n**3 / _seconds(lambda: a @ b, kind)
    attention = (
        2 * 16 * (n // 2) ** 2 * 128 / _seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), kind)
    )  # causal: half of the four products of scores and values
    copied = whole.clone()
    copy = 2 * whole.nbytes / _seconds(lambda: copied.copy_(whole), kind)
    memory = torch.cuda.get_device_properties(0).total_memory if kind == "cuda" else 0
    name = torch.cuda.get_device_name() if kind == "cuda" else "CPU"
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    link = None
    if ranks > 1:
        link = 2 * whole.nbytes * (ranks - 1) / ranks / _seconds(lambda: dist.all_reduce(whole), kind)
    return Measured(name, memory, matmul, attention, copy, link, ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))


def _seconds(run: Callable[[], object], kind: str) -> float:
    """Of one run, the median of several, after one to warm up."""
    taken = []
    for _ in range(_ROUNDS + 1):
        started = time.perf_counter()
        run()
        if kind == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return sorted(taken[1:])[_ROUNDS // 2]


def device_text(found: Measured, like: Device) -> str:
    """A device file: what was measured, and the rest from `like`. Rates were reached, so the efficiency is 1."""
    several = found.link is not None and found.ranks > found.per_node
    # over several nodes a ring passes by as many ports as a node has ranks (steptime.py)
    place, copied = ("between", "inside") if several else ("inside", "between")
    inside, between = (
        (like.inside, (found.link or 0) / found.per_node) if several else (found.link or like.inside, like.between)
    )
    measured = [
        "bandwidth",
        f"matmuls of {'bfloat16' if found.memory else 'float32, which stand for all'}",
        *(["memory"] if found.memory else []),
    ]
    measured += [f"links.{place}"] if found.link else []
    taken = f"links.{copied}" if found.link else "links"
    taken += ", latencies, overhead" + ("" if found.memory else ", memory")
    taken += ", float32 in the ratio that it has there" if found.memory else ""
    scale = found.matmul / like.flops["bfloat16"]
    single = found.matmul if not found.memory else like.flops["float32"] * scale
    return f"""# Written by `autoplan calibrate`: attention reached {found.attention:.3e} operations a second.
name = "{found.name}, measured"
memory = {found.memory or like.memory}
bandwidth = {found.copy:.4e}
per_node = {found.per_node if found.link else like.per_node}
efficiency = 1.0
sources = ["measured on {found.ranks} ranks: {", ".join(measured)}", "as of {like.name}: {taken}"]

[flops]
bfloat16 = {found.matmul:.4e}
float16 = {found.matmul:.4e}
float32 = {single:.4e}

[links]
inside = {inside:.4e}
between = {between:.4e}
latency_inside = {like.latency_inside}
latency_between = {like.latency_between}

[overhead]
context = {like.context}
communicator = {like.communicator}
workspace = {like.workspace}
"""
