"""Names that were replaced: they work for a while, with a warning that names the replacement and the last version.

A framework pins a range of versions. A name that vanishes between two of them breaks it for users who cannot fix it; a
warning gives its authors the time of the versions in between.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Renamed:
    """The replacement of a public name, the version of the change, and the one that removes the old name."""

    by: str
    since: str
    until: str


def successor(name: str, renamed: Mapping[str, Renamed], owner: str = "autoplan", *, stacklevel: int = 3) -> str | None:
    """Return the replacement of a renamed name, with a DeprecationWarning at the caller; None for any other."""
    rename = renamed.get(name)
    if rename is None:
        return None
    warnings.warn(
        f"{owner}.{name} was renamed {owner}.{rename.by} in {rename.since} and will be removed in {rename.until}",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return rename.by
