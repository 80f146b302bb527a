"""Prices of what others run around the tp and data-parallel part that autoplan plans, by arithmetic on its recordings.

A stage of a pipeline, experts on data-parallel ranks that exchange tokens, products in float8: docs/estimate.md says by
which formulas.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import prod

from autoplan.common.errors import AutoplanError
from autoplan.forecast.devices import Device
from autoplan.forecast.memory import Walk
from autoplan.forecast.recording.tape import Block, LeftOut
from autoplan.forecast.sharded import UnitSize
from autoplan.forecast.step import Recorded
from autoplan.values.estimate import Sent

_FLOAT8 = "float8"
_WAYS = 4  # there and back, forward and backward


def most_stages(recorded: Recorded) -> int:
    """Into how many stages a price can cut it: each has the blocks that are recorded, at least."""
    few = len(_blocks(recorded))
    return (few + _left(recorded.left_out)) // few if few else 1


def one_stage(recorded: Recorded, stages: int) -> Recorded:
    """The largest of so many stages of nearly equal length; with the embedding and the head, though none has both."""
    if stages == 1:
        return recorded
    most = most_stages(recorded)
    if stages > most:
        raise AutoplanError(
            f"a pipeline of {stages} stages cannot be priced: a stage has {len(_blocks(recorded))} blocks at least",
            hint=f"give up to {most}",
        )
    few, left = len(_blocks(recorded)), _left(recorded.left_out)
    keep = -(-(few + left) // stages) - few
    kept: dict[str, tuple[tuple[str, str], ...]] = {}
    seen = 0
    for name, pairs in recorded.left_out.items():  # of each kind of block its part, so that all kinds stay
        before, seen = seen, seen + len(pairs)
        kept[name] = pairs[: seen * keep // left - before * keep // left]
    gone = {block for name, pairs in recorded.left_out.items() for block, _ in pairs[len(kept[name]) :]}
    units = tuple(
        unit for unit in recorded.units if not any(unit.name == b or unit.name.startswith(f"{b}.") for b in gone)
    )
    return replace(recorded, left_out=kept, units=units)


def _blocks(recorded: Recorded) -> set[str]:
    return {step.name for step in recorded.program.steps if isinstance(step, Block)}


def _left(left_out: LeftOut) -> int:
    return sum(map(len, left_out.values()))


def exchanged(walk: Walk, units: tuple[UnitSize, ...], ranks: int) -> Iterator[Sent]:
    """Tokens that go to the ranks of their experts and back, as many of them as there are rows in the products."""
    if ranks == 1:
        return
    stacks = [p for unit in units for p in unit.parameters if p.stack]
    if not stacks or not walk.expert_flops:
        raise AutoplanError("exchange_experts of a model without stacks of experts", hint="leave it out")
    if any(p.shape[0] % ranks for p in stacks):
        raise AutoplanError(f"{stacks[0].shape[0]} experts are not divisible by exchange_experts={ranks}",
                            hint="give a number that divides them")  # fmt: skip
    layers = [unit for unit in units if any(p.stack for p in unit.parameters)]
    matrices = sum(prod(p.shape[1:]) for p in stacks)
    rows = walk.expert_flops / (2 * matrices)  # of each layer
    width = min(set.intersection(*(set(p.shape[1:]) for p in stacks)), default=stacks[0].shape[-1])
    size = int(rows * width * (walk.data.compute or stacks[0].size))
    yield Sent("ep", "all-to-all", _WAYS * len(layers), _WAYS * len(layers) * size, ranks)


def zero_1(units: tuple[UnitSize, ...], trained: int) -> tuple[Sent, ...]:
    """Gradients are summed, each rank updates its part, and gives it to the others."""
    number = sum(any(p.trained for p in unit.parameters) for unit in units)
    return tuple(Sent("dp_replicate", kind, number, trained) for kind in ("reduce-scatter", "all-gather"))


def in_float8(walk: Walk, device: Device) -> dict[str, int]:
    """Operations by dtype, with the products of layers in blocks in float8; attention and the head are as they were."""
    if _FLOAT8 not in device.flops:
        raise AutoplanError(f"{device.name} has no rate of float8", hint="leave matmuls= out, or add flops.float8")
    left = sum(walk.layers.values())
    flops = {_FLOAT8: left}
    for dtype, count in sorted(walk.flops.items(), key=lambda pair: -pair[1]):
        taken = min(left, count)
        left -= taken
        flops[dtype] = count - taken
    return flops
