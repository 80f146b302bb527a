"""What an entry for an undocumented name says, and how an entry is asked whether it still holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from autoplan.common.errors import AutoplanError
from autoplan.patches.patched import Patch


@dataclass(frozen=True)
class Private:
    """A thing of another package that is not documented, and that autoplan reads or calls. `canary` as above."""

    name: str
    why: str
    canary: Callable[[], bool]


def require(entry: Patch | Private) -> None:
    """Raise by name where the installed version does not have what `entry` relies on."""
    reason = "it is not what it was"
    cause: Exception | None = None
    try:
        holds = entry.canary()
    except Exception as error:  # what moved may fail in any way; all of them mean the same
        holds, cause, reason = False, error, f"{type(error).__name__}: {error}"
    if not holds:
        path = entry.replaces if isinstance(entry, Patch) else entry.name
        raise AutoplanError(
            f"{entry.name}: autoplan relies on {path}, and the installed version has changed it ({reason})",
            hint=f"install a version that pyproject.toml allows; it is needed for this: {entry.why}",
        ) from cause
