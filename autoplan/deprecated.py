"""Names that were replaced: they work for a while, and say what to use instead and until when.

A framework pins a range of versions. A name that vanishes between two of them breaks it in the hands of people who can
do nothing about it; one that warns gives its authors the time of the versions in between.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Renamed:
    """By what a public name was replaced, in which version, and in which it goes."""

    by: str
    since: str
    until: str


def successor(name: str, renamed: Mapping[str, Renamed], owner: str = "autoplan", *, stacklevel: int = 3) -> str | None:
    """The name to use for one that was replaced, with a DeprecationWarning at the caller; None for any other."""
    found = renamed.get(name)
    if found is None:
        return None
    warnings.warn(
        f"{owner}.{name} is {owner}.{found.by} since version {found.since}, and goes in version {found.until}",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return found.by
