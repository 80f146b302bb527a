"""Write the part of docs/limits.md that lists patches of other packages and undocumented names in use.

    PYTHONPATH=tests/helpers python -m canaries.limits docs/limits.md

rewrites it between its two marks and keeps the text around it. A test compares.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from autoplan.doctor.examine import TABLES, Private, entries_of
from autoplan.patches.patched import Patch
from canaries.uses import files, private_uses

__all__ = ["entry_of", "generated", "with_generated"]

ENTRIES = [entry for table in TABLES for entry in entries_of(*table)]
PATCHES = [entry for entry in ENTRIES if isinstance(entry, Patch)]
PRIVATE = [entry for entry in ENTRIES if isinstance(entry, Private)]

_BEGIN = "<!-- Written by `PYTHONPATH=tests/helpers python -m canaries.limits docs/limits.md`. Do not edit by hand. -->"
_END = "<!-- Written by hand from here on. -->"
_CANARY = "tests/patches/test_canaries.py::test_canary"


@cache
def generated() -> str:
    """Return both tables, from the registry and the source."""
    used: dict[str, set[str]] = {}
    for path, source in files().items():
        for use in private_uses(source):
            entry = entry_of(use)
            if entry is not None:
                used.setdefault(entry.name, set()).add(path.removeprefix("autoplan/"))
    for one in PRIVATE:
        if one.name not in used:
            used[one.name] = _as_text(one)
    return "\n".join(
        (
            "## Patches of other packages",
            "",
            "Each is temporary and made by `autoplan/patches/patched.py`; no other code assigns to foreign objects.",
            f"Each has the canary `{_CANARY}[name]`.",
            "",
            *_table(("name", "what", "why", "how long", "how it comes back", "where"), map(_patch_row, PATCHES)),
            "",
            "## Undocumented names in use",
            "",
            "A new version may move them without notice; then the canary of that name fails:",
            f"`{_CANARY}[name]`.",
            "",
            *_table(("name", "why", "where"), (_private_row(one, used[one.name]) for one in PRIVATE)),
        )
    )


def entry_of(use: str) -> Private | None:
    """Return the entry of a use that `private_uses` found.

    A dotted name belongs to the entry of that name or of its longest prefix; an attribute to the entry that ends in it.
    """
    if "." in use:
        fitting = [one for one in PRIVATE if use == one.name or use.startswith(f"{one.name}.")]
        return max(fitting, key=lambda one: len(one.name), default=None)
    return next((one for one in PRIVATE if use == one.name.rpartition(".")[2]), None)


def _as_text(one: Private) -> set[str]:
    """Return files that contain the last word of its name, as text or as an import from a public module."""
    last = one.name.rpartition(".")[2]
    return {path.removeprefix("autoplan/") for path, words in _words().items() if last in words}


@cache
def _words() -> dict[str, frozenset[str]]:
    return {path: frozenset(re.findall(r"\w+", source)) for path, source in files().items()}


def with_generated(page: str) -> str:
    """Return the page with its generated part rewritten."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{generated()}\n\n{_END}{after}"


def _patch_row(one: Patch) -> tuple[str, ...]:
    return one.name, one.replaces, one.why, one.scope, one.undone, f"`{one.where.removeprefix('autoplan/')}`"


def _private_row(one: Private, used: set[str]) -> tuple[str, ...]:
    return f"`{one.name}`", one.why, ", ".join(f"`{path}`" for path in sorted(used))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [_line(head), _line(("---",) * len(head)), *map(_line, rows)]


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(with_generated(page.read_text(encoding="utf-8")), encoding="utf-8")
