"""transformers' plans: strings by module or parameter, old and new spelling, spread over classes and configs.

A model's plan is put together from the class (`_tp_plan`), the instance, and the models inside it, each with keys
relative to itself; the base model's comes from its config (`base_model_tp_plan`). Where a key was written decides what
it means, so each choice keeps that. Prefixes come from the module tree, not from a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoplan.common.conventions import conventions
from autoplan.common.patterns import matches
from autoplan.decide.written_plans.choices import Choice, ChoiceError, Choices, check_key, check_style

if TYPE_CHECKING:
    from torch import nn

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


def read_strings(plan: Mapping[str, Any], name: str, *, by_position: bool) -> tuple[Choice, ...]:
    """Choices of the style names in a dict. Style objects are another dialect's and are not looked at."""
    return tuple(
        Choice(pattern, check_style(style, pattern, name, ALIASES), name, style, by_position)
        for pattern, style in plan.items()
        if isinstance(style, str)
    )


def hf_plan(model: nn.Module, name: str) -> Choices:
    """The plan that transformers itself would apply to a model, every key with its origin."""
    found: dict[str, tuple[str, str]] = {}
    notes = []
    for prefix, module in model.named_modules():
        for origin, plan in _plans_of(module):
            for key, style in plan.items():
                check_key(key, origin)
                found[f"{prefix}.{key}" if prefix else key] = (style, origin)
    if not found:
        raise ChoiceError(
            f"{name} has no transformers plan: neither its classes nor its configs have one",
            hint="use source='inferred' (analysis), source='auto', or write one: source={pattern: style}",
        )
    choices = tuple(
        Choice(key, check_style(style, key, origin, ALIASES), origin, style, by_position=True)
        for key, (style, origin) in found.items()
    )
    notes += [f"{c.pattern}: {c.written} comes from {c.origin}" for c in choices]
    for attribute in ("_ep_plan", "_fsdp_plan"):
        other = getattr(model, attribute, None)
        if other:
            notes.append(f"transformers' {attribute} ({len(other)} rules) is for other mesh dims and is not used")
    return Choices(f"transformers' plan of {name}", "hf", choices, notes=tuple(notes))


def _plans_of(module: nn.Module) -> Iterable[tuple[str, dict[str, str]]]:
    """(origin, plan) of one module, keys relative to it: its class's, its config's if it is the base model, its own."""
    cls = type(module)
    of_class = dict(cls.__dict__.get("_tp_plan") or getattr(cls, "_tp_plan", None) or {})
    yield f"{cls.__name__}._tp_plan", of_class
    config = conventions().config_of(module)
    of_config: dict[str, str] = {}
    if config is not None and getattr(module, "base_model", None) is module:
        of_config = dict(getattr(config, "base_model_tp_plan", None) or {})
        yield f"{type(config).__name__}.base_model_tp_plan", of_config
    own = module.__dict__.get("_tp_plan") or {}
    inner = tuple(f"{child}." for child, _ in module.named_children())
    known = of_class | of_config
    # What the instance has beyond that: set by hand, or put together from inner models, who speak for themselves.
    beyond = {k: v for k, v in own.items() if known.get(k) != v and not (k.startswith(inner) and _speaks(module, k))}
    yield f"the {cls.__name__} instance", beyond


def _speaks(module: nn.Module, key: str) -> bool:
    """Does the inner model that a key leads to have a plan of its own?"""
    child = dict(module.named_children())[key.partition(".")[0]]
    return any(m.__dict__.get("_tp_plan") or getattr(type(m), "_tp_plan", None) for m in child.modules())


def with_prefix(choices: Choices, modules: Iterable[str], parameters: Iterable[str]) -> Choices:
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
