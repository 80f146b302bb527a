"""What ranks do together at a module, as the drawing marks it: a sum of parts, a gather, forward or backward, in bytes.

Bytes are those of one token: of the value that moves, an all-reduce counted twice as everywhere. They are said where
the shapes that the plan holds tell them, and left out elsewhere; the table of messages has each block's sums.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from autoplan.common.patterns import matches
from autoplan.emit.words import bytes_text
from autoplan.values import Boundary, Collective, Entry, Instruction, Move, Plan

_WORDS = {
    Collective.ALL_REDUCE: "all-reduce",
    Collective.ALL_GATHER: "all-gather",
    Collective.REDUCE_SCATTER: "reduce-scatter",
}


@dataclass(frozen=True)
class Mark:
    """`before`: where the value enters, else where it leaves. `partial`: ranks hold parts of a sum until then."""

    text: str
    backward: bool
    before: bool
    partial: bool


def marks_at(plan: Plan, path: str, entries: tuple[Entry, ...]) -> tuple[Mark, ...]:
    """Of the module, once each."""
    found: dict[Mark, None] = {}
    for one in plan.runtime.instructions:
        if matches(one.pattern, path):
            before = isinstance(one, Boundary) and one.side == "input"
            for move in one.moves:
                found[_mark(one, move, before, output_bytes(plan, entries) if not before else 0)] = None
    return tuple(found)


def _mark(one: Instruction, move: Move, before: bool, size: int) -> Mark:
    twice = 2 if move.collective is Collective.ALL_REDUCE else 1
    known = size and not move.of.is_statistic and move.collective is not Collective.ALL_GATHER
    weight = f" · {bytes_text(size * twice)} a token" if known and not move.backward else ""
    what = _WORDS[move.collective]
    if move.backward:
        return Mark(f"gradient: {what}", True, before, move.sums)
    return Mark(f"{'sum of parts: ' if move.sums else ''}{what}{weight}", False, before, move.sums)


def output_bytes(plan: Plan, entries: tuple[Entry, ...]) -> int:
    """Bytes for a token of the sum that a module gives, where its matrix tells: 0 where not.

    A sum is as wide as the dim of the matrix that is not cut.
    """
    for entry in entries:
        for parameter, segment in zip(entry.parameters, entry.segments, strict=False):
            dim, _, _ = segment.partition(":")
            shape = _shape(plan, entry.pattern, parameter)
            if len(shape) in (2, 3) and "rowwise" in entry.style and dim in (str(len(shape) - 2), str(len(shape) - 1)):
                width = shape[2 * len(shape) - 3 - int(dim)]
                return width * _item_size(entry, plan, width)
    return 0


def _shape(plan: Plan, module: str, parameter: str) -> tuple[int, ...]:
    names = (f"{module}.{parameter}", module)
    shapes = [one.shapes for one in plan.made_for.sizes if one.pattern in names]
    return shapes[0][0] if len(shapes) == 1 and len(shapes[0]) == 1 else ()


def _item_size(entry: Entry, plan: Plan, width: int) -> int:
    """Of a number of the weight: all bytes of the entry by how many numbers there are; 0 where unclear. A parameter
    without a shape is whole: a bias, as wide as the output."""
    owner, _, name = entry.pattern.rpartition(".")
    module = owner if entry.parameters == (name,) else entry.pattern
    modules = sum(
        part.blocks
        for part in plan.flow
        for step in part.steps
        if matches(module, ".".join(filter(None, (part.block, step)))) and "*" not in step
    )
    shapes = [_shape(plan, entry.pattern, parameter) for parameter in entry.parameters]
    numbers = modules * sum(prod(shape) if shape else width for shape in shapes)
    size, rest = divmod(entry.bytes, numbers or 1)
    return size if not rest and size in (1, 2, 4, 8) else 0
