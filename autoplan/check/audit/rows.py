"""The rows of a plan as written, the same with changes, and the corrected plan as a file of its own kind."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from types import NoneType
from typing import Any

import yaml

from autoplan.check.audit.lines import ForeignPlan, Line, numbers_starred, read_foreign
from autoplan.check.audit.subject import Audited
from autoplan.common.errors import AutoplanError
from autoplan.common.files.plain import write_whole
from autoplan.common.patterns import fold_names, starred
from autoplan.decide.written_plans.dialects import ALIASES, kind_of, spec_for, specs_of
from autoplan.values import Entry, Plan
from autoplan.values.plain import plain

# How a cut is said in a dialect, whether two values say the same, and how a row reads. A value is what stands at a
# key.


@dataclass(frozen=True)
class Dialect:
    """The part that all dialects share: a dict of key and value."""

    plan: ForeignPlan

    def value_at(self, name: str) -> Any:
        """Return what the plan says of a module or parameter; None if no row matches it."""
        line = self.plan.line_at(name)
        return None if line is None else self.plan.raw.get(line.pattern)

    def value(self, style: str, entry: Entry | None = None) -> Any:
        """The value for a style's canonical name; None where the dialect has none."""
        raise NotImplementedError

    def key_of(self, value: Any) -> Any:
        """Equal for values that say the same."""
        return value

    def same(self, value: Any, other: Any) -> bool:
        return bool(self.key_of(value) == self.key_of(other))

    def text(self, value: Any) -> str:
        """A value as a reader of the dialect writes it."""
        return repr(value)

    def row(self, pattern: str, value: Any) -> str:
        """A row as a reader of the dialect writes it."""
        return f"{pattern!r}: {self.text(value)}"

    def written(self, rows: Iterable[tuple[Any, Any]]) -> Mapping[str, Any]:
        """A plan of these rows."""
        return {key: copy.deepcopy(value) for key, value in rows}


class Transformers(Dialect):
    """Style names by module or parameter."""

    def value(self, style: str, entry: Entry | None = None) -> Any:
        return style.removesuffix("_scatter") if style not in ("sequence_parallel",) else None

    def key_of(self, value: Any) -> Any:
        name = ALIASES.get(value, value)
        return None if name == "replicate" else name


class Torch(Dialect):
    """Style objects by module."""

    def value(self, style: str, entry: Entry | None = None) -> Any:
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

        make = {
            "colwise": ColwiseParallel,
            "rowwise": RowwiseParallel,
            "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
            "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
            "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
            # The norm of (batch, sequence, heads, head dim) on a rank's heads: its weight's gradient is summed.
            "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
        }.get(style)
        return None if make is None else make()

    def key_of(self, value: Any) -> Any:
        return value if value is None or isinstance(value, str) else (type(value), self.text(value))

    def text(self, value: Any) -> str:
        """The call that makes such an object: its class, and the arguments that are no defaults."""
        if isinstance(value, str):
            return repr(value)
        cls = type(value)
        try:
            plain = vars(cls())
        except TypeError:  # it has arguments that must be given
            plain = {}
        arguments = []
        for name, option in vars(value).items():
            usual = repr(plain[name]) if name in plain else ""
            if name.startswith("_") or repr(option) == usual or name in _NO_ARGUMENTS:
                continue
            if name == "sequence_sharding":
                arguments.append(f"sequence_dim={option[0].dim}")
                continue
            if isinstance(option, tuple) and len(option) == 1 and cls.__name__ not in LAYOUTS_ONLY:
                option = option[0]
            if option is not None and repr(option) != usual:
                arguments.append(f"{name}={layout_text(option)}")
        return f"{cls.__name__}({', '.join(arguments)})"


_NO_ARGUMENTS = ("prepare_module_input", "prepare_module_output", "with_kwargs")  # attributes of styles
LAYOUTS = ("Replicate", "Shard", "Partial")
LAYOUTS_ONLY = ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")


