"""The undocumented names in use, as entries of tables, and the check of all entries and patches."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

from autoplan.common.errors import AutoplanError
from autoplan.common.requirements import TESTED, installed_versions, untested
from autoplan.hf.names import NAMES, vanished
from autoplan.patches.patched import Patch

_Canary = Callable[[], bool]


@dataclass(frozen=True)
class Private:
    """An undocumented name of another package that autoplan reads or calls. `canary`: as for a `Patch`."""

    name: str
    why: str
    canary: _Canary


class Table(list[Private]):
    """The entries of one kind."""

    def hold(self, why: str, *names: str) -> Callable[[_Canary], _Canary]:
        """Add these names, with the decorated function as their canary."""

        def enter(canary: _Canary) -> _Canary:
            self.extend(Private(name, why, canary) for name in names)
            return canary

        return enter

    def there(self, names: Mapping[str, str], *, needed: bool = True) -> None:
        """Add names with the reason why they are needed, in versions that need them: "package.function(first, second)"
        has these parameters, and with "…" after them perhaps more; "package.Class:method" has that member."""
        for text, why in names.items():
            path, _, parameters = text.removesuffix(")").partition("(")
            canary = partial(_exists, path.replace(":", "."), parameters) if needed else lambda: True
            self.append(Private(path.partition(":")[0], why, canary))


def _exists(path: str, parameters: str) -> bool:
    member = _member(path)
    signature = ", ".join(inspect.signature(member).parameters) if parameters else ""
    return signature == parameters or (parameters.endswith("…") and signature.startswith(parameters[:-1].rstrip(", ")))


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


# Each table is imported by itself, so that a name that moved does not hide the others.
_PATCHING = ("tensors", "sharding_rules", "classes", "kernels", "seeding", "simulated_ranks")
TABLES = (
    *((f"autoplan.patches.{name}", "PATCHES") for name in _PATCHING),
    ("autoplan.doctor.private_torch", "TORCH"),
    ("autoplan.doctor.private_modules", "MODULES"),
    ("autoplan.doctor.private_engines", "FSDP"),
    ("autoplan.doctor.private_engines", "ENGINES"),
    ("autoplan.doctor.private_modules", "OTHERS"),
)


@dataclass(frozen=True)
class Moved:
    """A name that the installed version has moved or changed, and what does not work because of it."""

    name: str
    what: str
    consequence: str


@dataclass(frozen=True)
class Diagnosis:
    """The result of all canaries. `untested`: a sentence for each library that is newer than any tested version."""

    versions: dict[str, str]
    tested: dict[str, str]
    untested: tuple[str, ...]
    checked: int
    moved: tuple[Moved, ...]

    @property
    def ok(self) -> bool:
        return not self.moved


def entries_of(module: str, table: str) -> tuple[Patch | Private, ...]:
    """Return the entries of a table, or all patches that a module declares."""
    names = vars(import_module(module))
    patches = (value for value in names.values() if isinstance(value, Patch))
    return tuple(patches) if table == "PATCHES" else tuple(names[table])


def examine() -> Diagnosis:
    """Run every canary and look up every public name."""
    count, moved = 0, list[Moved]()
    for module, table in TABLES:
        try:
            entries = entries_of(module, table)
        except (ImportError, AttributeError, KeyError) as error:
            moved.append(Moved(module, str(error), "imports of modules that depend on it fail"))
            continue
        count += len(entries)
        for entry in entries:
            try:
                require(entry)
            except AutoplanError as error:
                optional = isinstance(entry, Patch) and entry.without
                consequence = f"disabled: {optional}" if optional else f"does not work: {entry.why}"
                cause = error.__cause__
                changed = f"{type(cause).__name__}: {cause}" if cause else "its canary fails: its behaviour changed"
                moved.append(Moved(entry.name, changed, consequence))
    moved += _not_importable()
    for name in vanished():
        where = f"no class of {name.mapping} has it" if name.mapping else "the installed transformers lacks it"
        moved.append(Moved(str(name), where, "treated as absent; verify reports `not known`"))
    tested = {library: "{}.{} to {}.{}".format(*oldest, *newest) for library, (oldest, newest) in TESTED.items()}
    return Diagnosis(installed_versions(), tested, untested(), count + len(NAMES), tuple(moved))


def _not_importable() -> Iterator[Moved]:
    """Import all of autoplan, and yield the modules that fail: a name read at import time breaks every importer."""
    causes = set[str]()
    for module in walk_packages([str(Path(__file__).parents[1])], "autoplan.", onerror=lambda name: None):
        try:
            if not module.name.endswith("__main__"):
                import_module(module.name)
        except (ImportError, AttributeError) as error:
            cause = f"{type(error).__name__}: {error}"
            if cause not in causes:
                causes.add(cause)
                yield Moved(module.name, cause, "cannot be imported, nor can the features that need it")
