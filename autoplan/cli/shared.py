"""What all commands share: options that mean the same everywhere, where output goes, and what exit codes say."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.common.errors import AutoplanError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    "FAILED",
    "FINDINGS",
    "OK",
    "AsJson",
    "Cut",
    "Engine",
    "EpSize",
    "Model",
    "Output",
    "TpSize",
    "Trust",
    "emit",
    "note",
    "progress",
]

OK, FINDINGS, FAILED = 0, 1, 2


class Engine(StrEnum):
    """How ranks are simulated."""

    threads = "threads"
    gloo = "gloo"


Model = Annotated[str, typer.Argument(metavar="MODEL", help="What to plan; see the end of `autoplan --help`.")]
TpSize = Annotated[int, typer.Option("--tp", min=1, help="Ranks to split over.")]
EpSize = Annotated[
    int, typer.Option("--ep", min=1, help="Place whole experts on so many different ranks: --tp's, or with --tp 1 any.")
]
Cut = Annotated[
    bool, typer.Option("--sequence-parallel", help="Cut the stream between split regions along the sequence too.")
]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Output = Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write there, not to stdout.")]


def emit(view: RenderableType | str, data: Any, as_json: bool, output: Path | None) -> None:
    """Text, a table or JSON, to stdout or a file. Colour only on a terminal; elsewhere what `str(plan)` gives."""
    from autoplan.emit.tables.terminal import plain_text

    if output is None and not as_json and not isinstance(view, str) and sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False, markup=False).print(view)
        return
    shown = view if isinstance(view, str) else plain_text(view)
    text = json.dumps(data, indent=2, ensure_ascii=False) if as_json else shown
    if output is None:
        print(text)
        return
    try:
        output.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        raise AutoplanError(f"{output} cannot be written: {error.strerror}", hint="choose another path") from error
    note(f"written to {output}")


def note(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def progress(text: str) -> Iterator[None]:
    """A spinner on stderr while something slow runs; silent where nobody watches."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield
