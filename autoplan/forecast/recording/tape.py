"""What one step did with memory and messages, in order; and by stretches, at full depth.

The steps of a block that was left out are those of the recorded block that stands for it. A program holds of each
stretch what it leaves, its highest moment, what it computes and sends; two recordings of unlike batches can be blended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Phase = Literal["forward", "backward"]
Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Storage:
    """One piece of memory. `gradient`: of a parameter; `kept`: made forward and freed later than its forward. `lasts`:
    of what is kept without a backward, bytes that later tokens read: of a sliding window, the last ones."""

    bytes: int
    kind: Literal["kept", "temporary", "gradient", "communication"]
    lasts: int = 0


@dataclass(frozen=True, slots=True)
class Changed:
    """A storage came (+1) or went (-1), while `module` ran."""

    storage: int
    sign: int
    module: str


ATTENTION = "attention "  # before the dtype of operations that a fused kernel of attention does


@dataclass(frozen=True, slots=True)
class Worked:
    """One op: floating-point operations, and bytes read and written (`fused`: if elementwise ops are compiled).
    `layer`: "linear" or "experts", of products with their weights (and in backward, of those that stand for them)."""

    flops: int
    bytes: int
    dtype: str
    module: str
    layer: Literal["", "linear", "experts"] = ""
    fused: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """One collective over the ranks of `dim`: bytes that go in, and bytes that come out."""

    kind: str
    dim: str
    sent: int
    received: int
    module: str


@dataclass(frozen=True, slots=True)
class UnitEvent:
    """A unit of data parallelism is about to run, or has run: parameters come, go, or their gradients are summed."""

    unit: str
    when: Literal["before", "after"]
    phase: Phase


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a repeated stack begins or ends."""

    name: str
    when: Literal["before", "after"]
    phase: Phase


@dataclass(frozen=True, slots=True)
class Place:
    """A module outside of the stacks runs forward: memory is told for it apart."""

    name: str


# Recorded block -> those left out after it, and who stands for each
LeftOut = Mapping[str, tuple[tuple[str, str], ...]]
Item = Changed | Worked | Message | UnitEvent | Block | Place


@dataclass(frozen=True)
class Tape:
    """`items` in order. `end_of_forward`: how many of them are the forward's. `phases` follow from it. `kernels`: the
    libraries whose fused kernels were recorded in the place of their reference. `pairs`: the largest value forward with
    two dims of the sequence, by module."""

    storages: tuple[Storage, ...]
    items: tuple[Item, ...]
    end_of_forward: int
    kernels: tuple[str, ...] = ()
    pairs: Numbers = field(default_factory=dict)


KINDS = ("kept", "temporary", "gradient", "communication")


@dataclass(frozen=True)
class Stretch:
    """`net`: bytes that stay or go, by kind. `at`: bytes by kind at the highest moment, in `module`. `flops` by dtype,
    `layers`: those of them that products of linear layers and of experts take. `moved`: bytes that ops read and
    write, those of products too; `fused`: those of compiled ones. `sent`: number and bytes by (dim, kind). `lasts`: see
    `Storage`."""

    net: Numbers
    at: Numbers
    module: str
    flops: Numbers
    moved: float
    sent: Mapping[tuple[str, str], tuple[int, float]]
    layers: Numbers = field(default_factory=dict)
    lasts: float = 0.0
    fused: float = 0.0


Step = Stretch | UnitEvent | Block | Place


@dataclass(frozen=True)
class Program:
    """The steps in order; `end_of_forward`: how many of them are the forward's. `pairs`: see `Tape`."""

    steps: tuple[Step, ...]
    end_of_forward: int
    pairs: Numbers = field(default_factory=dict)


def program_of(tape: Tape) -> Program:
    sizes = np.array([storage.bytes for storage in tape.storages], dtype=np.int64)
    kinds = np.array([KINDS.index(storage.kind) for storage in tape.storages], dtype=np.int64)
    lasts = [storage.lasts for storage in tape.storages]
    forward = tuple(_steps(tape.items[: tape.end_of_forward], sizes, kinds, lasts))
    backward = tuple(_steps(tape.items[tape.end_of_forward :], sizes, kinds, lasts))
    return Program((*forward, *backward), len(forward), tape.pairs)


def _steps(items: Iterable[Item], sizes: np.ndarray, kinds: np.ndarray, lasts: list[int]) -> Iterator[Step]:
    """One stretch before each event and one at the end, empty or not: so recordings of two batches stay in step."""
    between: list[Item] = []
    for item in items:
        if isinstance(item, UnitEvent | Block | Place):
            yield _measured(between, sizes, kinds, lasts)
            yield item
            between = []
        else:
            between.append(item)
    yield _measured(between, sizes, kinds, lasts)


