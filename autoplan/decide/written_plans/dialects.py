"""Plans as torch and transformers write them, and the dotted patterns that both use."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from autoplan.common.conventions import conventions
from autoplan.common.patterns import matches
from autoplan.common.rules_folder import importable_here
from autoplan.decide.written_plans.choices import ChosenCut, ChosenCuts, WrittenPlanError, check_key, check_style
from autoplan.values import Plan

# Dotted paths: `pkg.module.NAME`, `pkg.module.Class.attribute`, `pkg.module:function`. The value is a plan, or a
# function that returns one, of no argument, of the model, or of the model and `sequence_parallel`.


def looks_dotted(text: str) -> bool:
    """Return whether this could be a dotted path. (Whether it leads anywhere is another question.)"""
    parts = text.replace(":", ".").split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def plan_at(path: str, model: Any, sequence_parallel: bool = False) -> Mapping[str, Any] | Plan:
    """Return the dict or Plan that a dotted path leads to."""
    with importable_here():
        value = _value_at(path)
    called = ""
    if callable(value) and not isinstance(value, Mapping):
        try:
            value, called = _called(value, path, model, sequence_parallel), "() returned"
        except WrittenPlanError:
            raise
        except (Exception, SystemExit) as error:
            raise WrittenPlanError(f"{path} raises when it is called: {_said(error)}", hint="fix it first") from error
    if isinstance(value, (Mapping, Plan)):
        return value
    kind = type(value)
    of = f"a {kind.__name__}" if kind.__module__ == "builtins" else f"a {kind.__module__}.{kind.__qualname__}"
    raise WrittenPlanError(
        f"{path}{called or ' is'} {of}, which is not a plan",
        hint="it must be a dict of pattern: style, an autoplan Plan, or a function that returns one",
    )


def _value_at(path: str) -> Any:
    parts = path.replace(":", ".").split(".")
    for length in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:length])
        if not _exists(name):
            continue
        try:
            value = import_module(name)
        except ImportError as error:
            raise WrittenPlanError(f"{path}: importing {name} failed: {error}", hint="install what it needs") from error
        except (Exception, SystemExit) as error:
            raise WrittenPlanError(f"{path} raises on import: {_said(error)}", hint=f"fix {name} first") from error
        for part in parts[length:]:
            if not hasattr(value, part):
                public = [attribute for attribute in dir(value) if not attribute.startswith("_")]
                raise WrittenPlanError(f"{path}: {name} has no {part!r}", hint=f"it has {', '.join(public[:12])}")
            value, name = getattr(value, part), f"{name}.{part}"
        return value
    raise WrittenPlanError(
        f"{path}: no module named {parts[0]!r}", hint="check the spelling, and that its folder is on PYTHONPATH"
    )


def _exists(module: str) -> bool:
    if module in sys.modules:  # `__main__` is there but has no spec
        return True
    try:
        return find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):  # a parent is missing, or is no package
        return False


def _called(function: Callable[..., Any], path: str, model: Any, sequence_parallel: bool) -> Any:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise WrittenPlanError(f"{path} cannot be called: {error}", hint="pass a plain function") from error
    offered = {"model": model, "sequence_parallel": sequence_parallel}
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.name in offered for p in places):
        arguments = {p.name: offered[p.name] for p in places if p.name in offered}
        unfilled = [p for p in places if p.name not in offered and p.default is p.empty]
        if not unfilled:
            return function(**arguments)
    required = [p for p in places if p.default is p.empty]
    if len(required) > 2:
        names = ", ".join(p.name for p in required)
        raise WrittenPlanError(f"{path} requires ({names})", hint="allowed: (), (model) or (model, sequence_parallel)")
    return function(*list(offered.values())[: len(required)])


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


# Dicts of `ParallelStyle` objects. Only the side of the weight to shard is a choice; layouts follow from it.
# Frameworks subclass torch's styles, so a class is recognised by its ancestors.

_LAYOUT_ONLY = ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")


def read_style(pattern: str, style: Any, name: str, *, by_position: bool) -> tuple[ChosenCut, ...]:
    """Return the choices of one line of a dict: a style's name, as transformers writes it, or a style object, of which
    ours may cover several parameters of their module."""
    if isinstance(style, str):
        return (ChosenCut(pattern, check_style(style, pattern, name, ALIASES), name, style, by_position),)
    classes = [cls.__name__ for cls in type(style).__mro__]
    if classes[0] == "PlannedModel":
        return ()
    choices = style.choices if "PlannedModule" in classes else [(pattern, _style_of(style, pattern, name))]
    layouts = [
        f"{side}={layout[0] if isinstance(layout, tuple) and layout else layout}"
        for side in ("input_layouts", "output_layouts")
        if (layout := getattr(style, side, None)) is not None
    ]
    written = f"{classes[0]}({', '.join(layouts)})"
    return tuple(ChosenCut(planned, chosen, name, written) for planned, chosen in choices)


def _style_of(style: Any, pattern: str, name: str) -> str:
    ancestors = [cls.__name__ for cls in type(style).__mro__]
    if "ColwiseParallel" in ancestors:
        return "colwise_gather_output" if _is_whole(getattr(style, "output_layouts", None)) else "colwise"
    if "RowwiseParallel" in ancestors:
        return "rowwise_split_input" if _is_whole(getattr(style, "input_layouts", None)) else "rowwise"
    if "SequenceParallel" in ancestors:
        return "sequence_parallel"
    if "ReplicatedWithGradAllReduce" in ancestors:
        return "replicated_with_grad_allreduce"
    if any(layout in ancestors for layout in _LAYOUT_ONLY):
        return "local_params"
    cls = type(style)
    raise WrittenPlanError(
        f"{name}: {pattern!r} has a {cls.__module__}.{cls.__qualname__}, which is not a style that autoplan knows",
        hint="use ColwiseParallel, RowwiseParallel or SequenceParallel, a subclass of them, or a style's name "
        "such as 'packed_colwise'",
    )


def _is_whole(layouts: Any) -> bool:
    """Return whether the (first) layout is Replicate()."""
    first = layouts[0] if isinstance(layouts, (list, tuple)) and layouts else layouts
    return type(first).__name__ == "Replicate"


# transformers' plans: strings by module or parameter. A model's plan is assembled from parts (hf/own_sharding.py);
# the place of a key decides its meaning, so each choice records that.

# Older and alternative names in transformers; ours are its newest.
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


def hf_plan(model: object, name: str) -> ChosenCuts:
    """Return the plan that transformers itself would apply to a model, every key with its origin."""
    parts, parts_notes = conventions().shipped_parts(model)
    styles: dict[str, tuple[str, str]] = {}
    for part in parts:
        for key, style in part.styles.items():
            check_key(key, part.origin)
            styles[f"{part.prefix}.{key}" if part.prefix else key] = (style, part.origin)
    if not styles:
        raise WrittenPlanError(
            f"{name} has no transformers plan: {conventions().no_plan_because()}",
            hint="use source='inferred' (analysis), source='auto', or write one: source={pattern: style}",
        )
    choices = tuple(
        ChosenCut(key, check_style(style, key, origin, ALIASES), origin, style, by_position=True)
        for key, (style, origin) in styles.items()
    )
    notes = tuple(f"{c.pattern}: {c.written} comes from {c.origin}" for c in choices)
    return ChosenCuts(f"transformers' plan of {name}", "hf", choices, notes=(*notes, *parts_notes))


def with_prefix(choices: ChosenCuts, modules: Iterable[str], parameters: Iterable[str]) -> ChosenCuts:
    """Make keys relative to an inner model (as configs write them) absolute, if one prefix fits all dead keys."""
    modules = list(modules)
    names = [*modules, *parameters]
    dead = [c for c in choices.choices if not any(matches(c.pattern, name) for name in names)]
    if not dead:
        return choices
    for prefix in sorted((m for m in modules if m), key=lambda name: (name.count("."), name)):
        if all(any(matches(f"{prefix}.{c.pattern}", name) for name in names) for c in dead):
            moved = tuple(replace(c, pattern=f"{prefix}.{c.pattern}") if c in dead else c for c in choices.choices)
            note = f"{len(dead)} keys are relative to {prefix!r}"
            return replace(choices, choices=moved, notes=(*choices.notes, note), _cache={})
    return choices
