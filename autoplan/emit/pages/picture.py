"""The content of a model's drawing: boxes in the order in which data flows, before anything has a position.

    Scene ── Block (one of a kind, ×N) ── BoxRow (branches that read one value, side by side) ── Box (a module)
                                            └── Mark (a collective before or after, in bytes for one token)

Plan files without `flow` are drawn in the order of their entries.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from autoplan.common.patterns import is_under, matches
from autoplan.emit.words import bytes_text
from autoplan.values import Boundary, Collective, Entry, Finding, FlowPart, Move, Plan

_WORDS = {
    Collective.ALL_REDUCE: "all-reduce",
    Collective.ALL_GATHER: "all-gather",
    Collective.REDUCE_SCATTER: "reduce-scatter",
    Collective.ALL_TO_ALL: "all-to-all",
}


@dataclass(frozen=True)
class Mark:
    """A collective at a module, where a value enters (`before`) or leaves. `partial`: the value is partial until
    then."""

    text: str
    backward: bool
    before: bool
    partial: bool


def marks_at(plan: Plan, path: str, entries: tuple[Entry, ...]) -> tuple[Mark, ...]:
    """Return the marks of a module, once each."""
    marks: dict[Mark, None] = {}
    for instruction in plan.runtime.instructions:
        if matches(instruction.pattern, path):
            before = isinstance(instruction, Boundary) and instruction.side == "input"
            for move in instruction.moves:
                marks[_mark(move, before, output_bytes(plan, entries) if not before else 0)] = None
    return tuple(marks)


def _mark(move: Move, before: bool, size: int) -> Mark:
    twice = 2 if move.collective is Collective.ALL_REDUCE else 1
    sized = size and not move.of.is_statistic and move.collective is not Collective.ALL_GATHER
    weight = f" · {bytes_text(size * twice)} per token" if sized and not move.backward else ""
    collective = _WORDS[move.collective]
    if move.backward:
        return Mark(f"gradient: {collective}", True, before, move.sums)
    return Mark(f"{'sum of parts: ' if move.sums else ''}{collective}{weight}", False, before, move.sums)


def output_bytes(plan: Plan, entries: tuple[Entry, ...]) -> int:
    """Return the bytes per token of a module's sum, as wide as the uncut dim of its matrix; 0 if unknown."""
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
    shapes = [sizes.shapes for sizes in plan.made_for.sizes if sizes.pattern in names]
    return shapes[0][0] if len(shapes) == 1 and len(shapes[0]) == 1 else ()


def _item_size(entry: Entry, plan: Plan, width: int) -> int:
    """Return the bytes of an element of the weight; 0 if unclear. Without a shape it is a bias of that width."""
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


@dataclass(frozen=True)
class Axis:
    """An axis that is cut, with the letter and the colour that identify it on the page."""

    number: int
    letter: str
    units: str


@dataclass(frozen=True)
class Box:
    """A module: name, path, lines, link and findings. `gives`: its output is "cut", "partial", or replicated ("")."""

    name: str
    path: str
    lines: tuple[str, ...]
    axis: Axis | None = None
    link: str = ""
    findings: tuple[int, ...] = ()
    gives: str = ""
    tone: str = ""


@dataclass(frozen=True)
class BoxRow:
    """Columns side by side; in each, a box feeds the one below it. `parent`: the module that holds them."""

    parent: str
    columns: tuple[tuple[Box, ...], ...]
    marks: tuple[Mark, ...] = ()

    @property
    def boxes(self) -> tuple[Box, ...]:
        return tuple(box for column in self.columns for box in column)


@dataclass(frozen=True)
class Block:
    title: str
    times: int
    rows: tuple[BoxRow, ...]


@dataclass(frozen=True)
class Scene:
    blocks: tuple[Block, ...]
    axes: tuple[Axis, ...]


def axes_of(entries: Iterable[Entry]) -> dict[str, Axis]:
    """Return the axis of each entry by its pattern; entries that are cut together share one."""
    by_key: dict[object, Axis] = {}
    axes = {}
    for entry in entries:
        if not any(":" in segment for segment in entry.segments):
            continue
        units = entry.counted or entry.units
        key: object = entry.axes or (entry.pattern.rpartition(".")[0], units)
        axis = by_key.setdefault(key, Axis(len(by_key), _letter(len(by_key)), units))
        axes[entry.pattern] = axis
    return axes