def layout_text(value: Any) -> str:
    """`Shard(-1)`, as one writes it."""
    if isinstance(value, (tuple, list)):
        inside = ", ".join(layout_text(item) for item in value)
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {layout_text(item)}' for key, item in value.items())}}}"
    name = type(value).__name__
    if name == "Shard":
        return f"Shard({value.dim})"
    return f"{name}()" if name in LAYOUTS else repr(value)


class DeepSpeed(Dialect):
    """Specs by regular expressions on parameter names."""

    def value_at(self, name: str) -> Any:
        spec = spec_for(self.plan.raw, self.parameter(name))
        return None if spec is None else {key: value for key, value in spec.items() if key != "patterns"}

    def parameter(self, name: str) -> str:
        return name if name.rpartition(".")[2] in ("weight", "bias") else f"{name}.weight"

    def value(self, style: str, entry: Entry | None = None) -> Any:
        from autoplan.emit.exports.export import packed_shape

        kinds: dict[str, dict[str, Any]] = {
            "colwise": {"partition_type": "column"},
            "rowwise": {"partition_type": "row"},
            "colwise_gather_output": {"partition_type": "column", "gather_output": True},
            "replicated_with_grad_allreduce": {"partition_type": "skip", "grad_allreduce": True},
        }
        if style == "packed_colwise" and entry is not None and (shape := packed_shape(entry)) is not None:
            return {"partition_type": "column", "shape": shape, "partition_dim": 0}
        return kinds.get(style)

    def key_of(self, value: Any) -> Any:
        if value is None:
            return None
        kind = kind_of(value)
        dim = value.get("partition_dim", 0 if kind == "column" else 1)
        options = (bool(value.get("gather_output")), bool(value.get("grad_allreduce")))
        if kind == "skip":
            return ("skip",) if options[1] else None
        return kind, dim, repr(value.get("shape")), options[0]

    def expression(self, name: str) -> str:
        """The expression that means a pattern's weights."""
        return "^" + r"\d+".join(re.escape(part) for part in self.parameter(name).split("*")) + "$"

    def row(self, pattern: str, value: Any) -> str:
        return repr({"patterns": [self.expression(pattern)], **value})

    def written(self, rows: Iterable[tuple[Any, Any]]) -> Mapping[str, Any]:
        data = copy.deepcopy(dict(self.plan.raw))
        inner = data
        for key in ("tensor_parallel", "partition_config"):
            inner = inner.get(key, inner)
        inner["layer_specs"] = [
            {"patterns": [self.expression(key)] if isinstance(key, str) else list(key), **value} for key, value in rows
        ]
        return data


