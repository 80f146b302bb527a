"""Entries for undocumented names, and the check whether an entry still holds."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from autoplan.common.errors import AutoplanError
from autoplan.patches.patched import Patch


@dataclass(frozen=True)
class Private:
    """An undocumented name of another package that autoplan reads or calls. `canary`: as for a `Patch`."""

    name: str
    why: str
    canary: Callable[[], bool]


Canary = Callable[[], bool]


class Table(list[Private]):
    """The entries of one kind."""

    def hold(self, why: str, *names: str) -> Callable[[Canary], Canary]:
        """Add these names, with the decorated function as their canary."""

        def enter(canary: Canary) -> Canary:
            self.extend(Private(name, why, canary) for name in names)
            return canary

        return enter

    def there(self, names: Mapping[str, str], *, needed: bool = True) -> None:
        """Add names with the reason why they are needed, in versions that need them: "package.function(first, second)"
        has these parameters, "package.Class:method" has that member."""
        for text, why in names.items():
            path, _, parameters = text.removesuffix(")").partition("(")
            parameter_names = parameters.split(", ") if parameters else []
            canary = partial(_exists, path.replace(":", "."), parameter_names) if needed else lambda: True
            self.append(Private(path.partition(":")[0], why, canary))


def _exists(path: str, parameters: list[str]) -> bool:
    member = _member(path)
    return not parameters or set(parameters) <= set(inspect.signature(member).parameters)


def _member(path: str) -> Any:
    home, _, name = path.rpartition(".")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError:
        return getattr(_member(home), name)


def require(entry: Patch | Private) -> None:
    """Raise by name where the installed version does not have what `entry` relies on."""
    reason = "its behaviour changed"
    cause: Exception | None = None
    try:
        holds = entry.canary()
    except Exception as error:  # a moved name may fail in any way
        holds, cause, reason = False, error, f"{type(error).__name__}: {error}"
    if not holds:
        path = entry.replaces if isinstance(entry, Patch) else entry.name
        raise AutoplanError(
            f"{entry.name}: autoplan relies on {path}, which the installed version changed ({reason})",
            hint=f"install a version that pyproject.toml allows. Needed because: {entry.why}",
        ) from cause
