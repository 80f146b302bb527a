"""`plan.diff(other)`: what changed between two plans, module by module.

Two plans are compared when a model, a rule or a release changes, and the reader wants the decisions that moved, not two
files side by side. Entries are matched by their pattern, whole parameters by their name, run-time sites by the pattern
they stand at; every field that differs is one `Change`, so two plans without a change are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, TypeVar

from autoplan.values import Change, Entry, Instruction, Plan, Runtime

Item = TypeVar("Item")
_BY_NAME = ("entries", "replicated", "layers", "findings", "runtime")
_NOT_COMPARED = ("flow",)  # a drawing's order decides nothing


def diff(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Empty exactly when the plans are equal."""
    changes = [*_fields("", before, after, skip=_BY_NAME + _NOT_COMPARED)]
    for pattern, old, new in _pairs(before.entries, after.entries, lambda entry: entry.pattern):
        changes += _entry_changes(pattern, old, new)
    changes += _items("whole", before.replicated, after.replicated, lambda whole: whole.fqn)
    changes += _items("layers", before.layers, after.layers, lambda stack: stack.name)
    changes += _items("finding", before.findings, after.findings, lambda finding: finding.where)
    for name in dict.fromkeys(type(one).__name__ for one in (*_done(before), *_done(after))):
        mine, its = ([one for one in _done(plan) if type(one).__name__ == name] for plan in (before, after))
        changes += _items(name, mine, its, lambda one: one.pattern)
    for field in (field for field in fields(Runtime) if field.name != "instructions"):
        old_sites, new_sites = getattr(before.runtime, field.name), getattr(after.runtime, field.name)
        if isinstance(old_sites, tuple):
            changes += _items(field.name, old_sites, new_sites, lambda site: getattr(site, "pattern", site))
        elif old_sites != new_sites:
            changes.append(Change("", field.name, old_sites, new_sites))
    if not changes and before != after:  # the same items in another order
        changes = [*_fields("", before, after, skip=_NOT_COMPARED)]
    return tuple(changes)


def _done(plan: Plan) -> tuple[Instruction, ...]:
    return plan.runtime.instructions


def _entry_changes(pattern: str, old: tuple[Entry, ...], new: tuple[Entry, ...]) -> Iterator[Change]:
    if len(old) == len(new) == 1:
        yield from _fields(pattern, old[0], new[0])
    elif old != new:
        yield Change(pattern, "entry", _one(old), _one(new))


def _items(what: str, before: Iterable[Item], after: Iterable[Item], key: Callable[[Item], str]) -> Iterator[Change]:
    for name, old, new in _pairs(before, after, key):
        if old != new:
            yield Change(name, what, _one(old), _one(new))


def _fields(pattern: str, before: Any, after: Any, skip: tuple[str, ...] = ()) -> Iterator[Change]:
    for field in fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if field.name not in skip and old != new:
            yield Change(pattern, field.name, old, new)


def _one(values: tuple[Any, ...]) -> Any:
    return values if len(values) > 1 else values[0] if values else None


def _pairs(
    before: Iterable[Item], after: Iterable[Item], key: Callable[[Item], str]
) -> Iterator[tuple[str, tuple[Item, ...], tuple[Item, ...]]]:
    """Items of both sides by key, in order of first appearance."""
    sides: dict[str, tuple[list[Item], list[Item]]] = {}
    for side, items in enumerate((before, after)):
        for item in items:
            sides.setdefault(key(item), ([], []))[side].append(item)
    for name, (old, new) in sides.items():
        yield name, tuple(old), tuple(new)
