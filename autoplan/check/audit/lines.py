"""A foreign plan as lines, each with the parameters that it reaches by its own library's rules of matching.

transformers takes `*` for a block's number and a parameter's own key first; torch matches path segments of modules; our
own plans name modules and parameters alike.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from autoplan.common.conventions import conventions
from autoplan.common.errors import AutoplanError
from autoplan.common.files.plain import NotPlain, is_file, read_plain, read_text
from autoplan.common.patterns import matches
from autoplan.decide.written_plans.choices import WrittenPlanError, check_key
from autoplan.decide.written_plans.dialects import is_deepspeed, looks_dotted, plan_at, read_deepspeed, read_style
from autoplan.decide.written_plans.plan_file import load_edited
from autoplan.decide.written_plans.read import plan_by_id
from autoplan.values import Plan

Dialect = Literal["transformers", "torch", "deepspeed", "autoplan"]
RESERVED = ("auto", "inferred", "handwritten")
_LARGEST = 4 << 20  # bytes of a file in which patterns are looked for


@dataclass(frozen=True)
class Line:
    """One key of a plan. `style` is its canonical name, "" where it is not known (`unread` says why)."""

    pattern: str
    style: str
    written: str
    unread: str = ""

    def __str__(self) -> str:
        return f"{self.pattern!r}: {self.written}"


@dataclass(frozen=True)
class ForeignPlan:
    """A plan as somebody wrote it. `raw` is what its own library is given; `plan` is there when it is one of ours."""

    name: str
    dialect: Dialect
    lines: tuple[Line, ...]
    raw: Mapping[str, Any]
    plan: Plan | None = None

    def line_for(self, parameter: str) -> Line | None:
        """The line that decides about a parameter, by the rules of the plan's own library."""
        return self.line_at(parameter) or self.line_at(parameter.rpartition(".")[0])

    def line_at(self, name: str) -> Line | None:
        """The line that counts where several mean this very module or parameter."""
        lines = self.lines[::-1] if self.dialect == "torch" else self.lines
        return next((line for line in lines if self.reaches(line, name)), None)

    def reaches(self, line: Line, name: str) -> bool:
        """Return whether a key names this module or parameter."""
        if self.dialect == "transformers":
            return line.pattern == numbers_starred(name)  # a layer's own number is never looked up
        return (reached_by_torch if self.dialect == "torch" else matches)(line.pattern, name)


def reached_by_torch(key: str, name: str) -> bool:
    """Return whether a key of `parallelize_module` names a module."""
    keys, parts = key.split("."), name.split(".")
    return len(keys) == len(parts) and all(fnmatchcase(p, k) for p, k in zip(parts, keys, strict=True))


def numbers_starred(name: str) -> str:
    """The name as transformers' plans write it.

    >>> numbers_starred("model.layers.3.mlp.w1")
    'model.layers.*.mlp.w1'
    """
    return ".".join("*" if part.isdigit() and place else part for place, part in enumerate(name.split(".")))


# ------------------------------------------------------------------------------------------------ reading


def read_foreign(source: Any, model: Any, name: str) -> ForeignPlan | str:
    """Read a plan in any dialect. A word that `autoplan.plan` reserves comes back as it is: that plan must be made."""
    if isinstance(source, Plan):
        return foreign_of(source, name)
    if isinstance(source, Mapping):
        return _of_mapping(source, name, model)
    text = str(source)
    if text in RESERVED:
        return text
    if text == "hf":
        plan = conventions().shipped_plan(model)
        if not plan:
            text = f"{name} has no transformers plan: neither its classes nor its configs have one"
            raise WrittenPlanError(text, hint="audit plan='inferred', or write one: {pattern: style}")
        return _of_mapping(plan, f"transformers' plan of {name}", model)
    if is_file(text):
        path = Path(text)
        data = read_plain(path, NotPlain("plan file", WrittenPlanError))
        if isinstance(data, Mapping) and "autoplan" in data:
            return foreign_of(load_edited(path), str(path))
        if not isinstance(data, Mapping):
            what = "is empty" if data is None else f"holds a {type(data).__name__}, not a plan"
            raise WrittenPlanError(f"{path} {what}", hint="write pattern: style")
        return _of_mapping(data, str(path), model)
    if plan_by_id(text) is not None:
        return text
    if not looks_dotted(text):
        hint = "give 'hf', 'inferred', a plan file, package.module:attribute, or a dict"
        raise WrittenPlanError(f"plan {text!r} is not an existing file, plan id or dotted path", hint=hint)
    value = plan_at(text, model)
    return foreign_of(value, text) if isinstance(value, Plan) else _of_mapping(value, text, model)


def plan_as_written(source: Any, model: Any, name: str) -> Any:
    """The plan itself, in its own dialect. One that must be made first is not written by anybody."""
    foreign = read_foreign(source, model, name)
    if isinstance(foreign, str):
        raise WrittenPlanError(f"{foreign!r} is not a saved plan", hint="`autoplan plan MODEL -o FILE` writes one")
    return foreign.plan or foreign.raw


def foreign_of(plan: Plan, name: str = "") -> ForeignPlan:
    """One of our own plans."""
    lines = tuple(Line(entry.pattern, entry.style, entry.style) for entry in plan.entries)
    return ForeignPlan(name, "autoplan", lines, {entry.pattern: entry.style for entry in plan.entries}, plan)


def _of_mapping(data: Mapping[str, Any], name: str, model: Any) -> ForeignPlan:
    if is_deepspeed(data):
        names = [parameter for parameter, _ in model.named_parameters(remove_duplicate=False)]
        choices = read_deepspeed(data, name, names, tolerant=True)
        return ForeignPlan(name, "deepspeed", tuple(Line(c.pattern, c.style, c.written) for c in choices), data)
    for key in data:
        check_key(key, name)
    if any(type(style).__name__ == "PlannedModel" for style in data.values()):
        hint = "audit the Plan itself, or its plan file"
        raise WrittenPlanError(f"{name} is an export of an autoplan Plan", hint=hint)
    objects = any(not isinstance(style, str) for style in data.values())
    lines = tuple(_line(key, style, name) for key, style in data.items())
    return ForeignPlan(name, "torch" if objects else "transformers", lines, data)


def _line(key: str, style: Any, name: str) -> Line:
    try:
        choice, *_ = read_style(key, style, name, by_position=True)
    except WrittenPlanError as error:
        written = style if isinstance(style, str) else f"{type(style).__module__}.{type(style).__qualname__}"
        return Line(key, "", written, error.message)
    return Line(key, choice.style, choice.written)


def plan_file_of(plan: str) -> str:
    """The file that holds a plan, as named or relative to here; "" if none (a dotted path was imported when it was
    read)."""
    if is_file(plan):
        return Path(plan).as_posix()
    parts = plan.replace(":", ".").split(".") if looks_dotted(plan) else []
    for length in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:length]))
        path = Path(getattr(module, "__file__", None) or "")
        if module is not None and path.is_file():
            here = Path.cwd()
            return (path.relative_to(here) if path.is_relative_to(here) else path).as_posix()
    return ""


def lines_of(file: str, patterns: Iterable[str]) -> dict[str, int]:
    """The first line on which each pattern stands as a word of its own."""
    try:
        lines = read_text(file, NotPlain(), _LARGEST).splitlines() if file else []
    except AutoplanError:
        return {}
    numbers: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        for word in line.replace('"', " ").replace("'", " ").split():
            numbers.setdefault(word.strip("{}[](),:"), number)
    return {pattern: numbers[pattern] for pattern in patterns if pattern in numbers}