def dialect_of(plan: ForeignPlan) -> Dialect | None:
    kinds = {"transformers": Transformers, "torch": Torch, "deepspeed": DeepSpeed}
    return kinds[plan.dialect](plan) if plan.dialect in kinds else None


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
    `covered`: keys of other rows, which say so already, once this one is gone; `obstacle`: what the part of these
    rows would need to be split further.
    """

    names: tuple[str, ...]
    patterns: tuple[str, ...]
    old: Any
    new: Any
    key: Any = None
    renames: Any = None
    covered: tuple[Any, ...] = ()
    obstacle: str = ""


def rows_of(subject: Audited, dialect: Dialect) -> tuple[PlanRow, ...]:
    """Every row of the plan, dead ones too."""
    names = [name for name in dict.fromkeys([*subject.modules, *subject.parameters]) if name]
    if isinstance(dialect, DeepSpeed):
        specs = specs_of(subject.plan.raw) or []
        decided: dict[int, list[str]] = {id(spec): [] for spec in specs}
        for name in subject.parameters:
            if (spec := spec_for(subject.plan.raw, name)) is not None:
                decided[id(spec)].append(name.removesuffix(".weight"))
        values = ({key: value for key, value in spec.items() if key != "patterns"} for spec in specs)
        keys = (tuple(spec["patterns"]) for spec in specs)
        return tuple(map(PlanRow, keys, values, map(tuple, decided.values())))
    reached: dict[str, list[str]] = {line.pattern: [] for line in subject.plan.lines}
    every = subject.plan.dialect == "torch"
    for name in names:
        for line in subject.plan.lines if every else filter(None, [subject.plan.line_at(name)]):
            if subject.plan.reaches(line, name):
                reached[line.pattern].append(name)
    return tuple(PlanRow(key, subject.plan.raw[key], tuple(modules)) for key, modules in reached.items())


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
                keeps = row.key is not None and not rest and len(common) == len(change.names)
                new = [PlanRow(row.key, change.new, change.names)] if keeps else _new(change)
                done = True
            untouched = [PlanRow(p, row.value, tuple(n for n in rest if starred(n) == starred(p) and _means(p, n)))
                    for p in patterns_of(subject, rest)]  # fmt: skip
            result[place : place + 1] = [*new, *untouched]
        if not done and change.new is not None:
            result += _new(change)
    return tuple(result)


def covered_by(rows: Iterable[PlanRow], change: Change, subject: Audited, dialect: Dialect) -> tuple[Any, ...]:
    """The key of another row that means all of these names, and says of them what the change wants."""
    if change.new is None or change.key is None:
        return ()
    others = (row for row in rows if row.key != change.key and isinstance(row.key, str))
    for row in others:
        reached = (subject.plan.reaches(Line(row.key, "", ""), name) for name in change.names)
        if dialect.same(row.value, change.new) and all(reached):
            return (row.key,)
    return ()


def overlapping(rows: Iterable[PlanRow], subject: Audited) -> tuple[Change, ...]:
    """Return changes that remove from a row the modules that a narrower one matches too (torch applies both)."""
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
        spec = spec_for(subject.plan.raw, dialect.parameter(name))
        return None if spec is None else tuple(spec["patterns"])
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
    # DeepSpeed's plans are parts of configs, which have numbers and flags too
    has_objects = any(not isinstance(item, (str, int, float, NoneType, Mapping, list)) for item in plan.values())
    if path.suffix == ".py":
        text = _module(plan, title, has_objects)
    elif has_objects:
        raise AutoplanError(f"{path}: style objects are written as Python", hint=f"-o {path.with_suffix('.py').name}")
    else:
        as_yaml = path.suffix in (".yaml", ".yml")
        text = yaml.safe_dump(dict(plan), sort_keys=False) if as_yaml else json.dumps(dict(plan), indent=2) + "\n"
    write_whole(path, text)


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
        cls = type(style)
        if cls is not str:
            module = "torch.distributed.tensor.parallel" if cls.__module__.startswith("torch.") else cls.__module__
            imports.setdefault(module, set()).add(cls.__qualname__)
    layouts = {name for name in LAYOUTS if any(f"{name}(" in text for text in texts.values())}
    if layouts:
        imports["torch.distributed.tensor"] = layouts
    lines = [f"from {module} import {', '.join(sorted(names))}" for module, names in sorted(imports.items())]
    rows = [f"    {key!r}: {text}," for key, text in texts.items()]
    code = "\n".join([*lines, "", "PLAN = {", *rows, "}", ""])
    namespace: dict[str, Any] = {}
    try:
        exec(code, namespace)
        same = all(repr(dialect.key_of(namespace["PLAN"][key])) == repr(dialect.key_of(plan[key])) for key in plan)
    except Exception as error:  # a class that no import reaches, or that takes other arguments
        raise AutoplanError(f"a style cannot be written as Python: {error}", hint="correct the rows by hand") from error
    if not same:
        raise AutoplanError("a style cannot be written as Python: it is read back differently", hint="edit it by hand")
    return heading + code


def row_text(item: Any) -> str:
    """A rule or an instruction as plan files write it."""
    return str(yaml.safe_dump(plain(item, brief=True), default_flow_style=True, sort_keys=False, width=10**6)).strip()
