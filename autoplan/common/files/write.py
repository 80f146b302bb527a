"""A file of ours is there whole, or as it was before: an interrupt or a full disk leaves no half of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from autoplan.common.errors import AutoplanError


def write_whole(path: Path, text: str, error: type[AutoplanError] = AutoplanError) -> None:
    """Write `text` beside its place and move it there. What is no file (a pipe, /dev/null) is written as it is."""
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        _replace(path.resolve(), text)
    except (OSError, ValueError) as problem:
        said = getattr(problem, "strerror", None) or problem
        raise error(f"{path} cannot be written: {said}", hint="choose another path") from problem


def _replace(place: Path, text: str) -> None:
    """Over a link, what it points to is replaced; the mode of a file that was there stays."""
    mode = place.stat().st_mode & 0o777 if place.exists() else 0o666 & ~_umask()
    handle, name = tempfile.mkstemp(prefix=f".{place.name[:40]}.", dir=place.parent)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, mode)
        os.replace(name, place)
    except BaseException:  # Ctrl-C included
        os.unlink(name)
        raise


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before
