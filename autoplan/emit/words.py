"""Numbers and layouts in words."""

from __future__ import annotations

from collections.abc import Sequence

from autoplan.common.errors import AutoplanError
from autoplan.common.layout import Layout

LEVELS = ("error", "warn", "note")  # of findings, the gravest first
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MOST_RUNS = 4  # that are listed


def bytes_text(size: int) -> str:
    """
    >>> bytes_text(8192), bytes_text(100), bytes_text(1_050_673_152)
    ('8.0 KiB', '100 B', '1002.0 MiB')
    """
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{size} B"


def count(number: int, noun: str) -> str:
    """
    >>> count(1, "rank"), count(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def few(names: Sequence[str]) -> str:
    """The first three, as text."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def ranges_text(runs: Sequence[range]) -> str:
    """
    >>> ranges_text([range(3), range(8, 10), range(12, 13)])
    '0–2, 8–9, 12'
    """
    shown = [f"{run[0]}–{run[-1]}" if len(run) > 1 else "".join(map(str, run)) for run in runs[:_MOST_RUNS]]
    return ", ".join(shown) + (f", … ({len(runs)} runs)" if len(runs) > _MOST_RUNS else "")


def layout_text(text: str, tp_size: int) -> str:
    """Return what a rank holds of a dimension, factor by factor and in total, and the indices of rank 0.

    >>> layout_text("32!*128", 8)
    'each of 8 ranks holds 4 of 32 × 128 = 512 of 4096; rank 0: 0–511'
    >>> layout_text("16!|1", 8)
    'each of 8 ranks holds 2 of 16 | all 1 = 3 of 17; rank 0: 0–1, 16'
    """
    layout = Layout.parse(text)
    where = ranges_text(layout.runs(0, tp_size))
    if not layout.is_split:
        return f"replicated on each of {count(tp_size, 'rank')}"
    if layout.is_uneven:
        sizes = [layout.held(rank, tp_size) for rank in range(tp_size)]
        return f"between blocks: ranks hold {min(sizes)} to {max(sizes)} of {layout.size}; rank 0: {where}"
    shard, total = _shard(layout, tp_size), f"{layout.held(0, tp_size)} of {layout.size}"
    equation = shard if shard == total else f"{shard} = {total}"
    return f"each of {count(tp_size, 'rank')} holds {equation}; rank 0: {where}"


def segment_text(segment: str, tp_size: int) -> str:
    """Return an entry's "dim:layout" in words; text in any other notation is unchanged.

    >>> segment_text("1:8!", 2)
    'dim 1: each of 2 ranks holds 4 of 8; rank 0: 0–3'
    """
    dim, _, layout = segment.partition(":")
    try:
        return f"dim {int(dim)}: {layout_text(layout, tp_size)}"
    except (AutoplanError, ValueError):
        return segment


def _shard(layout: Layout, tp_size: int) -> str:
    if not layout.is_split:
        return _sizes(layout)
    if layout.kind == "concatenation":
        return " | ".join(_shard(part, tp_size) if part.is_split else f"all {_sizes(part)}" for part in layout.parts)
    if layout.kind == "product":
        shards = [(_shard(part, tp_size), part.kind == "concatenation") for part in layout.parts]
        return " × ".join(f"({shard})" if inner else shard for shard, inner in shards)
    return f"{layout.held(0, tp_size)} of {layout.size}"


def _sizes(layout: Layout) -> str:
    join = " | " if layout.kind == "concatenation" else " × "
    return join.join(_sizes(part) for part in layout.parts) if layout.parts else str(layout.size)
