"""The plans that transformers ships, audited: one line each, and the sums by mapping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoplan.values.findings import Shipped

_COLOURS = {Shipped.EXACT: "green", Shipped.WRONG: "bold red", Shipped.CANNOT_RUN: "red"}
_TELLING = {"costlier": 0, "whole": 0.1, "dead": 0}  # what more than this counts: entries, share of bytes, keys
_WIDTH = 110


def wild_line(row: Mapping[str, Any]) -> str:
    """One architecture, for a log."""
    facts = [f"{row['mapping']} {row['model_type']}: {row['verdict']}"]
    if row["costlier"]:
        facts.append(f"{row['costlier']} entries costlier")
    if row["whole"]:
        facts.append(f"{row['whole']:.0%} of splittable bytes whole")
    if row["dead"]:
        facts.append(f"{row['dead']} dead keys")
    if row["errors"]:
        facts.append(f"errors of {', '.join(row['errors'])}")
    return "; ".join(facts) + f" ({row['seconds']:.1f} s)"


def wild_view(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Sums by mapping first, then every plan that is wrong or cannot run, with its proof, then all lines.

    Of the plans that run: `costlier` have an entry that holds or moves more than it must, `incomplete` leave more than
    a tenth of the bytes whole that can be split, `dead keys` have keys that match nothing.
    """
    parts: list[RenderableType] = [_sums(rows)]
    bad = [row for row in rows if Shipped(row["verdict"]).is_bad]
    if bad:
        parts += [Padding(Text("Wrong, or cannot run", "bold"), (1, 0, 0, 0)), _bad(bad)]
    parts += [Padding(Text("All", "bold"), (1, 0, 0, 0)), *(Text(wild_line(row)) for row in rows)]
    return Group(*parts)


def _sums(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("mapping", *Shipped, "costlier", "incomplete", "dead keys")
    for mapping in dict.fromkeys(row["mapping"] for row in rows):
        mine = [row for row in rows if row["mapping"] == mapping]
        counts = Counter(row["verdict"] for row in mine)
        ran = [row for row in mine if row["verdict"] in (Shipped.EXACT, Shipped.WRONG)]
        sums = [sum(row[field] > least for row in ran) for field, least in _TELLING.items()]
        table.add_row(mapping, *(str(counts[word]) for word in Shipped), *map(str, sums))
    return table


def _bad(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("model type", "verdict", "proof")
    for row in rows:
        proof = row["proof"] if len(row["proof"]) <= _WIDTH else f"{row['proof'][:_WIDTH]}…"
        table.add_row(f"{row['model_type']}", Text(row["verdict"], _COLOURS[row["verdict"]]), proof)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
