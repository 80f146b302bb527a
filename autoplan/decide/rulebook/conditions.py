"""Guards of rules: facts about dims, as one line each, with a sentence when they do not hold.

    split(gate.out)            is sharded over ranks              whole(a.out)         is not
    packed(qkv.out)            is runs one after the other, each of them sharded by itself
    mixed(qkv.out)             some of it is sharded, some held by every rank
    gate.out == down.in        one size and one axis class; `!=` the opposite
    2 * down.in == pack.out    sizes only, when a number is involved; also <, >
    shares(key.out, out.in)    have an axis class in common
    tied(head, table)          read one parameter
    bare(n)                    reads no parameter
    gathered(a)                its output is gathered from all ranks
    not …                      any of them, refused

There is no other code in a rule: a guard says what must be true, never how to find out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autoplan.analyse.picture.flow import Dim, Node
from autoplan.common.errors import AutoplanError
from autoplan.common.layout import Layout

_CALL = re.compile(r"(\w+)\(([^)]*)\)")
_COMPARISON = re.compile(r"(.+?)\s*(==|!=|<|>)\s*(.+)")
_TERM = re.compile(r"(?:(\d+)\s*\*\s*)?(\w+)\.(\w+)|(\d+)")

Boxes = Mapping[str, Node]


@dataclass(frozen=True)
class Condition:
    """A parsed guard. `check` returns "" if it holds, else a sentence that says why not."""

    text: str
    names: frozenset[str] = frozenset()  # the boxes it mentions

    def check(self, boxes: Boxes, tp: int | None) -> str:
        text, wanted = (self.text[4:], False) if self.text.startswith("not ") else (self.text, True)
        problem = _check(text.strip(), boxes, tp)
        if wanted:
            return problem
        return "" if problem else f"{text.strip()} holds"


def parse_condition(text: str, names: tuple[str, ...]) -> Condition:
    """Parse a guard, and check that it mentions only boxes that the pattern names."""
    bare = text.removeprefix("not ").strip()
    call = _CALL.fullmatch(bare)
    if call:
        if call[1] not in _FACTS:
            facts = ", ".join(sorted(_FACTS))
            raise AutoplanError(f"{call[1]!r} is not a fact, in {text!r}", hint=f"facts are {facts}")
        used = [argument.strip().partition(".")[0] for argument in call[2].split(",")]
    else:
        comparison = _COMPARISON.fullmatch(bare)
        terms = [_TERM.fullmatch(side.strip()) for side in (comparison[1], comparison[3])] if comparison else []
        if not terms or None in terms:
            forms = "split(a.out), shares(a.out, b.in), a.out == b.in"
            raise AutoplanError(f"{text!r} is not a guard", hint=f"write {forms}")
        used = [term[2] for term in terms if term is not None and term[2]]
    for name in used:
        if name not in names:
            raise AutoplanError(f"{name!r} in {text!r} is not a box of the flow ({', '.join(names)})")
    return Condition(text, frozenset(used))


def _check(text: str, boxes: Boxes, tp: int | None) -> str:
    call = _CALL.fullmatch(text)
    if call:
        return _FACTS[call[1]]([argument.strip() for argument in call[2].split(",")], boxes, tp)
    comparison = _COMPARISON.fullmatch(text)
    assert comparison is not None
    left, sign, right = comparison[1].strip(), comparison[2], comparison[3].strip()
    sizes = _size(left, boxes), _size(right, boxes)
    plain = all("*" not in side and not side.isdigit() for side in (left, right))
    classes = [_dim(side, boxes).classes for side in (left, right)] if plain and sign != "!=" else [frozenset()]
    equal = sizes[0] == sizes[1] and (not all(classes) or bool(classes[0] & classes[1]))
    holds = {"==": equal, "!=": not equal, "<": sizes[0] < sizes[1], ">": sizes[0] > sizes[1]}[sign]
    if holds:
        return ""
    if sizes[0] == sizes[1] and sign == "==":
        return f"{left} and {right} are both {sizes[0]}, but different axes"
    verb = {"==": "is not", "!=": "is", "<": "is not less than", ">": "is not more than"}[sign]
    return f"{_named(left, sizes[0])} {verb} {_named(right, sizes[1])}"


def _named(side: str, size: int) -> str:
    return side if side.isdigit() else f"{side} = {size}"


def _dim(text: str, boxes: Boxes) -> Dim:
    name, _, field = text.partition(".")
    dim = boxes[name].dim(field)
    return dim if dim is not None else Dim(0)


def _size(text: str, boxes: Boxes) -> int:
    term = _TERM.fullmatch(text)
    assert term is not None
    return int(term[4]) if term[4] else int(term[1] or 1) * _dim(f"{term[2]}.{term[3]}", boxes).size


# Facts


def _split(arguments: list[str], boxes: Boxes, tp: int | None) -> str:
    dim = _dim(arguments[0], boxes)
    if dim.layout is None:
        return f"{arguments[0]} = {dim.size} is not split"
    uneven = _uneven(Layout.parse(dim.layout), tp)
    return f"{arguments[0]} = {uneven} is not divisible by tp = {tp}" if uneven else ""


def _uneven(layout: Layout, tp: int | None) -> int:
    """Return the first factor that is not divisible by tp; 0 if there is none, or if analysis has settled it."""
    if tp is None:
        return 0
    if layout.parts:
        return next((size for size in (_uneven(part, tp) for part in layout.parts) if size), 0)
    return layout.size if layout.split == (0, 1) and layout.size % tp else 0


def _whole(arguments: list[str], boxes: Boxes, tp: int | None) -> str:
    dim = _dim(arguments[0], boxes)
    return "" if dim.layout is None else f"{arguments[0]} = {dim.layout} is split"


def _packed(arguments: list[str], boxes: Boxes, tp: int | None) -> str:
    dim = _dim(arguments[0], boxes)
    layout = Layout.parse(dim.layout) if dim.layout is not None else None
    runs = layout is not None and (
        layout.kind == "concatenation" or (layout.kind == "product" and not layout.parts[0].is_split)
    )
    return "" if runs else f"{arguments[0]} = {dim.layout or dim.size} is not packed in segments"


def _mixed(arguments: list[str], boxes: Boxes, tp: int | None) -> str:
    dim = _dim(arguments[0], boxes)
    layout = Layout.parse(dim.layout) if dim.layout is not None else None
    some = layout is not None and layout.is_split and not layout.all_carried()
    return "" if some else f"{arguments[0]} = {dim.layout or dim.size} is not partly split"


def _shares(arguments: list[str], boxes: Boxes, tp: int | None) -> str:
    left, right = (_dim(argument, boxes) for argument in arguments)
    if left.classes & right.classes:
        return ""
    return f"{arguments[0]} = {left.size} and {arguments[1]} = {right.size} have no axis in common"


def _tied(arguments: list[str], boxes: Boxes, tp: int | None) -> str:
    first, second = (set(boxes[name].parameters[:1]) for name in arguments)
    return "" if first & second else f"{arguments[0]} and {arguments[1]} do not read one parameter"


_FACTS: dict[str, Callable[[list[str], Boxes, int | None], str]] = {
    "split": _split,
    "whole": _whole,
    "packed": _packed,
    "mixed": _mixed,
    "shares": _shares,
    "tied": _tied,
    "bare": lambda names, boxes, tp: f"{names[0]} reads a parameter" if boxes[names[0]].parameters else "",
    "gathered": lambda names, boxes, tp: (
        "" if boxes[names[0]].gathered else f"the output of {names[0]} is not gathered"
    ),
}
