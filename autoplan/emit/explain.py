"""Explain one path of a plan (`plan.explain`), and compare two plans field by field (`plan.diff`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from typing import Any, TypeVar

from autoplan.common.errors import AutoplanError
from autoplan.common.patterns import best_match, fold_names, grouped, is_under, matches, nearest
from autoplan.emit.words import bytes_text, segment_text
from autoplan.values import Change, Entry, Plan, Replicated, Runtime


def explain(plan: Plan, path: str) -> str:
    """Return the explanation of a module, a parameter, or a pattern of either."""
    entry = _entry_for(plan, path)
    whole = tuple(item for item in plan.replicated if _concerns(path, item.fqn))
    if entry is not None:
        parameter = path if not matches(entry.pattern, path) else ""
        return "\n".join([path, *_rows(_about_entry(plan, entry, parameter)), *_whole_lines(whole)])
    under = tuple(other for other in plan.entries if _concerns(path, other.pattern))
    if not under and not whole:
        patterns = [entry.pattern for entry in plan.entries] + list(fold_names(item.fqn for item in plan.replicated))
        close = nearest(path, patterns)
        hint = f"nearest paths: {', '.join(close)}" if close else "print the plan to see its paths"
        raise AutoplanError(f"the plan for {plan.model} has no entry for {path!r}", hint=hint)
    lines = [path]
    if under:
        facts = [filter(None, (other.style, other.units, f"rule {other.rule}")) for other in under]
        split = [f"{other.pattern}: {', '.join(of_entry)}" for other, of_entry in zip(under, facts, strict=True)]
        lines += _rows([("split", split)])
    return "\n".join(lines + _rows([("running", _running(plan, path))]) + _whole_lines(whole))


def local_name(entry: Entry, parameter: str) -> str:
    """Return a parameter's name in its module: "weight"."""
    return parameter.removeprefix(f"{entry.pattern}.")


def _entry_for(plan: Plan, path: str) -> Entry | None:
    """Return the entry of `path`, or of the module that owns the parameter `path`."""
    owner, _, name = path.rpartition(".")
    owning = best_match(plan.entries, owner)
    if owning is not None and name in {local_name(owning, parameter) for parameter in owning.parameters}:
        return owning
    return best_match(plan.entries, path)


def _concerns(path: str, fqn: str) -> bool:
    """Return whether `fqn` is at or under `path`. Either may be a pattern."""
    return is_under(path, fqn) or matches(".".join(fqn.split(".")[: path.count(".") + 1]), path)


def _about_entry(plan: Plan, entry: Entry, parameter: str) -> Iterable[tuple[str, list[str]]]:
    names = [local_name(entry, name) for name in entry.parameters]
    cuts = list(zip(names, entry.segments, strict=False))
    if parameter:
        cuts = [(name, segment) for name, segment in cuts if name == parameter.rpartition(".")[2]]
    yield "planned as", [entry.pattern]
    yield "style", [entry.style]
    yield "role", [f"{entry.role} (rule {entry.rule}, source {entry.source})"]
    yield "units", [entry.units]
    yield "cut", [f"{name} {segment_text(segment, plan.cut_over)}" for name, segment in cuts]
    yield "because", entry.reason.splitlines()
    yield "costs", list(map(str, entry.reduces))
    yield "running", _running(plan, entry.pattern)
    yield "proof", [entry.proof if plan.proof.was_asked else ""]


def _running(plan: Plan, pattern: str) -> list[str]:
    """Return what `parallelize` does at this module and at its parent."""
    runtime, parent = plan.runtime, pattern.rpartition(".")[0]

    def near(other: str) -> bool:
        return bool(other) and (_concerns(pattern, other) or (bool(parent) and other == parent))

    rules = [rule for rule in runtime.parameters if near(rule.pattern)]
    summed = {"shared": "its gradient is summed over ranks on shared rows", "local": ""}
    gradients = [(rule, summed.get(rule.gradient, "its gradient is summed over ranks")) for rule in rules]
    biases = [f"{rule.pattern}: each rank adds 1/{plan.cut_over} of it" for rule in rules if rule.divide]
    over = {"": plan.cut_over, "cp": plan.cp_size}
    done = [i.said(over.get(i.over, plan.ranks)) for i in runtime.instructions if near(i.pattern)]
    return done + [f"{rule.pattern}: {text}" for rule, text in gradients if text] + biases


def _whole_lines(whole: tuple[Replicated, ...]) -> list[str]:
    groups = grouped(((item.bytes, item.reason), item.fqn) for item in whole)
    texts = []
    for (size, reason), names in groups.items():
        times = f" × {len(names)}" if len(names) > 1 else ""
        texts.append(f"{', '.join(fold_names(names))} ({bytes_text(size)}{times}): {reason}")
    return _rows([("whole", texts)])


def _rows(labelled: Iterable[tuple[str, list[str]]]) -> list[str]:
    """Format lines with their label in front of the first one; empty lines are left out."""
    return [
        f"  {label if position == 0 else '':<11}{line}"
        for label, lines in labelled
        for position, line in enumerate(line for line in lines if line)
    ]


Item = TypeVar("Item")
_BY_NAME = ("entries", "replicated", "layers", "findings", "runtime")
_NOT_COMPARED = ("flow",)  # the order of a drawing does not matter


def diff(before: Plan, after: Plan) -> tuple[Change, ...]:
    """Return the differences of two plans; empty exactly when they are equal."""
    changes = [*_fields("", before, after, skip=_BY_NAME + _NOT_COMPARED)]
    for pattern, old, new in _pairs(before.entries, after.entries, lambda entry: entry.pattern):
        if len(old) == len(new) == 1:
            changes += _fields(pattern, old[0], new[0])
        elif old != new:
            changes.append(Change(pattern, "entry", _one(old), _one(new)))
    changes += _items("whole", before.replicated, after.replicated, lambda whole: whole.fqn)
    changes += _items("layers", before.layers, after.layers, lambda stack: stack.name)
    changes += _items("finding", before.findings, after.findings, lambda finding: finding.where)
    done = [plan.runtime.instructions for plan in (before, after)]
    for kind in dict.fromkeys(type(instruction) for own in done for instruction in own):
        mine, its = ([instruction for instruction in own if type(instruction) is kind] for own in done)
        changes += _items(kind.__name__, mine, its, lambda instruction: instruction.pattern)
    for field in (field for field in fields(Runtime) if field.name != "instructions"):
        old_sites, new_sites = getattr(before.runtime, field.name), getattr(after.runtime, field.name)
        if isinstance(old_sites, tuple):
            changes += _items(field.name, old_sites, new_sites, lambda site: getattr(site, "pattern", site))
        elif old_sites != new_sites:
            changes.append(Change("", field.name, old_sites, new_sites))
    if not changes and before != after:  # only the order of items differs
        changes = [*_fields("", before, after, skip=_NOT_COMPARED)]
    return tuple(changes)


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
    """Yield items of both sides by key, in order of first appearance."""
    sides: dict[str, tuple[list[Item], list[Item]]] = {}
    for side, items in enumerate((before, after)):
        for item in items:
            sides.setdefault(key(item), ([], []))[side].append(item)
    for name, (old, new) in sides.items():
        yield name, tuple(old), tuple(new)
