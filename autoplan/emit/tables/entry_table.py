"""The table of a plan's entries, grouped by parent. A narrow terminal omits the cut and the role, which `explain` and
`--json` have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from autoplan.common.patterns import grouped
from autoplan.values import Cost, Entry, Traffic

_GAP = 2
_WIDE = 110
_LONG_PATH = 28
_LEAST = 10  # the narrowest that a column becomes
_STYLES = {"module": "cyan", "cut": "dim"}
_HEADINGS = {"sums": "sums over ranks"}
_LEGEND = "cut is dim:layout; ! is sharded over the ranks, * multiplies, | separates independently sharded segments"

Cells = dict[str, str]


class EntryTable:
    """A rich renderable of entries; its columns depend on the available width."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _WIDE
        columns = ["module", "style"] + ["role"] * wide + ["units"] + ["cut"] * wide + ["sums"]
        # Source and proof only if entries differ in them, else the headline has them
        columns += [name for name in ("source", "proof") if len({getattr(e, name) for e in self.entries}) > 1]
        groups = [(parent, _rows(members, parent)) for parent, members in _groups(self.entries)]
        widths = _widths(columns, [row for _, rows in groups for row in rows], options.max_width)
        yield _grid(columns, widths, [{column: _HEADINGS.get(column, column) for column in columns}], header=True)
        for parent, rows in groups:
            if parent:
                yield Text(parent, _STYLES["module"], no_wrap=False, overflow="fold")
            yield _grid(columns, widths, rows)
        if wide:
            yield Text(_LEGEND, "dim")


def _groups(entries: Iterable[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    """Yield neighbours under their common parent; a single module keeps its path if that is short."""
    for parent, members in groupby(entries, key=lambda entry: entry.pattern.rpartition(".")[0]):
        group = list(members)
        alone = len(group) == 1 and len(group[0].pattern) <= _LONG_PATH
        yield ("" if alone else parent), group


def _rows(members: Iterable[Entry], parent: str) -> list[Cells]:
    rows: list[Cells] = []
    above: list[str] = []
    for entry in members:
        leaf = entry.pattern.removeprefix(f"{parent}.") if parent else entry.pattern or "(root)"
        row = {name: getattr(entry, name) for name in ("style", "role", "units", "source", "proof")}
        row["module"], row["cut"] = f"  {leaf}" if parent else leaf, _cut(entry)
        row["sums"] = "\n".join(dict.fromkeys(_sum(cost, above) for cost in entry.reduces))
        rows.append(row)
        above.append(leaf)
    return rows


def _sum(cost: Cost, above: Sequence[str]) -> str:
    """Return a cost without "sum", as the column says it; a shared one is listed at the first module that shares it."""
    sharers = [other for other in cost.shared_with if other in above]
    if sharers:
        return f"shared with {sharers[0]}"
    return cost.what if cost.does == "sum" and cost.of != "call" else cost.done


def _cut(entry: Entry) -> str:
    """Return one line if all parameters are cut alike, else one for each. Spaces let long layouts wrap."""
    segments = [segment.replace("|", " | ") for segment in entry.segments]
    if len(set(segments)) <= 1 or len(entry.parameters) != len(segments):
        return "\n".join(dict.fromkeys(segments))
    names = (parameter.removeprefix(f"{entry.pattern}.") for parameter in entry.parameters)
    return "\n".join(f"{name} {segment}" for name, segment in zip(names, segments, strict=True))


def _widths(columns: list[str], rows: list[Cells], available: int) -> dict[str, int]:
    """Return the widths of columns: each as wide as its widest line; then the widest shrink until the table fits."""
    texts = {name: "\n".join([_HEADINGS.get(name, name), *(row[name] for row in rows)]) for name in columns}
    widths = {column: max(map(cell_len, text.split("\n"))) for column, text in texts.items()}
    giving = [column for column in columns if column not in ("module", "style")]
    while sum(widths.values()) + _GAP * (len(columns) - 1) > available:
        widest = max(giving, key=lambda column: widths[column])
        if widths[widest] <= _LEAST:
            if "module" in giving:
                break
            giving = columns
            continue
        widths[widest] -= 1
    return widths


def _grid(columns: list[str], widths: dict[str, int], rows: list[Cells], header: bool = False) -> Table:
    table = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    for column in columns:
        style = "dim" if header else _STYLES.get(column, "")
        table.add_column(width=widths[column], overflow="fold", style=style)
    for row in rows:
        table.add_row(*(Text(row[column]) for column in columns))
    return table


TRAFFIC_COLUMNS = ("block", "forward", "backward", "least forward", "least backward", "moved/least")


def equal_blocks(traffic: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Return the first of the blocks that move the same, named with their number."""
    alike = grouped((repr(replace(block, block="")), block) for block in traffic)
    first = ((ones[0], f" and {len(ones) - 1} equal blocks" if len(ones) > 1 else "") for ones in alike.values())
    return tuple(replace(block, block=f"{block.block}{more}") for block, more in first)


def traffic_row(block: Traffic) -> tuple[str, ...]:
    """Return a block's row: the number of collectives of each kind, and their bytes per token."""
    ratio = "" if block.ratio is None else f"{block.ratio:.2f}"
    bounds = block.least_forward, block.least_backward
    least = [f"{size} B in {number}" if number else "nothing" for number, size in bounds]
    return block.block, _moved(block.forward), _moved(block.backward), *least, ratio


def traffic_lines(traffic: Iterable[Traffic]) -> list[str]:
    """Return the same as text, one line per block."""
    lines = []
    for moved in equal_blocks(traffic):
        block, forward, backward, least_forward, least_backward, ratio = traffic_row(moved)
        once = f"; {moved.once} B of gradients of replicated parameters once per step" if moved.once else ""
        sent = f"forward {forward} (minimum {least_forward}), backward {backward} (minimum {least_backward})"
        lines.append(f"{block}: {sent}{f', {ratio} × the minimum' if ratio else ''}{once}")
    return lines


def _moved(kinds: Mapping[str, tuple[int, int]]) -> str:
    return ", ".join(f"{number} {kind} {size} B" for kind, (number, size) in kinds.items()) or "nothing"
