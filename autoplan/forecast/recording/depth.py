"""A step at full depth: blocks that were not recorded do what those do that stand for them, at their own place."""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.forecast.recording.program import Program, Step
from autoplan.forecast.recording.tape import Block, LeftOut, Phase


def expanded(program: Program, stands_for: LeftOut) -> Iterator[tuple[Phase, tuple[Step, ...], str]]:
    """The stretches of a whole step, in order: phase, steps, and which block they are said of ("" outside of blocks).

    `stands_for`: the blocks that were left out after each recorded one, in the order of the forward.
    """
    for phase, items in (
        ("forward", program.steps[: program.end_of_forward]),
        ("backward", program.steps[program.end_of_forward :]),
    ):
        yield from _expanded(phase, items, stands_for)  # type: ignore[arg-type]


def _expanded(
    phase: Phase, items: tuple[Step, ...], stands_for: LeftOut
) -> Iterator[tuple[Phase, tuple[Step, ...], str]]:
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
