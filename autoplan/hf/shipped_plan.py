"""The plan that transformers ships with a model: in which classes, configs and instances its keys were written.

A file of its own: the only one that knows where transformers keeps plans. What their styles mean is read elsewhere
(decide/written_plans/transformers_plans.py), as for plans of any other origin.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from autoplan.common.conventions import PlanPart

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

__all__ = ["plan_parts", "shipped_plan"]

_OTHER_MESHES = ("_ep_plan", "_fsdp_plan")


def shipped_plan(model: object) -> Mapping[str, str]:
    """All its keys, as transformers puts them together for a model."""
    return dict(getattr(model, "_tp_plan", None) or {})


def plan_parts(
    model: nn.Module, config_of: Callable[[nn.Module], PretrainedConfig | None]
) -> tuple[tuple[PlanPart, ...], tuple[str, ...]]:
    """The same plan part by part, and notes on what else the model ships."""
    parts = [
        PlanPart(prefix, origin, plan)
        for prefix, module in model.named_modules()
        for origin, plan in _parts_of(module, config_of(module))
        if plan
    ]
    notes = [
        f"transformers' {attribute} ({len(other)} rules) is for other mesh dims and is not used"
        for attribute in _OTHER_MESHES
        if (other := getattr(model, attribute, None))
    ]
    return tuple(parts), tuple(notes)


def _parts_of(module: nn.Module, config: PretrainedConfig | None) -> Iterator[tuple[str, dict[str, str]]]:
    """(origin, plan) of one module, keys relative to it: its class's, its config's if it is the base model, its own."""
    cls = type(module)
    of_class = dict(cls.__dict__.get("_tp_plan") or getattr(cls, "_tp_plan", None) or {})
    yield f"{cls.__name__}._tp_plan", of_class
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
