"""A recording boiled down: what each stretch between two events leaves, its highest moment, what it computes and sends.

A walk through a step asks for no more, and two recordings of unlike batches can be blended: their stretches stand in
the same order, even where one of them does a thing more often (a loss that is worked out in chunks).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from autoplan.forecast.recording.tape import Block, Changed, Item, Message, Place, Tape, UnitEvent, Worked

KINDS = ("kept", "temporary", "gradient", "communication")
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class Stretch:
    """`net`: bytes that stay or go, by kind. `at`: bytes by kind at the highest moment, in `module`. `flops` by dtype,
    `layers`: those of them that products of linear layers and of experts take. `moved`: bytes of what only moves or
    works element by element. `sent`: number and bytes by (dim, kind)."""

    net: Numbers
    at: Numbers
    module: str
    flops: Numbers
    moved: float
    sent: Mapping[tuple[str, str], tuple[int, float]]
    layers: Numbers = field(default_factory=dict)


Step = Stretch | UnitEvent | Block | Place


@dataclass(frozen=True)
class Program:
    """The steps in order; `end_of_forward`: how many of them are the forward's."""

    steps: tuple[Step, ...]
    end_of_forward: int


def program_of(tape: Tape) -> Program:
    sizes = np.array([one.bytes for one in tape.storages], dtype=np.int64)
    kinds = np.array([KINDS.index(one.kind) for one in tape.storages], dtype=np.int64)
    forward = tuple(_steps(tape.items[: tape.end_of_forward], sizes, kinds))
    backward = tuple(_steps(tape.items[tape.end_of_forward :], sizes, kinds))
    return Program((*forward, *backward), len(forward))


def _steps(items: Iterable[Item], sizes: np.ndarray, kinds: np.ndarray) -> Iterator[Step]:
    """One stretch before each event and one at the end, empty or not: so recordings of two batches stay in step."""
    between: list[Item] = []
    for item in items:
        if isinstance(item, UnitEvent | Block | Place):
            yield _measured(between, sizes, kinds)
            yield item
            between = []
        else:
            between.append(item)
    yield _measured(between, sizes, kinds)


def _measured(items: list[Item], sizes: np.ndarray, kinds: np.ndarray) -> Stretch:
    net, at, module = _memory([item for item in items if isinstance(item, Changed)], sizes, kinds)
    flops: dict[str, float] = {}
    layers: dict[str, float] = {}
    moved = 0.0
    sent: dict[tuple[str, str], tuple[int, float]] = {}
    for item in items:
        if isinstance(item, Worked) and item.flops:
            flops[item.dtype] = flops.get(item.dtype, 0) + item.flops
            if item.layer:
                layers[item.layer] = layers.get(item.layer, 0) + item.flops
        elif isinstance(item, Worked):
            moved += item.bytes
        elif isinstance(item, Message):
            number, size = sent.get((item.dim, item.kind), (0, 0.0))
            sent[item.dim, item.kind] = number + 1, size + max(item.sent, item.received)
    return Stretch(net, at, module, flops, moved, sent, layers)


def _memory(changes: list[Changed], sizes: np.ndarray, kinds: np.ndarray) -> tuple[Numbers, Numbers, str]:
    if not changes:
        return {}, {}, ""
    where = np.array([change.storage for change in changes])
    deltas = sizes[where] * np.array([change.sign for change in changes])
    of_kind = kinds[where]
    top = int(np.argmax(np.cumsum(deltas)))
    net = {kind: float(deltas[of_kind == i].sum()) for i, kind in enumerate(KINDS)}
    at = {kind: float(deltas[: top + 1][of_kind[: top + 1] == i].sum()) for i, kind in enumerate(KINDS)}
    return net, at, changes[top].module


def blended(one: Program, two: Program, batch: float) -> Program | None:
    """The step at `batch`, from those at one and at two sequences; None where these did not do the same."""
    if len(one.steps) != len(two.steps) or one.end_of_forward != two.end_of_forward:
        return None
    steps: list[Step] = []
    for first, second in zip(one.steps, two.steps, strict=True):
        if isinstance(first, Stretch) and isinstance(second, Stretch):
            steps.append(_between(first, second, batch - 1))
        elif first == second:
            steps.append(first)
        else:
            return None
    return Program(tuple(steps), one.end_of_forward)


def _between(one: Stretch, two: Stretch, more: float) -> Stretch:
    sent = {}
    for key in two.sent:
        (number, size), (count, whole) = one.sent.get(key, (0, 0.0)), two.sent[key]
        sent[key] = round(number + more * (count - number)), size + more * (whole - size)
    moved = one.moved + more * (two.moved - one.moved)
    numbers = (_line(getattr(one, name), getattr(two, name), more) for name in ("net", "at", "flops", "layers"))
    net, at, flops, layers = numbers
    return Stretch(net, at, two.module, flops, moved, sent, layers)


def _line(one: Numbers, two: Numbers, more: float) -> Numbers:
    return {key: one.get(key, 0.0) + more * (two.get(key, 0.0) - one.get(key, 0.0)) for key in {*one, *two}}
