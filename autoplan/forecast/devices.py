"""What is known of devices and of the links between them: data in rules/devices/*.toml, each figure with its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoplan.common.errors import AutoplanError
from autoplan.common.files.plain import NotPlain, read_plain
from autoplan.common.options import check_argument
from autoplan.common.rules_folder import rules_folder

_NUMBERS = ("memory", "bandwidth", "per_node", "efficiency")
_WHOLE = ("memory", "per_node")
_TOP = ("name", *_NUMBERS, "sources", "flops", "links", "overhead")
_TABLES = {"links": ("inside", "between", "latency_inside", "latency_between"),
           "overhead": ("context", "communicator", "workspace")}  # fmt: skip


@dataclass(frozen=True)
class Device:
    """One kind of device in one kind of cluster.

    `memory`: bytes. `flops`: dense operations a second by dtype. `bandwidth`: bytes a second of its memory. `inside`,
    `between`: bytes a second of one rank's link in a node, and between nodes; `latency_*`: seconds of one message.
    `efficiency`: the share of the peak that matmuls reach. `context`, `communicator`: bytes that a process, and each
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
    sources: tuple[str, ...] = ()

    def overhead(self, groups: int) -> int:
        return self.context + self.workspace + groups * self.communicator


def device_names() -> list[str]:
    return sorted(path.stem for path in (rules_folder() / "devices").glob("*.toml"))


def load_device(name: str) -> Device:
    """By name, or from a file of one's own."""
    check_argument("the device", name, str, f"choose from {', '.join(device_names())}, or give a .toml of your own")
    path = Path(name) if name.endswith(".toml") else rules_folder() / "devices" / f"{name.lower()}.toml"
    if not path.is_file():
        raise AutoplanError(
            f"no device {name!r} is known", hint=f"choose from {', '.join(device_names())}, or give a .toml of your own"
        )
    return _device(path, read_plain(path, NotPlain("device file"), notation="toml"))


def _device(path: Path, data: Any) -> Device:
    if not isinstance(data, dict):
        raise _error(path, "holds no names")
    parts: dict[str, dict[str, Any]] = {}
    for name in ("flops", "links", "overhead"):
        if not isinstance(data.get(name), dict):
            raise _error(path, f"says nothing of [{name}]" if name not in data else f"has no table [{name}]")
        parts[name] = data[name]
    for where, found, known in (("", data, _TOP), *((f"{name}.", parts[name], _TABLES[name]) for name in _TABLES)):
        unknown = [key for key in found if key not in known]
        if unknown:
            raise _error(path, f"has {where}{unknown[0]}, which nothing reads; known are {', '.join(known)}")
    called, sources = data.get("name"), data.get("sources")
    if not isinstance(called, str) or not called:
        raise _error(path, f"has name = {called!r}, which is no text")
    if not isinstance(sources, list) or not all(isinstance(one, str) for one in sources):
        raise _error(path, f"has sources = {sources!r}, which is no list of texts")
    flops = {str(dtype): _number(path, "flops", dtype, rate) for dtype, rate in parts["flops"].items()}
    if "bfloat16" not in flops:
        raise _error(path, "says nothing of flops.bfloat16")
    top = {key: _number(path, "", key, data.get(key), whole=key in _WHOLE) for key in _TOP if key in _NUMBERS}
    links = {key: _number(path, "links", key, parts["links"].get(key), least=0.0 if "latency" in key else None)
             for key in _TABLES["links"]}  # fmt: skip
    taken = {key: _number(path, "overhead", key, parts["overhead"].get(key, 0 if key == "workspace" else None),
                          whole=True, least=0.0) for key in _TABLES["overhead"]}  # fmt: skip
    return Device(
        name=called, flops=flops, sources=tuple(sources), memory=int(top["memory"]), per_node=int(top["per_node"]),
        bandwidth=top["bandwidth"], efficiency=top["efficiency"], context=int(taken["context"]),
        communicator=int(taken["communicator"]), workspace=int(taken["workspace"]), **links,
    )  # fmt: skip


def _number(path: Path, table: str, key: str, value: Any, *, whole: bool = False, least: float | None = None) -> float:
    """Above 0, or not below `least`; of bytes and ranks a whole one."""
    named = f"{table}.{key}" if table else key
    if value is None:
        raise _error(path, f"says nothing of {named}")
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (whole and value != int(value)):
        raise _error(path, f"has {named} = {value!r}, which is no {'whole ' if whole else ''}number")
    if value < least if least is not None else value <= 0:
        raise _error(path, f"has {named} = {value!r}, which is {'below 0' if least is not None else 'not above 0'}")
    return float(value)


def _error(path: Path, what: str) -> AutoplanError:
    return AutoplanError(f"{path} {what}", hint="see rules/devices/h100.toml")
