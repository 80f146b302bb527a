"""The rows of a plan as written, the same with changes, and the corrected plan as a file of its own kind."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any

import yaml

from autoplan.check.audit.lines import Line, numbers_starred, read_foreign
from autoplan.check.audit.repair.dialects import LAYOUTS, DeepSpeed, Dialect, dialect_of
from autoplan.check.audit.subject import Audited
from autoplan.common.errors import AutoplanError
from autoplan.common.patterns import fold_names
from autoplan.decide.plan.folding import starred
from autoplan.decide.written_plans.foreign import specs_of
from autoplan.values import Plan


@dataclass(frozen=True)
class PlanRow:
    """A row: its key (DeepSpeed: its expressions), its value, and the modules or parameters that it decides about."""

    key: Any
    value: Any
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Change:
    """One row to change: `names` get `new` (None: no row) in place of `old`. `key`: the row that reaches them now.

    `patterns` are the names as few patterns; `renames`: the new row has the value of a key that matches nothing;
    `covered`: keys of other rows, which say so already, once this one is gone.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    old: Any
    new: Any
    key: Any = None
    renames: Any = None
    covered: tuple[Any, ...] = ()


def rows_of(subject: Audited, dialect: Dialect) -> tuple[PlanRow, ...]:
    """Every row of the plan, dead ones too."""
    names = [name for name in dict.fromkeys([*subject.modules, *subject.parameters]) if name]
    if isinstance(dialect, DeepSpeed):
        decided: dict[int, list[str]] = {}
        specs = specs_of(subject.plan.raw) or []
        for name in subject.parameters:
            place = next((n for n, spec in enumerate(specs) if dialect.matches(spec, name)), None)
            if place is not None:
                decided.setdefault(place, []).append(name.removesuffix(".weight"))
        return tuple(
            PlanRow(
                tuple(spec["patterns"]), {k: v for k, v in spec.items() if k != "patterns"}, tuple(decided.get(n, ()))
            )
            for n, spec in enumerate(specs)
        )
    reached: dict[str, list[str]] = {line.pattern: [] for line in subject.plan.lines}
    for name in names:
        for line in (
            subject.plan.lines if subject.plan.dialect == "torch" else filter(None, [subject.plan.line_at(name)])
        ):
            if subject.plan.reaches(line, name):
                reached[line.pattern].append(name)
    return tuple(PlanRow(key, subject.plan.raw[key], tuple(found)) for key, found in reached.items())


def patterns_of(subject: Audited, names: Sequence[str]) -> tuple[str, ...]:
    """Modules and parameters as few keys; where a dialect knows no layer numbers, with none."""
    if subject.plan.dialect == "transformers":
        return tuple(dict.fromkeys(map(numbers_starred, names)))
    return tuple(fold_names(names, [*subject.modules, *subject.parameters]))


def changed(rows: Iterable[PlanRow], changes: Iterable[Change], subject: Audited) -> tuple[PlanRow, ...]:
    """The rows with these changes. A row that says more than what changes is written out for the rest of it."""
    result = list(rows)
    for change in changes:
        if change.renames is not None:
            result = [row for row in result if row.key != change.renames]
        done = bool(change.covered)
        for row in list(result):
            if row.key in change.covered:
                continue
            common = set(row.names) & set(change.names)
            if not common:
                continue
            rest = [name for name in row.names if name not in common]
            place = result.index(row)
            new: list[PlanRow] = []
            if change.new is not None and not done:
                key = row.key if not rest and len(common) == len(change.names) else None
                new = [PlanRow(key, change.new, change.names)] if key is not None else _new(change)
                done = True
            kept = [PlanRow(p, row.value, tuple(n for n in rest if starred(n) == starred(p) and _means(p, n)))
                    for p in patterns_of(subject, rest)]  # fmt: skip
            result[place : place + 1] = [*new, *kept]
        if not done and change.new is not None:
            result += _new(change)
    return tuple(result)


def covered_by(rows: Iterable[PlanRow], change: Change, subject: Audited, dialect: Dialect) -> tuple[Any, ...]:
    """The key of another row that means all of these names, and says of them what the change wants."""
    if change.new is None or change.key is None:
        return ()
    return next(
        (
            (row.key,)
            for row in rows
            if row.key != change.key
            and isinstance(row.key, str)
            and dialect.key_of(row.value) == dialect.key_of(change.new)
            and all(subject.plan.reaches(Line(row.key, "", ""), name) for name in change.names)
        ),
        (),
    )


