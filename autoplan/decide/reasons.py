"""Numbers in sentences: how many units a parameter is dealt out in, what a rank gets, and why."""

from __future__ import annotations

from autoplan.decide.naming import Naming
from autoplan.layout import Layout
from autoplan.values import ParameterFact

__all__ = ["reason_text", "units_text"]


def units_text(fact: ParameterFact, naming: Naming | None) -> str:
    """What is dealt out: "8 groups", "14336 features"; with what a unit holds, where it holds more than one row."""
    if fact.layout is None:
        return ""
    unit = naming.rule.unit if naming is not None else "unit"
    layout = Layout.parse(fact.layout)
    count = _dealt(layout)
    rows = layout.size // count if layout.size % count == 0 else 0
    return f"{_count(count, unit)}" + (f" × {rows}" if rows > 1 and layout.kind == "product" else "")


def reason_text(fact: ParameterFact, naming: Naming | None, tp: int) -> str:
    """One sentence: the units, what each rank gets, and for attention the heads that read them."""
    if fact.dim is None:
        return "every rank holds it whole and sees a part of its gradient: the parts are summed"
    assert fact.layout is not None
    layout = Layout.parse(fact.layout)
    count = _dealt(layout)
    share = len(Layout.parse(str(_first_dealt(layout))).rows(0, tp))
    unit = naming.rule.unit if naming is not None else "unit"
    heads = _heads(naming, count) if unit == "head" and naming is not None else 0
    if heads and count and heads % count == 0 and heads != count:
        per_rank = heads * share // count
        text = (
            f"{_count(heads, 'query head')} in {_count(count, 'group')}; "
            f"tp={tp} gives each rank {_count(per_rank, 'query head')} and {_count(share, 'key/value head')}"
        )
    elif count % tp and _even(layout):
        text = f"{_count(count, unit)}; tp={tp} gives the first ranks {share}, the last one the rest"
    else:
        text = f"{_count(count, unit)}; tp={tp} gives each rank {share}"
    held = _held_by_all(layout)
    if held:
        text += f"; {held} of its {layout.size} rows are held by every rank and their gradients summed"
    if layout.kind == "concatenation":
        text += f"; each of its {len(layout.parts)} segments is cut by itself"
    return text if naming is not None else f"a proven split that no rule names: {text}"


def _heads(naming: Naming, groups: int) -> int:
    """Query heads, from what the output contracts and how wide a value head is."""
    contracted, value = naming.sizes.get("output.in", 0), naming.sizes.get("value.out", 0)
    return contracted * groups // value if value and (contracted * groups) % value == 0 else 0


def _first_dealt(layout: Layout) -> Layout:
    if not layout.parts:
        return layout
    return next((_first_dealt(part) for part in layout.parts if part.is_split), layout)


def _dealt(layout: Layout) -> int:
    return _first_dealt(layout).size


def _even(layout: Layout) -> bool:
    return _first_dealt(layout).split == (0, 1)


def _held_by_all(layout: Layout) -> int:
    """Rows that are dealt out to nobody: in a concatenation beside rows that are."""
    flags = layout.carried(1) if layout.is_split else ()
    return sum(not flag for flag in flags)


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun[:-1] + 'ies' if noun.endswith('y') else noun + 's'}"
