"""Plan files, edited at random: numbers, layouts, names, patterns, kinds and order of instructions, lost and doubled
parts. What is made of each is one of a few outcomes; silently wrong and raw are those that must not be.
"""

from __future__ import annotations

import copy
import random
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from mesh_toys import clone, model_of
from torch import nn

from autoplan.check.audit import gate
from autoplan.check.audit.gate import refuse_disproven
from autoplan.check.pipeline import proven_plan
from autoplan.check.verify.on_ranks import sharding_of
from autoplan.check.verify.sharded import check_sharding
from autoplan.common.errors import AutoplanError
from autoplan.common.options import Wish
from autoplan.decide.written_plans.plan_file import plan_from_dict, plan_to_dict
from autoplan.execute.tensor_parallel import check_matches
from autoplan.hf.source import resolve
from autoplan.values import INSTRUCTIONS, Plan
from autoplan.values.plan import steering

__all__ = ["SUBJECTS", "Outcome", "Subject", "mutant", "outcome_of", "subject", "try_mutants"]

# dense, fused q, k and v, tied, encoder and decoder, experts, a hybrid, sequence parallel
SUBJECTS = ("llama", "phi3", "gpt2", "t5", "mixtral", "bamba", "llama, sequence parallel")

Place = tuple[Any, ...]
_NUMBERS = (-1, 0, 1, 2, 3, 4, 7, 64, 10**6, 10**40, -(10**12), 0.5, float("nan"), True, None, "2")
_LAYOUTS = ("1", "2!", "4!*2", "2*4!", "8!", "4!|4!", "4|4!", "2!2@2*2", "", "!", "x", "0!", f"{9**40}!", "4!*", "(4!")
_PATTERNS = ("", "*", "a.b", "layers.*", "..", "model.*.x", "[", "model.layers.0", " ", "\N{SNOWMAN}", "*.*.*.*")


