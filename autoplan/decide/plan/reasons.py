"""Numbers in sentences: how many units a parameter is sharded in, what a rank gets, and why; or why it is whole."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from autoplan.common.layout import Layout
from autoplan.decide.matching.naming import Naming
from autoplan.values import ParameterFact
from autoplan.values.reasons import CutOfRecurrent, Reason, sentence

__all__ = ["reason_text", "units_text", "whole_text"]


_OF_HEADS = "feature of each head"
_PLURALS = {_OF_HEADS: "features of each head"}


def units_text(fact: ParameterFact, naming: Naming | None) -> tuple[str, str]:
    """What is sharded: "14336 features"; where a unit holds several rows with these, "8 groups × 16", and without."""
    if fact.layout is None:
        return "", ""
    layout = Layout.parse(fact.layout)
    units = _first_sharded(layout).size
    rows = layout.size // units if layout.size % units == 0 and layout.kind == "product" else 1
    unit = "group" if naming is not None and naming.unit == "head" and _heads(naming, units) > units else None
    unit = _unit_of_gates(layout) if isinstance(fact.how, CutOfRecurrent) else unit
    counted = _count(units, unit or _unit(naming, layout))
    return (f"{counted} × {rows}", counted) if rows > 1 else (counted, "")


def reason_text(fact: ParameterFact, naming: Naming | None, tp: int) -> str:
    """One sentence: the units, what each rank gets, and for attention the heads that read them."""
    if fact.dim is None:
        return "every rank holds it whole and sees a part of its gradient: the parts are summed"
    assert fact.layout is not None
    layout = Layout.parse(fact.layout)
    unit = _unit_of_gates(layout) if isinstance(fact.how, CutOfRecurrent) else _unit(naming, layout)
    parts = [_heads_text(layout, naming, tp) or _shards_text(layout, unit, tp)]
    held = _held_by_all(layout)
    if held:
        parts.append(f"{held} of its {layout.size} rows are held by every rank, their gradients summed")
    if layout.kind == "concatenation":
        parts.append(f"each of its {len(layout.parts)} segments is cut by itself")
    if fact.how is not None:
        return "; ".join([*parts, str(fact.how)])
    text = "; ".join(parts)
    return text if naming is not None else f"a proven split that no rule names: {text}"


def whole_text(said: Iterable[tuple[str, tuple[Reason, ...]]]) -> str:
    """Why parameters of like blocks are whole, each with its role: once, where blocks agree."""
    return " / ".join(dict.fromkeys((f"{role}: " if role else "") + sentence(why) for role, why in said))


def _shards_text(layout: Layout, unit: str, tp: int) -> str:
    first = _first_sharded(layout)
    counts = [Layout.parse(str(first)).held(rank, tp) for rank in range(tp)]
    if first.split != (0, 1):
        pieces = first.split[0] if first.split else 1
        return f"{_count(first.size, unit)} in {pieces} pieces over {tp} ranks; a rank holds {counts[0]}"
    if len(set(counts)) == 1:
        return f"{_count(first.size, unit)}; {'ep' if unit == 'expert' else 'tp'}={tp} gives each rank {counts[0]}"
    return f"{_count(first.size, unit)}; tp={tp} gives the first rank {counts[0]} and the last {counts[-1]}"


def _heads_text(layout: Layout, naming: Naming | None, tp: int) -> str:
    """Where several query heads read one key/value head, say both."""
    groups = _first_sharded(layout)
    if naming is None or naming.unit != "head" or groups.split != (0, 1) or groups.size % tp:
        return ""
    heads = _heads(naming, groups.size)
    if heads <= groups.size or heads % groups.size:
        return ""
    held = groups.size // tp
    return (
        f"{_count(heads, 'query head')} in {_count(groups.size, 'group')}; tp={tp} gives each rank "
        f"{_count(heads // groups.size * held, 'query head')} and {_count(held, 'key/value head')}"
    )


def _unit(naming: Naming | None, layout: Layout) -> str:
    """What is sharded. Where it is the last factor of several, it is features of every head, not heads."""
    if naming is None:
        return "unit"
    return _OF_HEADS if naming.unit == "head" and _is_minor(layout) else naming.unit


def _unit_of_gates(layout: Layout) -> str:
    """Of recurrent weights: a rank has all gates of its hidden units, or some rows."""
    return "hidden unit" if layout.kind == "product" else "row"


def _is_minor(layout: Layout) -> bool:
    """Is the factor that is sharded the last of a product whose earlier factors are not, in all segments?"""
    if layout.kind == "concatenation":
        return all(_is_minor(part) for part in layout.parts if part.is_split)
    last = layout.parts[-1] if layout.kind == "product" else layout
    return last is not layout and last.is_split and not any(part.is_split for part in layout.parts[:-1])


def _held_by_all(layout: Layout) -> int:
    """Rows that every rank holds."""
    if not layout.parts:
        return 0 if layout.is_split else layout.size
    held = [_held_by_all(part) for part in layout.parts]
    return prod(held) if layout.kind == "product" else sum(held)


def _heads(naming: Naming, groups: int) -> int:
    """Query heads, from what the output contracts and how wide a value head is."""
    contracted, value = naming.sizes.get("output.in", 0), naming.sizes.get("value.out", 0)
    return contracted * groups // value if value and (contracted * groups) % value == 0 else 0


def _first_sharded(layout: Layout) -> Layout:
    if not layout.parts:
        return layout
    return next((_first_sharded(part) for part in layout.parts if part.is_split), layout)


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {_PLURALS.get(noun, f'{noun}s')}"
