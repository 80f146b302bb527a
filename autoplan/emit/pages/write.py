"""A page's file: one name, refused before the page is made if no page can have it, and written whole or not at all."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from autoplan.common.errors import AutoplanError
from autoplan.common.files.write import write_whole
from autoplan.common.options import check_argument


def check_page(path: str | PathLike[str]) -> Path:
    """The path, if a page can have it."""
    check_argument("the page", path, (str, PathLike), "give its path")
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise AutoplanError(
            f"{target}: pages end in .html, not {target.suffix or 'no suffix'!r}",
            hint=f"rename it, for example to {target.stem or 'plan'}.html",
        )
    return target


def write_page(path: str | PathLike[str], page: Callable[[], str]) -> None:
    write_whole(check_page(path), page())
