"""Where in a file a plan says what it says: the line of each of its keys, for tools that annotate files."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from autoplan.common.errors import AutoplanError
from autoplan.common.files.plain import NotPlain, is_file, read_text
from autoplan.decide.written_plans.dialects import looks_dotted

_LARGEST = 4 << 20


def plan_file_of(plan: str) -> str:
    """The file that a plan is written in, as people named it or relative to here; "" for a plan that no file holds.

    A dotted path was imported when the plan was read.
    """
    if is_file(plan):
        return Path(plan).as_posix()
    parts = plan.replace(":", ".").split(".") if looks_dotted(plan) else []
    for length in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:length]))
        path = Path(getattr(module, "__file__", None) or "")
        if module is not None and path.is_file():
            here = Path.cwd()
            return (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()
    return ""


def lines_of(file: str, patterns: Iterable[str]) -> dict[str, int]:
    """The first line on which each pattern stands as a word of its own."""
    try:
        lines = read_text(file, NotPlain(), _LARGEST).splitlines() if file else []
    except AutoplanError:
        return {}
    wanted = tuple(patterns)
    found: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        words = {word.strip("{}[](),:") for word in line.replace('"', " ").replace("'", " ").split()}
        for pattern in wanted:
            if pattern in words:
                found.setdefault(pattern, number)
    return found
