"""What one step of a model did with memory and messages, in the order in which it did it.

The recorded model holds few blocks of each kind. A tape knows where each block begins and ends, forward and backward,
so the steps of a block that was left out are those of the block that stands for it, at its own place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["Block", "Changed", "LeftOut", "Message", "Storage", "Tape", "UnitEvent", "Worked", "expanded"]

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Storage:
    """One piece of memory. `gradient`: of a parameter; `kept`: made forward and freed later than its forward."""

    bytes: int
    kind: Literal["kept", "temporary", "gradient", "communication"]


@dataclass(frozen=True, slots=True)
class Changed:
    """A storage came (+1) or went (-1), while `module` ran."""

    storage: int
    sign: int
    module: str


@dataclass(frozen=True, slots=True)
class Worked:
    """One op: floating-point operations, and bytes read and written."""

    flops: int
    bytes: int
    dtype: str
    module: str


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


LeftOut = Mapping[
    str, tuple[tuple[str, str], ...]
]  # recorded block -> those left out after it, and who stands for each
Item = Changed | Worked | Message | UnitEvent | Block


@dataclass(frozen=True)
class Tape:
    """`items` in order. `end_of_forward`: how many of them are the forward's. `phases` follow from it."""

    storages: tuple[Storage, ...]
    items: tuple[Item, ...]
    end_of_forward: int


def expanded(tape: Tape, stands_for: LeftOut) -> Iterator[tuple[Phase, tuple[Item, ...], str]]:
    """The stretches of a whole step, in order: phase, items, and which block they are said of ("" outside of blocks).

    `stands_for`: the blocks that were left out after each recorded one, in the order of the forward.
    """
    for phase, items in (
        ("forward", tape.items[: tape.end_of_forward]),
        ("backward", tape.items[tape.end_of_forward :]),
    ):
        yield from _expanded(phase, items, stands_for)  # type: ignore[arg-type]


def _expanded(
    phase: Phase, items: tuple[Item, ...], stands_for: LeftOut
) -> Iterator[tuple[Phase, tuple[Item, ...], str]]:
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


def _with_what_lies_between(phase: Phase, spans: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Each block with what is done between it and the next one of its stack: inputs are let go there."""
    found = []
    for place, (name, first, last) in enumerate(spans):
        other = place + (1 if phase == "forward" else -1)
        near = spans[other] if 0 <= other < len(spans) else None
        if near is not None and near[0].rpartition(".")[0] == name.rpartition(".")[0]:
            first, last = (first, near[1]) if phase == "forward" else (near[2], last)
        found.append((name, first, last))
    return found


def _spans(items: tuple[Item, ...]) -> list[tuple[str, int, int]]:
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
