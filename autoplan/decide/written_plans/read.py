"""Read the source of a plan: the user's (dict, file, id, dotted path), else a hand-written one, else inferred.

transformers' own plan is used only if requested. `overrides` are laid over whatever the source gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.files.decode import misshapen
from autoplan.common.files.plain import NotPlain, is_file, read_plain
from autoplan.common.files.rule_files import rules_folders
from autoplan.common.options import check_argument
from autoplan.common.patterns import matches
from autoplan.decide.plan.chosen import choices_of_plan
from autoplan.decide.written_plans.choices import ChosenCut, ChosenCuts, WrittenPlanError, check_key, check_style
from autoplan.decide.written_plans.dialects import (
    ancestors_of,
    hf_plan,
    is_deepspeed,
    looks_dotted,
    plan_at,
    read_deepspeed,
    read_style,
    unwrapped,
    with_prefix,
)
from autoplan.decide.written_plans.plan_file import load_plan
from autoplan.values import Plan
from autoplan.values.module_tree import NamedModules

PlanSource = str | Path | Mapping[str, Any] | Plan
_NEXT = "source='auto' (hand-written, else inferred), 'inferred', 'hf', a plan file, a plan id, a dotted path or a dict"


def read_source(
    source: PlanSource,
    overrides: Mapping[str, Any] | None,
    model: NamedModules,
    *,
    name: str,
    tp_size: int,
    ep_size: int | None = 1,
    sequence_parallel: bool = False,
    unmatched: str = "error",
) -> ChosenCuts | Plan | None:
    """Return what a source specifies for a model: choices, a full plan (from a file), or None, for analysis alone.

    `ep_size` None is whatever a plan file says. `unmatched` "list": keys and styles without meaning are noted, not
    refused.
    """
    if unmatched not in ("error", "list"):
        raise WrittenPlanError(f"unmatched={unmatched!r}", hint="choose 'error' or 'list'")
    reader = _Reader(model, name, tp_size, ep_size, sequence_parallel, lenient=unmatched == "list")
    written = reader.read(source)
    if overrides is None:
        return written
    if not isinstance(overrides, Mapping) or not overrides:
        raise WrittenPlanError(f"overrides={overrides!r} is empty", hint="pass {pattern: style}, or omit it")
    under = choices_of_plan(written, f"the plan of {written.model}") if isinstance(written, Plan) else written
    return replace(reader.of_dict(overrides, "overrides", by_position=False), complete=False, under=under)


@dataclass
class _Reader:
    """Reads sources for one model at one size."""

    model: NamedModules
    name: str
    tp_size: int
    ep_size: int | None
    sequence_parallel: bool
    lenient: bool

    def read(self, source: Any) -> ChosenCuts | Plan | None:
        if isinstance(source, Plan):
            return self._for_size(source, "the plan given as source")
        if isinstance(source, Mapping):
            return self._of_mapping(source, "the dict given as source")
        text = str(source)
        if text == "inferred":
            return None
        if text == "hf":
            return self._as_asked(hf_plan(self.model, self.name))
        if text in ("auto", "handwritten"):
            return self._handwritten(wanted=text == "handwritten")
        if is_file(text):  # one of our plan files, a DeepSpeed config, or a dict of style names in JSON or YAML
            path = Path(text)
            if path.suffix == ".py":
                hint = (
                    f"pass the function or dict in it that is the plan: {path.stem}:plan, with its folder on PYTHONPATH"
                )
                raise WrittenPlanError(f"{path} is Python code, not a plan file", hint=hint)
            data = read_plain(path, NotPlain("plan file", WrittenPlanError))
            names = isinstance(data, dict) and data and all(isinstance(style, str) for style in data.values())
            if names or is_deepspeed(data):
                return self._of_mapping(data, str(path))
            return self._for_size(load_plan(path), str(path))
        chosen = plan_by_id(text)
        if chosen is not None:
            return chosen.choices(sequence_parallel=self.sequence_parallel, matched=f"the plan {text} was named")
        if not looks_dotted(text) or text.endswith((".yaml", ".yml", ".json")):
            ids = ", ".join(plan.id for plan in load_plans())
            raise WrittenPlanError(
                f"source={text!r} is not a reserved word, an existing plan file, a plan id or a dotted path",
                hint=f"pass {_NEXT}. Plan ids: {ids}",
            )
        value = plan_at(text, self.model, self.sequence_parallel)
        return self._for_size(value, text) if isinstance(value, Plan) else self._of_mapping(value, text)

    def of_dict(self, data: Mapping[str, Any], name: str, *, by_position: bool) -> ChosenCuts:
        """Read a dict of styles, of names of styles, or of both."""
        for key in data:
            check_key(key, name)
        lines: list[ChosenCut] = []
        unread: list[str] = []
        for key, style in data.items():
            try:
                lines += read_style(key, style, name, by_position=by_position)
            except WrittenPlanError as error:
                if not self.lenient:
                    raise
                unread.append(error.message)
        cuts = ChosenCuts(name, "user", tuple(lines), notes=tuple(unread))
        apart = next((line for line in lines if line.cut == "experts"), None)
        if apart is not None and self.ep_size == 1:
            raise WrittenPlanError(
                f"{name}: {apart} places experts on different ranks, but ep_size is 1",
                hint="pass ep_size=, the number of those ranks: the tp size, or any number with tp_size=1",
            )
        return self._as_asked(with_prefix(cuts, *_paths(self.model)))

    def _as_asked(self, choices: ChosenCuts) -> ChosenCuts:
        return replace(choices, tolerant=True) if self.lenient else choices

    def _of_mapping(self, data: Mapping[str, Any], name: str) -> ChosenCuts:
        if not data:
            raise WrittenPlanError(f"{name} is an empty plan", hint=f"use {_NEXT}")
        if is_deepspeed(data):
            return self._as_asked(ChosenCuts(name, "user", read_deepspeed(data, name, _paths(self.model)[1])))
        return self.of_dict(data, name, by_position=True)

    def _for_size(self, plan: Plan, name: str) -> Plan:
        if plan.tp_size != self.tp_size:
            raise PlanMismatchError(
                f"{name} is a plan for {plan.over}, not tp={self.tp_size}", hint="plan again at this size"
            )
        if self.ep_size not in (None, plan.ep_size):
            raise PlanMismatchError(
                f"{name} is a plan for ep={plan.ep_size}, not {self.ep_size}",
                hint=f"pass ep_size={plan.ep_size}, or plan again",
            )
        return plan

    def _handwritten(self, *, wanted: bool) -> ChosenCuts | None:
        path, inner = unwrapped(self.model)
        match = find_plan(ancestors_of(type(inner)))
        if match is None:
            if wanted:
                raise WrittenPlanError(
                    f"there is no hand-written plan for {type(inner).__module__}.{type(inner).__qualname__}",
                    hint=f"use {_NEXT}",
                )
            return None
        plan, how = match
        if not wanted and self.sequence_parallel and isinstance(plan.sequence_parallel, str):
            return None
        choices = plan.choices(sequence_parallel=self.sequence_parallel, matched=how)
        choices = replace(choices, optional=not wanted)
        modules, parameters = _paths(self.model)
        if not any(name.startswith(f"{path}.") for name in parameters):
            return choices  # not wrapped, or in a wrapper that keeps the names
        moved = tuple(replace(choice, pattern=_below(path, choice.pattern, modules)) for choice in choices.choices)
        return replace(choices, choices=moved, notes=(*choices.notes, f"inside {path!r}"))


def _paths(model: NamedModules) -> tuple[list[str], list[str]]:
    """Return all names of modules and of parameters, tied ones under each."""
    modules = [name for name, _ in model.named_modules(remove_duplicate=False)]
    return modules, [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _below(path: str, pattern: str, modules: list[str]) -> str:
    """Return a key of the inner model as the wrapped one names it: adapters keep the planned layer as `base_layer`."""
    absolute = f"{path}.{pattern}"
    return f"{absolute}.base_layer" if any(matches(f"{absolute}.base_layer", name) for name in modules) else absolute


# Hand-written plans (rules/plans/*.toml), found by the qualified name of a model's class or of its nearest ancestor.
#
# Classes are often created anew under one name, so plans are keyed by text; by bare name only for transformers' remote
# code. Modules that a plan does not name (a vision tower, adapters) are left to analysis.

_ENTRIES = {"*": str}
_SHAPE = {
    **dict.fromkeys(("id", "why", "gains"), str),
    **{"qualname": (str, [str]), "aliases": [str], "entries": _ENTRIES, "sequence_parallel": (str, _ENTRIES)},
}
_REMOTE = "transformers_modules."


@dataclass(frozen=True)
class HandwrittenPlan:
    """One file of rules/plans. `sequence_parallel`: entries that differ under it, or the reason why there are none.
    `where`: its name in messages, if it is no file of ours."""

    id: str
    qualnames: tuple[str, ...]
    why: str
    gains: str
    entries: tuple[tuple[str, str], ...]
    sequence_parallel: tuple[tuple[str, str], ...] | str
    aliases: tuple[str, ...] = ()
    where: str = ""

    def choices(self, *, sequence_parallel: bool = False, matched: str = "") -> ChosenCuts:
        """Return the plan as choices; `matched` says how it was found."""
        entries = dict(self.entries)
        notes = (matched,) if matched else ()
        if sequence_parallel:
            if isinstance(self.sequence_parallel, str):
                raise WrittenPlanError(
                    f"the hand-written plan {self.id} has no sequence-parallel variant: {self.sequence_parallel}",
                    hint="plan without sequence_parallel, or use source='inferred'",
                )
            entries.update(self.sequence_parallel)
        name = self.where or f"rules/plans/{self.id}.toml"
        lines = tuple(ChosenCut(pattern, style, name) for pattern, style in entries.items())
        return ChosenCuts(name, "handwritten", lines, complete=False, tolerant=True, notes=notes)


_registered: list[HandwrittenPlan] = []


def register_plan(
    model_class: str | type,
    entries: Mapping[str, str],
    *,
    sequence_parallel: Mapping[str, str] | str = "none was registered",
) -> Callable[[], None]:
    """Register a plan for a class of models, as if it were a file of rules/plans; it has precedence over files.

    `model_class` is the class or its qualified name ("package.module.Class"); `entries` is {pattern: style}.
    `sequence_parallel` holds the entries that differ under it, or says why there are none. A second plan for the same
    class replaces the first. Returns a function that removes the plan again.
    """
    check_argument("model_class", model_class, (str, type), 'pass the class, or "package.module.Class"')
    name = model_class if isinstance(model_class, str) else f"{model_class.__module__}.{model_class.__qualname__}"
    where = f"the plan registered for {name}"
    for value in (entries, sequence_parallel):
        plain = isinstance(value, Mapping) and all(isinstance(text, str) for pair in value.items() for text in pair)
        if "." not in name or not plain and (value is entries or not isinstance(value, str)):
            raise WrittenPlanError(f"{where} is {value!r}", hint='pass "package.module.Class" and {"pattern": "style"}')
    if not entries:
        raise WrittenPlanError(f"{where} is empty", hint='pass {"pattern": "style"}')
    variant = sequence_parallel if isinstance(sequence_parallel, str) else _entries(sequence_parallel, where)
    registered = HandwrittenPlan(
        name, (name,), "registered at runtime", "", _entries(entries, where), variant, where=where
    )
    _registered[:] = [registered, *(plan for plan in _registered if plan.id != name)]

    def take_away() -> None:
        _registered[:] = [plan for plan in _registered if plan is not registered]

    return take_away


def load_plans(folder: Path | None = None) -> tuple[HandwrittenPlan, ...]:
    """Return all hand-written plans: those registered at run time, then files by id. If several are for one class, the
    first counts."""
    if folder is not None:
        return _of_folder(folder)
    files: dict[str, HandwrittenPlan] = {}
    for root in rules_folders():
        for plan in _of_folder(root / "plans"):
            files.setdefault(plan.id, plan)
    return (*_registered, *files.values())


@lru_cache(maxsize=16)
def _of_folder(folder: Path) -> tuple[HandwrittenPlan, ...]:
    """Return the plans of one folder. Raises on an invalid file, and on two for one class."""
    plans = tuple(read_plan(path) for path in sorted(folder.glob("*.toml")))
    seen: dict[str, str] = {}
    for plan in plans:
        for key in (*plan.qualnames, *plan.aliases):
            if key in seen:
                raise AutoplanError(f"{seen[key]}.toml and {plan.id}.toml are both for {key}", hint="keep one")
            seen[key] = plan.id
    return plans


def read_plan(path: Path) -> HandwrittenPlan:
    """Read one plan file, checked key by key."""
    data = read_plain(path, NotPlain(hint="fix the file"), notation="toml")
    needed = _SHAPE.keys() - {"aliases"}
    wrong = sorted(data.keys() - _SHAPE.keys()) + sorted(f"no {key}" for key in needed - data.keys())
    if wrong or data["id"] != path.stem:
        problem = ", ".join(wrong) or f"id is {data['id']!r}, but the file is named {path.stem!r}"
        raise AutoplanError(f"{path}: {problem}", hint=f"a plan has the keys {', '.join(sorted(_SHAPE))}")
    if problem := misshapen(data, _SHAPE):
        raise AutoplanError(f"{path}: {problem}", hint="compare it with another file of rules/plans")
    names = data["qualname"]
    variant = data["sequence_parallel"]
    return HandwrittenPlan(
        id=data["id"],
        qualnames=tuple([names] if isinstance(names, str) else names),
        why=" ".join(data["why"].split()),
        gains=" ".join(data["gains"].split()),
        entries=_entries(data["entries"], str(path)),
        sequence_parallel=variant if isinstance(variant, str) else _entries(variant, str(path)),
        aliases=tuple(data.get("aliases", ())),
    )


def _entries(table: Mapping[str, Any], where: str) -> tuple[tuple[str, str], ...]:
    return tuple((pattern, check_style(str(style), pattern, where)) for pattern, style in table.items())


def find_plan(ancestors: Sequence[tuple[str, str]]) -> tuple[HandwrittenPlan, str] | None:
    """Return the plan for a class given as its ancestors' (module, qualname), nearest first; with how it was found."""
    first = tuple(reversed(load_plans()))
    by_name = {name: plan for plan in first for name in plan.qualnames}
    by_bare = {name.rpartition(".")[2]: plan for plan in first for name in plan.qualnames if name.startswith(_REMOTE)}
    own = ".".join(ancestors[0]) if ancestors else ""
    for module, qualname in ancestors:
        full = f"{module}.{qualname}"
        plan, how = by_name.get(full), ""
        if plan is None and module.startswith(_REMOTE):
            plan, how = by_bare.get(qualname.rpartition(".")[2]), f"{full} is remote code, matched by its bare name"
        if plan is not None:
            return plan, how if full == own else f"{own} inherits from {full}, whose plan this is"
    return None


def plan_by_id(name: str) -> HandwrittenPlan | None:
    """Return the plan that a user names: by file name or by one of its aliases."""
    return next((plan for plan in load_plans() if name == plan.id or name in plan.aliases), None)
