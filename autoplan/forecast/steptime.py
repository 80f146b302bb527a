"""Seconds of one step, by a roofline: operations at the device's rate, bytes at its memory's, messages at the links'.

Messages of tensor parallelism stand in the way of what comes after them. Those of FSDP2 run beside the compute: what
compute does not hide is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoplan.forecast.devices import Device
from autoplan.values.estimate import Sent, StepTime

__all__ = ["Load", "step_time"]

_HIDDEN = ("dp_shard", "dp", "fsdp", "dp_shard_cp", "dp_replicate")
_OPTIMIZER_PASSES = 7  # read and write of weights and two states, read of gradients


@dataclass(frozen=True)
class Load:
    """What a rank does: operations by dtype, bytes that elementwise work moves, messages, bytes of trained weights."""

    flops_by_dtype: tuple[tuple[str, int], ...]
    moved: int
    sent: tuple[Sent, ...]
    trained: int = 0

    @property
    def flops(self) -> int:
        return sum(n for _, n in self.flops_by_dtype)


def step_time(load: Load, device: Device, mesh: tuple[tuple[str, int], ...], accumulate: int = 1) -> StepTime:
    """`load` is of one micro-batch, but for its messages, which are the step's."""
    slowest = min(device.flops.values())
    rates = {name: device.flops.get(name, slowest) * device.efficiency for name, _ in load.flops_by_dtype}
    compute = accumulate * sum(flops / rates[name] for name, flops in load.flops_by_dtype)
    memory = accumulate * load.moved / device.bandwidth
    seconds: dict[str, float] = {}
    for sent in load.sent:
        seconds[sent.dim] = seconds.get(sent.dim, 0.0) + _seconds(sent, device, mesh)
    hidden = sum(time for dim, time in seconds.items() if dim in _HIDDEN)
    exposed = [(dim, time) for dim, time in seconds.items() if dim not in _HIDDEN]
    if hidden > compute + memory:
        exposed.append(("dp_shard", hidden - compute - memory))
    optimizer = _OPTIMIZER_PASSES * load.trained / device.bandwidth
    return StepTime(compute, memory, tuple(exposed), optimizer)


def _seconds(sent: Sent, device: Device, mesh: tuple[tuple[str, int], ...]) -> float:
    """A ring: each rank passes all but its own part on, twice where the sum goes back to all."""
    sizes = dict(mesh)
    ranks = sizes.get(sent.dim, next((sizes[d] for d in _HIDDEN if d in sizes and sent.dim in _HIDDEN), 1))
    if ranks == 1:
        return 0.0
    near = _span(sent.dim, mesh) <= device.per_node
    link = device.inside if near else device.between
    latency = device.latency_inside if near else device.latency_between
    ways = 2 if sent.kind == "all-reduce" else 1
    return sent.bytes * ways * (ranks - 1) / ranks / link + sent.number * latency


def _span(dim: str, mesh: tuple[tuple[str, int], ...]) -> int:
    """Over how many neighbouring ranks a group of this dim stretches: the last dim's ranks are next to each other."""
    span = 1
    for name, size in reversed(mesh):
        span *= size
        if name == dim:
            break
    return span