@dataclass
class Outcome:
    """How many mutants ended how, and what is wrong with those that must not be."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@dataclass
class Subject:
    """A tiny model with its plan, and the call by which numbers are compared."""

    name: str
    build: Callable[[], nn.Module]
    feeds: dict[str, Any]
    plan: Plan

    def __post_init__(self) -> None:
        self.data = plan_to_dict(self.plan)
        self.model = self.build()
        self.exact: dict[str, bool] = {}


@cache
def subject(name: str) -> Subject:
    """One of SUBJECTS, planned for two ranks."""
    kind, _, sequence = name.partition(", ")
    wish = Wish(2, sequence_parallel=bool(sequence))
    made = clone(kind)
    return Subject(name, lambda: model_of(kind), dict(made.feeds), proven_plan(resolve(model_of(kind)), wish))


# ------------------------------------------------------------------------------------------------ how files are edited


def mutant(data: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """One to three edits of a plan file, most of them where it steers the model."""
    made = copy.deepcopy(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        chance.choice(_EDITS)(made, chance)
    return made


def _places(value: Any, at: Place = ()) -> Iterator[Place]:
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*at, key))


def _get(data: Any, at: Place) -> Any:
    for key in at:
        data = data[key]
    return data


def _pick(data: Any, chance: random.Random, wanted: Callable[[Any], bool]) -> Place | None:
    within: Place = ("runtime",) if "runtime" in data and chance.random() > 0.15 else ()
    found = [at for at in _places(_get(data, within), within) if at and wanted(_get(data, at))]
    return chance.choice(found) if found else None


def _set(data: Any, at: Place | None, value: Any) -> None:
    if at is not None:
        _get(data, at[:-1])[at[-1]] = value


def _number(data: Any, chance: random.Random) -> None:
    at = _pick(data, chance, lambda one: isinstance(one, int))
    if at is not None:
        near = _get(data, at) + chance.choice((-1, 1))
        _set(data, at, near if chance.random() < 0.5 else chance.choice(_NUMBERS))


def _text(data: Any, chance: random.Random) -> None:
    at = _pick(data, chance, lambda one: isinstance(one, str))
    if at is not None:
        others = [_get(data, other) for other in _places(data) if isinstance(_get(data, other), str)]
        _set(data, at, chance.choice([*others, *_PATTERNS, *_LAYOUTS]))


def _layout(data: Any, chance: random.Random) -> None:
    at = _pick(data, chance, lambda one: isinstance(one, dict) and "layout" in one)
    if at is not None:
        known = [one["layout"] for one in data["runtime"]["parameters"] if "layout" in one] if _has(data) else []
        _set(data, (*at, "layout"), chance.choice([*known, *_LAYOUTS]))


def _dim(data: Any, chance: random.Random) -> None:
    at = _pick(data, chance, lambda one: isinstance(one, dict) and "dim" in one)
    if at is not None:
        _set(data, (*at, "dim"), chance.choice((0, 1, 2, -1, -2, -3, None)))


def _pattern(data: Any, chance: random.Random) -> None:
    at = _pick(data, chance, lambda one: isinstance(one, dict) and "pattern" in one)
    if at is not None:
        known = [one["pattern"] for one in data.get("entries", ()) if isinstance(one, dict) and "pattern" in one]
        _set(data, (*at, "pattern"), chance.choice([*known, *_PATTERNS]))


def _kind(data: Any, chance: random.Random) -> None:
    """Another class of instruction with the same fields, where there is one."""
    at = _pick(data, chance, lambda one: isinstance(one, dict) and "do" in one)
    if at is not None:
        _set(data, (*at, "do"), chance.choice([*INSTRUCTIONS, "Nothing"]))


def _side(data: Any, chance: random.Random) -> None:
    at = _pick(data, chance, lambda one: isinstance(one, dict) and "side" in one)
    if at is not None:
        _set(data, (*at, "side"), "input" if _get(data, at)["side"] == "output" else "output")


def _word(data: Any, chance: random.Random) -> None:
    """A function, a style, a kind of gradient, a place in code: swapped for one that stands elsewhere in the file."""
    names = ("function", "style", "gradient", "place", "name", "attribute", "holder", "fold", "code")
    at = _pick(data, chance, lambda one: isinstance(one, dict) and any(name in one for name in names))
    if at is not None:
        name = chance.choice([name for name in names if name in _get(data, at)])
        known = [one[name] for p in _places(data) if isinstance(one := _get(data, p), dict) and name in one]
        _set(data, (*at, name), chance.choice([*known, "x", "", "forward:1:0-4"]))


def _lose(data: Any, chance: random.Random) -> None:
    at = _pick(data, chance, lambda one: True)
    if at is not None:
        del _get(data, at[:-1])[at[-1]]


def _double(data: Any, chance: random.Random) -> None:
    at = _pick(data, chance, lambda one: isinstance(one, list) and bool(one))
    if at is not None:
        items = _get(data, at)
        items.insert(chance.randrange(len(items) + 1), copy.deepcopy(chance.choice(items)))


def _reorder(data: Any, chance: random.Random) -> None:
    at = _pick(data, chance, lambda one: isinstance(one, list) and len(one) > 1)
    if at is not None:
        chance.shuffle(_get(data, at))


def _swap(data: Any, chance: random.Random) -> None:
    """Two items of a list change a field with each other."""
    at = _pick(data, chance, lambda one: isinstance(one, list) and sum(isinstance(item, dict) for item in one) > 1)
    if at is not None:
        one, other = chance.sample([item for item in _get(data, at) if isinstance(item, dict)], 2)
        common = [name for name in one if name in other]
        if common:
            name = chance.choice(common)
            one[name], other[name] = other[name], one[name]


def _move(data: Any, chance: random.Random) -> None:
    """An instruction is copied to another module."""
    if _has(data) and data["runtime"].get("instructions"):
        made = copy.deepcopy(chance.choice(data["runtime"]["instructions"]))
        entries = [one for one in data.get("entries") or () if isinstance(one, dict) and "pattern" in one]
        if isinstance(made, dict) and entries:
            data["runtime"]["instructions"].append(made | {"pattern": chance.choice(entries)["pattern"]})


def _size(data: Any, chance: random.Random) -> None:
    data[chance.choice(("tp_size", "ep_size"))] = chance.choice((1, 2, 3, 4, 0, -2, 10**9, "2", None, True))


def _other_type(data: Any, chance: random.Random) -> None:
    at = _pick(data, chance, lambda one: True)
    _set(data, at, chance.choice((None, [], {}, "", 0, [[]], {"x": 1}, -1.5, "text", [None], float("inf"))))


def _unproven(data: Any, chance: random.Random) -> None:
    """What a plan says of how it was made."""
    made_for = data.get("made_for")
    if isinstance(made_for, dict) and made_for:
        name = chance.choice(list(made_for))
        if chance.random() < 0.5:
            del made_for[name]
        else:
            made_for[name] = chance.choice(("", [], "0" * 16))


def _has(data: Any) -> bool:
    runtime = data.get("runtime")
    return isinstance(runtime, dict) and all(
        isinstance(runtime.get(name, []), list) and all(isinstance(one, dict) for one in runtime.get(name, []))
        for name in ("parameters", "instructions")
    )


_EDITS = (_number, _number, _text, _layout, _dim, _dim, _pattern, _pattern, _kind, _side, _word, _lose, _lose, _double)
_EDITS += (_reorder, _swap, _swap, _move, _move, _size, _other_type, _unproven)


# ------------------------------------------------------------------------------------------------ what is made of them


def try_mutants(subject: Subject, count: int, seed: int) -> Outcome:
    """Load and apply so many mutants, each refused with a clear error, or exact."""
    chance, outcome = random.Random(f"{subject.name} {seed}"), Outcome()
    derive, gate.proven_plan = gate.proven_plan, _remembered(proven_plan)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(count):
                data = mutant(subject.data, chance)
                kind, why = outcome_of(subject, data)
                outcome.counts[kind] += 1
                if kind in ("raw", "wrong", "unclear"):
                    outcome.problems.append(f"{subject.name} #{number} is {kind}: {why}")
    finally:
        gate.proven_plan = derive
    return outcome


def _remembered(derive: Callable[..., Plan]) -> Callable[..., Plan]:
    """Mutants of one model are derived alike: once is enough for many."""
    known: dict[str, Plan | AutoplanError] = {}

    def derived(source: Any, wish: Any, choices: Any, module: Any) -> Plan:
        key = f"{wish} {choices}"
        if key not in known:
            try:
                known[key] = derive(source, wish, choices, module)
            except AutoplanError as error:
                known[key] = error
        found = known[key]
        if isinstance(found, AutoplanError):
            raise found
        return found

    return derived


def outcome_of(subject: Subject, data: dict[str, Any]) -> tuple[str, str]:
    """How the data of a file ends, and why."""
    try:
        plan = plan_from_dict(data)
    except AutoplanError as error:
        return _clear("refused on load", error)
    except Exception:  # noqa: BLE001 - that is what is looked for
        return "raw", traceback.format_exc(limit=-3)
    try:
        if plan.ranks != subject.plan.ranks:  # `parallelize` compares them with the mesh first
            return "refused on apply", ""
        plan = gate.held_against_model(subject.model, plan)
        refuse_disproven(plan)
        check_matches(subject.model, plan)
    except AutoplanError as error:
        return _clear("refused on apply", error)
    except Exception:  # noqa: BLE001
        return "raw", traceback.format_exc(limit=-3)
    return _run(subject, plan)


def _clear(kind: str, error: AutoplanError) -> tuple[str, str]:
    said = len(error.message) > 15 and "\n" not in error.message[:200]
    return (kind, "") if said else ("unclear", error.message)


def _run(subject: Subject, plan: Plan) -> tuple[str, str]:
    """Run what was accepted on simulated ranks, each different plan once."""
    key = repr(steering(plan))
    if key not in subject.exact:
        try:
            report = check_sharding(subject.build(), subject.feeds, sharding_of(plan), plan.ranks)
        except Exception:  # noqa: BLE001
            return "raw", traceback.format_exc(limit=-3)
        subject.exact[key] = report.ok
    return ("exact", "") if subject.exact[key] else ("wrong", "numbers differ from the unsharded model's")
