"""transformers' plans: strings by module or parameter, old and new spelling, spread over classes and configs.

A model's plan is put together from parts (hf/own_sharding.py), each with keys relative to a module. Where a key was
written decides what it means, so each choice keeps that. Prefixes come from the module tree, not from a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from autoplan.common.conventions import conventions
from autoplan.common.patterns import matches
from autoplan.decide.written_plans.choices import ChosenCut, ChosenCuts, WrittenPlanError, check_key, check_style

__all__ = ["ALIASES", "hf_plan", "read_strings", "with_prefix"]

# Names that transformers used before, or uses besides; ours are its newest.
ALIASES = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "local_colwise": "colwise",
    "local_rowwise": "rowwise",
    "local_packed_colwise": "packed_colwise",
    "local_packed_rowwise": "packed_rowwise",
    "local": "local_params",
    "gather": "all_reduce",
    "replicated": "replicate",
    "ep_router": "replicate",
}


def read_strings(plan: Mapping[str, Any], name: str, *, by_position: bool) -> tuple[ChosenCut, ...]:
    """ChosenCuts of the style names in a dict. Style objects are another dialect's and are not looked at."""
    return tuple(
        ChosenCut(pattern, check_style(style, pattern, name, ALIASES), name, style, by_position)
        for pattern, style in plan.items()
        if isinstance(style, str)
    )


def hf_plan(model: object, name: str) -> ChosenCuts:
    """The plan that transformers itself would apply to a model, every key with its origin."""
    parts, parts_notes = conventions().shipped_parts(model)
    found: dict[str, tuple[str, str]] = {}
    for part in parts:
        for key, style in part.styles.items():
            check_key(key, part.origin)
            found[f"{part.prefix}.{key}" if part.prefix else key] = (style, part.origin)
    if not found:
        raise WrittenPlanError(
            f"{name} has no transformers plan: {conventions().no_plan_because()}",
            hint="use source='inferred' (analysis), source='auto', or write one: source={pattern: style}",
        )
    choices = tuple(
        ChosenCut(key, check_style(style, key, origin, ALIASES), origin, style, by_position=True)
        for key, (style, origin) in found.items()
    )
    notes = tuple(f"{c.pattern}: {c.written} comes from {c.origin}" for c in choices)
    return ChosenCuts(f"transformers' plan of {name}", "hf", choices, notes=(*notes, *parts_notes))


def with_prefix(choices: ChosenCuts, modules: Iterable[str], parameters: Iterable[str]) -> ChosenCuts:
    """Keys relative to an inner model (as configs write them), made absolute where one prefix fits all dead keys."""
    modules = list(modules)
    known = [*modules, *parameters]
    dead = [c for c in choices.choices if not any(matches(c.pattern, name) for name in known)]
    if not dead:
        return choices
    for prefix in sorted((m for m in modules if m), key=lambda name: (name.count("."), name)):
        if all(any(matches(f"{prefix}.{c.pattern}", name) for name in known) for c in dead):
            moved = tuple(replace(c, pattern=f"{prefix}.{c.pattern}") if c in dead else c for c in choices.choices)
            note = f"{len(dead)} keys are relative to {prefix!r}"
            return replace(choices, choices=moved, notes=(*choices.notes, note), _cache={})
    return choices
