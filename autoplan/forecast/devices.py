"""What is known of devices and of the links between them: data in rules/devices/*.toml, each figure with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autoplan.common.errors import AutoplanError
from autoplan.common.files.plain import NotPlain, read_plain
from autoplan.common.options import check_argument
from autoplan.common.rules_folder import rules_folder

__all__ = ["Device", "device_names", "load_device"]


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
    data = read_plain(path, NotPlain("device file"), notation="toml")
    try:
        links, taken = data["links"], data["overhead"]
        found = Device(
            data["name"], int(data["memory"]), {k: float(v) for k, v in data["flops"].items()},
            float(data["bandwidth"]),
            float(links["inside"]), float(links["between"]), float(links["latency_inside"]),
            float(links["latency_between"]), int(data["per_node"]), float(data["efficiency"]), int(taken["context"]),
            int(taken["communicator"]), int(taken.get("workspace", 0)), tuple(data["sources"]),
        )  # fmt: skip
    except KeyError as error:
        raise AutoplanError(f"{path} says nothing of {error}", hint="see rules/devices/h100.toml") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise AutoplanError(f"{path} is no device file: {error}", hint="see rules/devices/h100.toml") from error
    rates = [found.memory, found.bandwidth, found.inside, found.between, found.efficiency, found.per_node]
    if not all(0 < rate < float("inf") for rate in (*rates, *found.flops.values())) or "bfloat16" not in found.flops:
        raise AutoplanError(f"{path} has a rate or a size that is not above 0, or no flops of bfloat16",
                            hint="see rules/devices/h100.toml")  # fmt: skip
    return found