def overlapping(rows: Iterable[PlanRow], subject: Audited) -> tuple[Change, ...]:
    """Of rows that mean the same modules (torch applies them all), the wider ones without these."""
    rows = tuple(rows)
    changes = []
    for row in rows:
        narrower = [other for other in rows if len(other.names) < len(row.names) and set(other.names) & set(row.names)]
        names = tuple(name for name in row.names if any(name in other.names for other in narrower))
        if names:
            keys = tuple(other.key for other in narrower)
            changes.append(Change(names, patterns_of(subject, names), row.value, None, row.key, covered=keys))
    return tuple(changes)


def _means(pattern: str, name: str) -> bool:
    return all(p in ("*", n) for p, n in zip(pattern.split("."), name.split("."), strict=True))


def _new(change: Change) -> list[PlanRow]:
    return [
        PlanRow(pattern, change.new, tuple(name for name in change.names if _means(pattern, name)))
        for pattern in change.patterns
    ]


def effective_key(subject: Audited, dialect: Dialect, name: str) -> Any:
    """The key of the row that decides about a module or parameter; None where there is none."""
    if isinstance(dialect, DeepSpeed):
        parameter = dialect.parameter(name)
        return next(
            (tuple(s["patterns"]) for s in specs_of(subject.plan.raw) or () if dialect.matches(s, parameter)), None
        )
    line = subject.plan.line_at(name)
    return None if line is None else line.pattern


def plain_key(key: Any) -> str:
    """A key as a path: an expression without its signs."""
    if isinstance(key, str):
        return key
    text = re.sub(r"^\^?(\.\*)?\.?", "", key[0].replace("\\.", "."))
    text = re.sub(r"\\d\+|\[\^?[^\]]*\]\+|\.\*", "*", text).removesuffix("$")
    return text.removesuffix(".weight")


def write_fixed(plan: Any, path: Path, title: str) -> None:
    """Write a plan (a Plan, or a dict in another dialect) to a file."""
    if isinstance(plan, Plan):
        plan.save(path)
        return
    has_objects = any(not isinstance(style, (str, Mapping, list)) for style in plan.values())
    if has_objects and path.suffix != ".py":
        raise AutoplanError(f"{path}: style objects are written as Python", hint=f"-o {path.with_suffix('.py').name}")
    if path.suffix == ".py":
        path.write_text(_module(plan, title, has_objects), encoding="utf-8")
    elif path.suffix in (".yaml", ".yml"):
        path.write_text(yaml.safe_dump(dict(plan), sort_keys=False), encoding="utf-8")
    else:
        path.write_text(json.dumps(dict(plan), indent=2) + "\n", encoding="utf-8")


def _module(plan: Mapping[str, Any], title: str, has_objects: bool) -> str:
    heading = f'"""{title}: corrected by `autoplan audit --fix`."""\n\n'
    if not has_objects:
        return f"{heading}PLAN = {pformat(dict(plan), sort_dicts=False, width=110)}\n"
    foreign = read_foreign(plan, None, title)
    assert not isinstance(foreign, str)
    dialect = dialect_of(foreign)
    assert dialect is not None
    texts = {key: dialect.text(style) for key, style in plan.items()}
    imports: dict[str, set[str]] = {}
    for style in plan.values():
        if not isinstance(style, str):
            cls = type(style)
            module = "torch.distributed.tensor.parallel" if cls.__module__.startswith("torch.") else cls.__module__
            imports.setdefault(module, set()).add(cls.__qualname__)
    layouts = {name for name in LAYOUTS if any(f"{name}(" in text for text in texts.values())}
    if layouts:
        imports["torch.distributed.tensor"] = layouts
    lines = [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items())]
    rows = [f"    {key!r}: {text}," for key, text in texts.items()]
    code = "\n".join([*lines, "", "PLAN = {", *rows, "}", ""])
    made: dict[str, Any] = {}
    try:
        exec(code, made)
        same = all(repr(dialect.key_of(made["PLAN"][key])) == repr(dialect.key_of(plan[key])) for key in plan)
    except Exception as error:  # a class that no import reaches, or that takes other arguments
        raise AutoplanError(f"a style cannot be written as Python: {error}", hint="correct the rows by hand") from error
    if not same:
        raise AutoplanError("a style cannot be written as Python: it comes back otherwise", hint="correct it by hand")
    return heading + code
