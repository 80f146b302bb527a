"""Tested versions of torch and transformers: older ones are refused, newer ones tried with a warning."""

from __future__ import annotations

import re
import warnings
from functools import cache
from importlib import import_module

from autoplan.common.errors import AutoplanError, UntestedVersionWarning

# Oldest and newest release that the tests ran with. pyproject.toml states the oldest too, README both; tests compare.
TESTED = {"torch": ((2, 11), (2, 15)), "transformers": ((5, 10), (5, 24))}
# The first release that shards models by code that an audit can run. Everything else works with older ones.
OWN_SHARDING = (5, 23)


class VersionError(AutoplanError):
    """The installed version of a library is supported, but lacks what one feature needs."""

    def __init__(self, library: str, what: str, needed: tuple[int, int]) -> None:
        hint = f"pip install '{library}>={_dotted(needed)}'"
        super().__init__(f"{library} {installed_versions()[library]} {what}", hint=hint)


def installed_versions() -> dict[str, str]:
    """Return the installed version of each library."""
    import torch
    import transformers

    return {"torch": str(torch.__version__), "transformers": str(transformers.__version__)}


def older_than(library: str, release: tuple[int, int]) -> bool:
    """Return whether the installed version of a library is older than a release."""
    return _release(str(import_module(library).__version__)) < release


def check_versions(installed: dict[str, str] | None = None) -> None:
    """Raise for a version older than any that was tested, and warn once about each that is newer."""
    installed = installed_versions() if installed is None else installed
    for library, (oldest, _) in TESTED.items():
        if _release(installed[library]) < oldest:
            raise AutoplanError(
                f"{library} {installed[library]} is not supported", hint=f"pip install '{library}>={_dotted(oldest)}'"
            )
    for text in untested(installed):
        _warn_once(text)


def untested(installed: dict[str, str] | None = None) -> tuple[str, ...]:
    """Return one sentence for each library that is newer than any version that was tested."""
    installed = installed_versions() if installed is None else installed
    return tuple(
        f"{library} {installed[library]} is newer than {_dotted(newest)}, the newest tested version; `autoplan "
        "doctor` lists what changed and what does not work here"
        for library, (_, newest) in TESTED.items()
        if _release(installed[library]) > newest
    )


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, UntestedVersionWarning, stacklevel=4)


def _release(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
