"""Seconds of one step, by a roofline: operations at the device's rate, bytes at its memory's, messages at the links'.

Messages of tensor parallelism delay what follows; FSDP2's are exposed where the compute of their phase does not hide
them. What others run (pipelines, exchanged experts, float8) is priced by the formulas in docs/estimate.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from autoplan.common.errors import AutoplanError
from autoplan.forecast.devices import Device
from autoplan.forecast.memory import Walk
from autoplan.forecast.recording.tape import ATTENTION, Block, without_blocks
from autoplan.forecast.sharded import Held, UnitSize
from autoplan.forecast.step import Recorded
from autoplan.values.estimate import JOINED, Sent, StepTime

HIDDEN = ("dp_shard", "dp", "fsdp", "dp_shard_cp", "dp_replicate")
HOST_LINK = 25e9  # bytes a second of a rank, one way: half of PCIe 5.0 × 16, which two ranks often share
HOST_MEMORY = 40e9  # bytes a second of a rank: eight of them share about 300 GB/s of a socket's channels
_STREAMED = 0.83  # of the bandwidth: a copy on an H100 (measured), A100 (gpt-fast's README: about 1,700 GB/s)
_KERNEL = 4e-6  # seconds that a kernel of decoding takes however little it reads: by half of published_decoding.py
_KERNELS_OF_A_MATRIX = 2  # its product, and the elementwise work beside it
_PASSES_OF_A_SUM = 2.5  # in its dtype: read it and a gradient of half of its bytes, write it
_OPTIMIZER_PASSES = 7  # read and write of weights and two states, read of gradients


@dataclass(frozen=True)
class Load:
    """The work of a rank in one micro-batch: operations by dtype, bytes that elementwise work moves, messages, bytes of
    trained weights. `forward`: the forward's share of the operations; `sent_forward`: which messages are its.
    `offloaded` and `offloaded_trained`: bytes of weights that lie in the host's memory."""

    flops_by_dtype: tuple[tuple[str, int], ...]
    moved: int
    sent: tuple[Sent, ...]
    trained: int = 0
    forward: float = 1 / 3
    sent_forward: tuple[Sent, ...] = ()
    offloaded: int = 0
    offloaded_trained: int = 0

    @property
    def flops(self) -> int:
        return sum(n for _, n in self.flops_by_dtype)


def step_time(
    load: Load,
    device: Device,
    mesh: tuple[tuple[str, int], ...],
    accumulate: int = 1,
    stages: int = 1,
    *,
    summed_once: bool = False,
    waiting: int = 0,
    pieces: int = 1,
) -> StepTime:
    """Time `accumulate` micro-batches through `stages`. `summed_once`: data parallelism talks once a step;
    `waiting`: bytes of unsharded gradients, to which each micro-batch adds its own; the last one sums them over ranks.
    `pieces`: virtual stages of a rank; the first micro-batch passes one of them at a time."""
    compute = _computing(load, device)
    memory = (load.moved + _PASSES_OF_A_SUM * waiting) / device.bandwidth
    seconds: dict[str, float] = {}
    for sent in (sent for sent in load.sent if sent.dim not in HIDDEN):
        seconds[sent.dim] = seconds.get(sent.dim, 0.0) + _seconds(sent, device, mesh)
    exposed = [(dim, accumulate * time) for dim, time in seconds.items()]
    idle = (stages - 1) * (compute + memory + sum(seconds.values())) / pieces
    data = _not_hidden(load, compute + memory, device, mesh)
    gathers = tuple(sent for sent in load.sent if sent.kind == "all-gather") if waiting else load.sent
    earlier = 0 if summed_once else accumulate - 1
    data += earlier * _not_hidden(replace(load, sent=gathers), compute + memory, device, mesh) if earlier else 0.0
    if data:
        sharded = any(sent.dim in HIDDEN and sent.dim != "dp_replicate" for sent in load.sent)
        exposed.append(("dp_shard" if sharded else "dp_replicate", data))
    if load.offloaded:  # weights are fetched for forward and for backward, gradients are brought back
        exposed.append(("the host", accumulate * (2 * load.offloaded + load.offloaded_trained) / HOST_LINK))
    optimizer = _OPTIMIZER_PASSES * (load.trained / device.bandwidth + load.offloaded_trained / HOST_MEMORY)
    return StepTime(accumulate * compute, accumulate * memory, tuple(exposed), optimizer, idle)