def _letter(number: int) -> str:
    """Return A … Z, AA, AB …"""
    return ("" if number < 26 else _letter(number // 26 - 1)) + chr(ord("A") + number % 26)


def flow_parts(plan: Plan) -> tuple[FlowPart, ...]:
    """Return the plan's own flow, or for older plan files one made from its entries in order."""
    if plan.flow:
        return plan.flow
    blocks = {f"{stack.name}.*": len(stack.fqns) for stack in plan.layers}
    patterns: dict[str, list[str]] = {}
    for pattern in (entry.pattern for entry in plan.entries):
        block = next((block for block in blocks if is_under(block, pattern)), "")
        patterns.setdefault(block or f"\0{pattern if patterns else ''}", []).append(pattern)
    return tuple(
        FlowPart("", 1, tuple(steps))
        if block.startswith("\0")
        else FlowPart(block, blocks[block], tuple(step[len(block) + 1 :] for step in steps))
        for block, steps in patterns.items()
    )


def scene_of(plan: Plan, links: dict[str, str], findings: Sequence[Finding] = ()) -> Scene:
    """Return the scene of a plan. `links`: the link of a pattern of the plan, or of a replicated parameter."""
    axes = axes_of(plan.entries)
    boxes = _Boxes(plan, axes, links, findings)
    blocks = tuple(
        Block(part.block or "outside blocks", part.blocks, tuple(boxes.rows(part))) for part in flow_parts(plan)
    )
    return Scene(blocks, tuple(dict.fromkeys(axes.values())))


def branches(part: FlowPart) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield rows of (parent, columns): readers of one value side by side, and under each step its only reader.

    >>> part = FlowPart("", 1, ("a.q", "a.q_norm", "a.k", "a.v", "a.o"), ((-1,), (0,), (-1,), (-1,), (1, 2, 3)))
    >>> list(branches(part))
    [('a', [['a.q', 'a.q_norm'], ['a.k'], ['a.v']]), ('a', [['a.o']])]

    A module that has weights of its own beside its modules stands among these:

    >>> list(branches(FlowPart("", 1, ("a.q", "a", "a.o"))))
    [('a', [['a.q']]), ('a', [['a']]), ('a', [['a.o']])]
    """
    parents = {step.rpartition(".")[0] for step in part.steps}
    reads = part.reads or tuple((number - 1,) for number in range(len(part.steps)))
    readers = Counter(fed for feeds in reads for fed in feeds)
    rows: list[tuple[str, list[list[int]]]] = []
    for number, step in enumerate(part.steps):
        parent = step if step in parents else step.rpartition(".")[0]
        columns = rows[-1][1] if rows and rows[-1][0] == parent else []
        above = next((column for column in columns if reads[number] == (column[-1],)), None)
        if above is not None and readers[above[-1]] == 1:
            above.append(number)
        elif columns and reads[number] == reads[columns[0][0]]:
            columns.append([number])
        else:
            rows.append((parent, [[number]]))
    for parent, columns in rows:
        alone = [[[number]] for number in columns[0]] if len(columns) == 1 else [columns]
        yield from ((parent, [[part.steps[n] for n in column] for column in some]) for some in alone)


class _Boxes:
    """The boxes of one plan."""

    def __init__(self, plan: Plan, axes: dict[str, Axis], links: dict[str, str], findings: Sequence[Finding]) -> None:
        self.plan, self.axes, self.links, self.findings = plan, axes, links, findings

    def rows(self, part: FlowPart) -> Iterator[BoxRow]:
        """Yield rows with the collectives before and after them; a collective inside a column is a line of a box."""
        for parent, columns in branches(part if part.reads else replace(part, reads=self._guessed(part))):
            marks: list[Mark] = []
            boxes = tuple(tuple(self._placed(part, step, column, marks) for step in column) for column in columns)
            yield BoxRow(parent, boxes, tuple(dict.fromkeys(marks)))

    def _placed(self, part: FlowPart, step: str, column: list[str], marks: list[Mark]) -> Box:
        path = ".".join(filter(None, (part.block, step)))
        entries = self._entries(path)
        box = self._box(step.rpartition(".")[2] or path, path, entries)
        for mark in dict.fromkeys((*marks_at(self.plan, path, entries), *self._around(part, step))):
            if column[0 if mark.before else -1] == step:
                marks.append(mark)
            else:
                box = replace(box, lines=(*box.lines, mark.text))
        return box

    def _guessed(self, part: FlowPart) -> tuple[tuple[int, ...], ...]:
        """Return reads for older plan files: a step reads those before it, unless it shares a sum with one of them."""
        reads: list[tuple[int, ...]] = []
        row: list[int] = []
        shared: set[str] = set()
        for number, step in enumerate(part.steps):
            parent, _, leaf = step.rpartition(".")
            if row and leaf in shared and part.steps[row[0]].rpartition(".")[0] == parent:
                reads.append(reads[row[0]])
            else:
                reads.append(tuple(row) or (-1,))
                row, shared = [], set()
            row.append(number)
            entries = self._entries(".".join(filter(None, (part.block, step))))
            shared |= {name for entry in entries for cost in entry.reduces for name in cost.shared_with}
        return tuple(reads)

    def _around(self, part: FlowPart, step: str) -> Iterator[Mark]:
        """Yield the marks of a module around a step, which has no box of its own, where it is entered or left."""
        around = step.rpartition(".")[0]
        while around or part.block:
            inside = [other for other in part.steps if not around or other.startswith(f"{around}.")]
            if around not in part.steps:
                path = ".".join(filter(None, (part.block, around)))
                ends = {True: inside[0], False: inside[-1]}
                entries = self._entries(".".join(filter(None, (part.block, step))))
                yield from (mark for mark in marks_at(self.plan, path, entries) if ends[mark.before] == step)
            if not around:
                return
            around = around.rpartition(".")[0]

    def _entries(self, path: str) -> tuple[Entry, ...]:
        """Return the entries of the module itself, or of single parameters of it."""
        own = [entry for entry in self.plan.entries if matches(entry.pattern, path)]
        below = [entry for entry in self.plan.entries if entry.pattern.count(".") == path.count(".") + 1]
        return tuple(own or (entry for entry in below if is_under(entry.pattern.rpartition(".")[0], path)))

    def _box(self, name: str, path: str, entries: tuple[Entry, ...]) -> Box:
        numbers = findings_about(self.findings, path)
        if entries:
            axis = next((self.axes[entry.pattern] for entry in entries if entry.pattern in self.axes), None)
            lines = [line for entry in entries for line in (entry.role, f"{entry.style} · {entry.units}".strip(" ·"))]
            link = next((self.links[e.pattern] for e in entries if e.pattern in self.links), "")
            return Box(name, path, tuple(dict.fromkeys(filter(None, lines))), axis, link, numbers, _gives(entries))
        whole = [item for item in self.plan.replicated if matches(item.fqn.rpartition(".")[0], path)]
        size = bytes_text(sum(item.bytes for item in whole)) if whole else ""
        link = next((self.links[item.fqn] for item in whole if item.fqn in self.links), "")
        return Box(name, path, (f"replicated · {size} total" if size else "whole",), None, link, numbers)


def findings_about(findings: Sequence[Finding], path: str) -> tuple[int, ...]:
    """Return the numbers of the findings that are about a module."""
    return tuple(n for n, finding in enumerate(findings, 1) if any(is_about(a, path) for a in finding.about))


def is_about(pattern: str, path: str) -> bool:
    """Return whether a pattern names a module or a parameter of it."""
    return bool(pattern) and (matches(pattern, path) or matches(pattern.rpartition(".")[0], path))


def _gives(entries: tuple[Entry, ...]) -> str:
    styles = {entry.style for entry in entries}
    if any("rowwise" in style and not style.startswith("embedding") for style in styles):
        return "partial"
    # What "local" code and norms over a sharded width compute is sharded as their weights are
    cut = any("colwise" in style or style in ("local", "distributed_norm") for style in styles)
    return "cut" if cut else ""
