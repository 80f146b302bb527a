"""All entries: the patches, and the undocumented names in use."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

from autoplan.common.errors import AutoplanError
from autoplan.common.requirements import TESTED, installed_versions, untested
from autoplan.doctor.private import Private, require
from autoplan.hf.names import NAMES, vanished
from autoplan.patches.patched import Patch

# Each table is imported by itself, so that a name that moved does not hide the others.
TABLES = (
    ("autoplan.patches.tensors", "PATCHES"),
    ("autoplan.patches.sharding_rules", "PATCHES"),
    ("autoplan.patches.mixed_ops", "PATCHES"),
    ("autoplan.patches.classes", "PATCHES"),
    ("autoplan.patches.kernels", "PATCHES"),
    ("autoplan.patches.seeding", "PATCHES"),
    ("autoplan.patches.simulated_ranks", "PATCHES"),
    ("autoplan.doctor.private_torch", "TORCH"),
    ("autoplan.doctor.private_modules", "MODULES"),
    ("autoplan.doctor.private_engines", "FSDP"),
    ("autoplan.doctor.private_engines", "ENGINES"),
    ("autoplan.doctor.private_others", "OTHERS"),
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
        moved += _failing(entries)
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


def _failing(entries: tuple[Patch | Private, ...]) -> Iterator[Moved]:
    for entry in entries:
        try:
            require(entry)
        except AutoplanError as error:
            yield Moved(entry.name, _cause(error), _consequence(entry))


def _cause(error: AutoplanError) -> str:
    cause: Any = error.__cause__
    return f"{type(cause).__name__}: {cause}" if cause is not None else "its canary fails: its behaviour changed"


def _consequence(entry: Patch | Private) -> str:
    if isinstance(entry, Patch) and entry.without:
        return f"disabled: {entry.without}"
    return f"does not work: {entry.why}"