def _measured(items: list[Item], sizes: np.ndarray, kinds: np.ndarray, lasts: list[int]) -> Stretch:
    changes = [item for item in items if isinstance(item, Changed)]
    net, at, module = _memory(changes, sizes, kinds)
    flops: dict[str, float] = {}
    layers: dict[str, float] = {}
    moved = fused = 0.0
    sent: dict[tuple[str, str], tuple[int, float]] = {}
    for item in items:
        if isinstance(item, Worked):
            moved, fused = moved + item.bytes, fused + item.fused
            for totals, key in ((flops, item.dtype), (layers, item.layer)):
                if item.flops and key:
                    totals[key] = totals.get(key, 0) + item.flops
        elif isinstance(item, Message):
            number, size = sent.get((item.dim, item.kind), (0, 0.0))
            sent[item.dim, item.kind] = number + 1, size + max(item.sent, item.received)
    stay = sum(change.sign * lasts[change.storage] for change in changes)
    return Stretch(net, at, module, flops, moved, sent, layers, stay, fused)


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
    return Program(tuple(steps), one.end_of_forward, _line(one.pairs, two.pairs, batch - 1))


def _between(one: Stretch, two: Stretch, more: float) -> Stretch:
    sent = {}
    for key in two.sent:
        (number, size), (count, whole) = one.sent.get(key, (0, 0.0)), two.sent[key]
        sent[key] = round(number + more * (count - number)), size + more * (whole - size)
    numbers = (_line(getattr(one, name), getattr(two, name), more) for name in ("net", "at", "flops", "layers"))
    net, at, flops, layers = numbers
    first, last = ({name: getattr(each, name) for name in ("moved", "lasts", "fused")} for each in (one, two))
    plain = _line(first, last, more)
    return Stretch(net, at, two.module, flops, sent=sent, layers=layers, **plain)


def _line(one: Numbers, two: Numbers, more: float) -> Numbers:
    return {key: one.get(key, 0.0) + more * (two.get(key, 0.0) - one.get(key, 0.0)) for key in {*one, *two}}


def expanded(program: Program, stands_for: LeftOut) -> Iterator[tuple[Phase, tuple[Step, ...], str]]:
    """Yield the stretches of a whole step: phase, steps, block ("" outside). `stands_for`: blocks left out after each
    one."""
    forward, backward = program.steps[: program.end_of_forward], program.steps[program.end_of_forward :]
    halves: dict[Phase, tuple[Step, ...]] = {"forward": forward, "backward": backward}
    for phase, items in halves.items():
        spans = _with_what_lies_between(phase, _spans(items))
        recorded = {name: items[first:last] for name, first, last in spans}
        done = 0
        for name, first, last in spans:
            yield phase, items[done:first], ""
            run = [(name, recorded[name])]
            run += [(other, recorded[block]) for other, block in stands_for.get(name, ()) if block in recorded]
            for block, span in run if phase == "forward" else reversed(run):
                yield phase, span, block
            done = last
        yield phase, items[done:], ""


def without_blocks(program: Program, names: Collection[str]) -> Program:
    """The step of a model that lacks these recorded blocks. What the next one takes over from each is balanced."""
    halves: dict[Phase, list[Step]] = {"forward": [], "backward": []}
    for phase, steps, block in expanded(program, {}):
        stays = sum(step.net.get("temporary", 0.0) for step in steps if isinstance(step, Stretch))
        halves[phase] += [Stretch({"temporary": stays}, {}, "", {}, 0.0, {})] if block in names else steps
    return Program((*halves["forward"], *halves["backward"]), len(halves["forward"]), program.pairs)


def _with_what_lies_between(phase: Phase, spans: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Each block with what is done between it and the next one of its stack: inputs are let go there."""
    wider = []
    for place, (name, first, last) in enumerate(spans):
        other = place + (1 if phase == "forward" else -1)
        near = spans[other] if 0 <= other < len(spans) else None
        if near is not None and near[0].rpartition(".")[0] == name.rpartition(".")[0]:
            first, last = (first, near[1]) if phase == "forward" else (near[2], last)
        wider.append((name, first, last))
    return wider


def _spans(items: tuple[Step, ...]) -> list[tuple[str, int, int]]:
    """(block, first item, one after the last) of each run of a block; one that never ends lasts to the next, or all."""
    spans: list[tuple[str, int, int]] = []
    opened: tuple[str, int] | None = None
    for place, item in enumerate(items):
        if not isinstance(item, Block):
            continue
        if opened is not None and (item.when == "before" or item.name == opened[0]):
            spans.append((*opened, place))
            opened = None
        if item.when == "before":
            opened = (item.name, place)
    if opened is not None:
        spans.append((*opened, len(items)))
    return spans
