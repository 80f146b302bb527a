"""`autoplan doctor`: what the installed torch and transformers have moved, and what does not work here therefore."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from autoplan.cli.shared import FINDINGS, OK, AsJson, Output, emit, progress

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoplan.doctor.examine import Diagnosis


def doctor(as_json: AsJson = False, output: Output = None) -> None:
    """Look up all that autoplan rests on in the installed torch and transformers."""
    from autoplan.values.plain import plain

    with progress("checking what the installed torch and transformers have moved"):
        from autoplan.doctor.examine import examine

        diagnosis = examine()
    emit(_view(diagnosis), plain(diagnosis) | {"ok": diagnosis.ok}, as_json, output)
    raise typer.Exit(OK if diagnosis.ok else FINDINGS)


def _view(diagnosis: Diagnosis) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [
        Text(f"{library} {version}, tested with {diagnosis.tested[library]}")
        for library, version in diagnosis.versions.items()
    ]
    verdict = f"{len(diagnosis.moved)} moved" if diagnosis.moved else "none moved"
    parts.append(Text(f"{diagnosis.checked} names checked, {verdict}"))
    if diagnosis.moved:
        table = Table("name", "what was seen", "therefore", box=None, header_style="bold", pad_edge=False)
        for entry in diagnosis.moved:
            table.add_row(Text(entry.name), Text(entry.what), Text(entry.consequence))
        parts.append(table)
    return Group(*parts)