def decoding_time(
    load: Load, device: Device, mesh: tuple[tuple[str, int], ...], read: int, share: float, matrices: int
) -> float:  # fmt: skip
    """Seconds for one token of each sequence. `share`: the part of `load` that they are; `read`: bytes read once, of
    so many `matrices`, too."""
    sent = sum(_seconds(replace(message, bytes=int(message.bytes * share)), device, mesh) for message in load.sent)
    reached = device.bandwidth * (1.0 if device.efficiency == 1 else _STREAMED)  # `calibrate` measures a copy
    work = max(_computing(load, device) * share, read / reached)
    return work + sent + matrices * _KERNELS_OF_A_MATRIX * _KERNEL


def _computing(load: Load, device: Device) -> float:
    """Return the seconds of matmuls, each at the rate of its dtype, and of fused kernels of attention."""
    seconds = 0.0
    for name, flops in load.flops_by_dtype:
        reached = device.reached(name.removeprefix(ATTENTION))
        seconds += flops / (min(reached, device.attention or reached) if name.startswith(ATTENTION) else reached)
    return seconds


def _not_hidden(load: Load, computing: float, device: Device, mesh: tuple[tuple[str, int], ...]) -> float:
    """Seconds of data parallelism's messages that one micro-batch waits for."""
    ours = [sent for sent in load.sent if sent.dim in HIDDEN]
    whole = sum(_seconds(sent, device, mesh) for sent in ours)
    ahead = sum(_seconds(sent, device, mesh) for sent in load.sent_forward if sent.dim in HIDDEN)
    waited = max(0.0, ahead - load.forward * computing) + max(0.0, whole - ahead - (1 - load.forward) * computing)
    # One gather and one sum, of the usual unit
    return max(waited, sum(_seconds(message, device, mesh) / message.number for message in ours if message.number))


def _seconds(sent: Sent, device: Device, mesh: tuple[tuple[str, int], ...]) -> float:
    """A ring: each rank passes all but its own part on, twice for an all-reduce. Between nodes there is a ring for each
    port; a tree sums in few steps; an all-to-all passes each rank's own port."""
    places = {_place(dim, mesh) for dim in sent.dim.split(JOINED)}
    if sent.dim == "dp_shard":  # FSDP2 shards over the ranks of context parallelism, too
        places |= {place for place, (name, _) in enumerate(mesh) if name == "cp"}
    ranks = sent.among or prod(mesh[place][1] for place in places)
    if ranks == 1:
        return 0.0
    # How far apart two ranks of a group are: those of the last dim are next to each other.
    stride = prod(size for _, size in mesh[max(places) + 1 :])
    near = max(1, min(ranks, device.per_node // stride))
    nodes = -(-ranks // near)
    back = sent.kind == "all-reduce"
    ports = 1 if sent.kind == "all-to-all" else near
    link = device.inside if nodes == 1 else min(device.inside, device.between * ports)
    steps = (nodes - 1).bit_length() * 2 if back else nodes - 1
    latency = device.latency_inside + steps * device.latency_between
    return sent.bytes * (2 if back else 1) * (ranks - 1) / ranks / link + sent.number * latency


def _place(dim: str, mesh: tuple[tuple[str, int], ...]) -> int:
    """Return the place of the dim that a message is over, by its name or another that data parallelism has."""
    names = [name for name, _ in mesh]
    if dim in names:
        return names.index(dim)
    return next(place for place, name in enumerate(names) if name in HIDDEN and name != "dp_replicate")


_FLOAT8 = "float8"
_WAYS = 4  # there and back, forward and backward


def one_stage(recorded: Recorded, stages: int) -> Recorded:
    """The largest of so many stages of nearly equal length; with the embedding and the head, though none has both."""
    if stages == 1:
        return recorded
    stood = dict.fromkeys((step.name for step in recorded.program.steps if isinstance(step, Block)), 1)
    for _, block in (pair for pairs in recorded.left_out.values() for pair in pairs):
        stood[block] = stood.get(block, 1) + 1
    blocks = sum(stood.values())
    if stages > max(1, blocks):
        raise AutoplanError(f"a pipeline of {stages} stages cannot be priced: the model has {blocks} blocks",
                            hint=f"use at most {max(1, blocks)}")  # fmt: skip
    keep = -(-blocks // stages)
    few = set(sorted(stood, key=lambda name: -stood[name])[:keep])  # if not all of them: of the kinds that most have
    gone = stood.keys() - few
    program = without_blocks(recorded.program, gone)
    left, extra = blocks - len(stood), keep - len(few)
    chosen: dict[str, tuple[tuple[str, str], ...]] = {}
    seen = 0
    for name, pairs in recorded.left_out.items():  # of each kind of block its part, so that all kinds stay
        before, seen = seen, seen + len(pairs)
        chosen[name] = pairs[: seen * extra // left - before * extra // left]
    gone |= {block for name, pairs in recorded.left_out.items() for block, _ in pairs[len(chosen[name]) :]}
    units = tuple(unit for unit in recorded.units if gone.isdisjoint(_within(unit.name)))
    return replace(recorded, program=program, left_out=chosen, units=units)


def _within(name: str) -> Iterator[str]:
    """The module itself, and those that it is in."""
    parts = name.split(".")
    return (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))


def exchanged(walk: Walk, units: tuple[UnitSize, ...], ranks: int) -> Iterator[Sent]:
    """Tokens that go to the ranks of their experts and back, as many of them as there are rows in the products."""
    if ranks == 1:
        return
    stacks = _stacks(units)
    if not stacks or not walk.expert_flops:
        raise AutoplanError("exchange_experts for a model without stacked experts", hint="omit it")
    if any(p.shape[0] % ranks for p in stacks):
        raise AutoplanError(f"{stacks[0].shape[0]} experts are not divisible by exchange_experts={ranks}",
                            hint="use a divisor")  # fmt: skip
    layers = [unit for unit in units if any(p.stack for p in unit.parameters)]
    rows = _rows(walk, stacks)
    width = min(set.intersection(*(set(p.shape[1:]) for p in stacks)), default=stacks[0].shape[-1])
    size = int(rows * width * (walk.data.compute or stacks[0].size))
    yield Sent("ep", "all-to-all", _WAYS * len(layers), _WAYS * len(layers) * size, ranks)


def unread(walk: Walk, units: tuple[UnitSize, ...], share: float) -> int:
    """Bytes of experts that no token goes to, if so large a share of those that were recorded go to any alike."""
    stacks = _stacks(units)
    rows = share * _rows(walk, stacks) if stacks else 0
    return int(sum(walk.data.stored(p) * (1 - 1 / p.shape[0]) ** rows for p in stacks))


def _stacks(units: tuple[UnitSize, ...]) -> list[Held]:
    return [p for unit in units for p in unit.parameters if p.stack]


def _rows(walk: Walk, stacks: list[Held]) -> float:
    """Rows that the experts of one layer take forward."""
    return walk.expert_flops / (2 * sum(prod(p.shape[1:]) for p in stacks))


def zero_1(units: tuple[UnitSize, ...], trained: int) -> tuple[Sent, ...]:
    """Gradients are summed, each rank updates its part, and gives it to the others."""
    number = sum(any(p.trained for p in unit.parameters) for unit in units)
    return tuple(Sent("dp_replicate", kind, number, trained) for kind in ("reduce-scatter", "all-gather"))


def in_float8(walk: Walk, device: Device) -> dict[str, int]:
    """Operations by dtype, with the products of layers in blocks in float8; attention and the head are as they were."""
    if _FLOAT8 not in device.flops:
        raise AutoplanError(f"{device.name} has no float8 rate", hint="omit matmuls=, or add flops.float8")
    left = sum(walk.layers.values())
    flops = {_FLOAT8: left}
    for dtype, count in sorted(walk.flops.items(), key=lambda pair: -pair[1]):
        taken = 0 if dtype.startswith(ATTENTION) else min(left, count)
        left -= taken
        flops[dtype] = count - taken
    return flops
