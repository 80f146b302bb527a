"""Devices and their links: data sheets in rules/devices/*.toml, or measured on this machine, with the source of each
figure."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from autoplan.common.errors import AutoplanError
from autoplan.common.files.plain import NotPlain, read_plain
from autoplan.common.files.rule_files import rules_folder
from autoplan.common.options import check_argument

_TABLES = {"flops": (), "links": ("inside", "between", "latency_inside", "latency_between"),
           "overhead": ("context", "communicator", "workspace")}  # fmt: skip
_NUMBERS = ("memory", "bandwidth", "per_node", "efficiency")
_TOP = ("name", *_NUMBERS, "attention", "sources", "efficiencies", *_TABLES)
_WHOLE = ("memory", "per_node", "context", "communicator", "workspace")


@dataclass(frozen=True)
class Device:
    """One kind of device in one kind of cluster.

    `memory`: bytes. `flops`: dense operations a second by dtype. `bandwidth`: bytes a second of its memory. `inside`,
    `between`: bytes a second of one rank's link in a node, and between nodes; `latency_*`: seconds of one message.
    `efficiency`: the share of the peak that matmuls reach, besides reading and writing their operands; `efficiencies`:
    of dtypes that reach another; `attention`: operations a second that fused kernels of
    attention reach (None: as matmuls). `context`, `communicator`: bytes that a process, and each
    group of ranks, takes; `workspace`: what libraries for matmuls take of the allocator's.
    """

    name: str
    memory: int
    flops: Mapping[str, float]
    bandwidth: float
    inside: float
    between: float
    latency_inside: float
    latency_between: float
    per_node: int
    efficiency: float
    context: int
    communicator: int
    workspace: int = 0
    attention: float | None = None
    sources: tuple[str, ...] = ()
    efficiencies: Mapping[str, float] = field(default_factory=dict)

    def reached(self, dtype: str) -> float:
        """Return the operations a second of large matmuls in a dtype."""
        return self.flops.get(dtype, min(self.flops.values())) * self.efficiencies.get(dtype, self.efficiency)

    def overhead(self, groups: int) -> int:
        return self.context + self.workspace + groups * self.communicator


def device_names() -> list[str]:
    return sorted(path.stem for path in (rules_folder() / "devices").glob("*.toml"))


def load_device(name: str) -> Device:
    """Load a device by name or from a file."""
    hint = f"choose from {', '.join(device_names())}, or pass a .toml of your own"
    check_argument("the device", name, str, hint)
    path = Path(name) if name.endswith(".toml") else rules_folder() / "devices" / f"{name.lower()}.toml"
    if not path.is_file():
        raise AutoplanError(f"unknown device {name!r}", hint=hint)
    return _device(path, read_plain(path, NotPlain("device file"), notation="toml"))


def _device(path: Path, data: Any) -> Device:
    if not isinstance(data, dict):
        raise _error(path, "holds no names")
    for name in _TABLES:
        if not isinstance(data.get(name), dict):
            raise _error(path, f"says nothing of [{name}]" if name not in data else f"has no table [{name}]")
    for where, table, names in (("", data, _TOP), *((f"{n}.", data[n], keys) for n, keys in _TABLES.items() if keys)):
        if unknown := [key for key in table if key not in names]:
            raise _error(path, f"has unknown key {where}{unknown[0]}; known are {', '.join(names)}")
    called, sources = data.get("name"), data.get("sources")
    if not isinstance(called, str) or not called:
        raise _error(path, f"has name = {called!r}, which is not text")
    if not isinstance(sources, list) or not all(isinstance(source, str) for source in sources):
        raise _error(path, f"has sources = {sources!r}, which is not a list of texts")
    if not isinstance(data.get("efficiencies", {}), dict):
        raise _error(path, "has no table [efficiencies]")
    flops, efficiencies = (
        {str(dtype): _number(path, f"{name}.{dtype}", rate) for dtype, rate in data.get(name, {}).items()}
        for name in ("flops", "efficiencies")
    )
    if "bfloat16" not in flops:
        raise _error(path, "lacks flops.bfloat16")
    figures = {name: data.get(name) for name in _NUMBERS}
    figures |= {name: data[name] for name in ("attention",) if data.get(name) is not None}
    for name, names in _TABLES.items():
        figures |= {f"{name}.{key}": data[name].get(key, 0 if key == "workspace" else None) for key in names}
    numbers: dict[str, Any] = {name.rpartition(".")[2]: _number(path, name, value) for name, value in figures.items()}
    return Device(called, flops=flops, efficiencies=efficiencies, sources=tuple(sources), **numbers)


def _number(path: Path, name: str, value: Any) -> float:
    """Return a number above 0, or if it is a latency or memory that is taken, not below; a whole one of bytes and
    ranks."""
    whole, may_be_0 = name.rpartition(".")[2] in _WHOLE, name.startswith(("overhead.", "links.latency"))
    if value is None:
        raise _error(path, f"lacks {name}")
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (whole and value != int(value)):
        raise _error(path, f"has {name} = {value!r}, which is not a {'whole ' if whole else ''}number")
    if value < 0 or not (value or may_be_0):
        raise _error(path, f"has {name} = {value!r}, which is {'below 0' if may_be_0 else 'not above 0'}")
    return int(value) if whole else float(value)


def _error(path: Path, what: str) -> AutoplanError:
    return AutoplanError(f"{path} {what}", hint="see rules/devices/h100.toml")


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
    """Measure the current device; under torchrun over all ranks as well."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    n = _SIZE[kind]
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=kind, dtype=dtype) for _ in range(2))
    q = torch.randn(1, 16, n // 2, 128, device=kind, dtype=dtype)
    whole = torch.empty(n * n, device=kind, dtype=torch.float32)
    matmul = 2 * n**3 / _seconds(lambda: a @ b, kind)
    # causal: half of the four products of scores and values
    attended = _seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), kind)
    attention = 2 * 16 * (n // 2) ** 2 * 128 / attended
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
    """Return the seconds of one run: the median of several, after one to warm up."""
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
    inside, between = found.link or like.inside, like.between
    if several:
        inside, between = like.inside, (found.link or 0) / found.per_node
    matmuls = f"matmuls of {'bfloat16' if found.memory else 'float32, which stand for all'}"
    measured = ["bandwidth", "attention (forward, causal)", matmuls, *(["memory"] if found.memory else [])]
    measured += [f"links.{place}"] if found.link else []
    taken = f"links.{copied}" if found.link else "links"
    taken += ", latencies, overhead" + ("" if found.memory else ", memory")
    taken += ", float32 in the ratio that it has there" if found.memory else ""
    scale = found.matmul / like.flops["bfloat16"]
    single = found.matmul if not found.memory else like.flops["float32"] * scale
    return f"""# Written by `autoplan calibrate`.
name = "{found.name}, measured"
memory = {found.memory or like.memory}
bandwidth = {found.copy:.4e}
per_node = {found.per_node if found.link else like.per_node}
efficiency = 1.0
attention = {found.attention:.4e}
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
