"""Hand-written plans (rules/plans/*.toml), found by the qualified name of a model's class or of its nearest ancestor.

Classes are often created anew under one name, so plans are keyed by text; by bare name only for transformers' remote
code. Modules that a plan does not name (a vision tower, adapters) are left to analysis.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from autoplan.common.errors import AutoplanError
from autoplan.common.files.decode import misshapen
from autoplan.common.files.plain import NotPlain, read_plain
from autoplan.common.files.rule_files import rules_folders
from autoplan.common.options import check_argument
from autoplan.decide.written_plans.choices import ChosenCut, ChosenCuts, WrittenPlanError, check_style

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
