"""Dicts of `ParallelStyle` objects, as torch's `parallelize_module` and the frameworks on top of it take them.

A style object says two things at once: which side of the weight is cut, and which layouts go in and out. Only the first
is a choice here; layouts follow from it. Frameworks subclass torch's styles (LoRA variants, vocabulary embeddings), so
a class is recognised by its ancestors; a class with none that is known is refused with its path.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.decide.written_plans.choices import ChosenCut, WrittenPlanError

__all__ = ["read_styles"]

_LAYOUT_ONLY = ("PrepareModuleInput", "PrepareModuleOutput", "PrepareModuleInputOutput")


def read_styles(plan: Mapping[str, Any], name: str) -> tuple[ChosenCut, ...]:
    """ChosenCuts of the style objects in a dict. Strings are another dialect's and are not looked at."""
    return tuple(
        ChosenCut(planned, chosen, name, _written(style))
        for pattern, style in plan.items()
        if not isinstance(style, str) and type(style).__name__ != "PlannedModel"
        for planned, chosen in _choices_of(style, pattern, name)
    )


def _choices_of(style: Any, pattern: str, name: str) -> tuple[tuple[str, str], ...]:
    """What a style object chooses, and for which pattern: ours may speak for several parameters of its module."""
    if "PlannedModule" in [cls.__name__ for cls in type(style).__mro__]:
        return tuple(style.choices)
    return ((pattern, _style_of(style, pattern, name)),)


def _style_of(style: Any, pattern: str, name: str) -> str:
    ancestors = [cls.__name__ for cls in type(style).__mro__]
    if "ColwiseParallel" in ancestors:
        return "colwise_gather_output" if _is_whole(getattr(style, "output_layouts", None)) else "colwise"
    if "RowwiseParallel" in ancestors:
        return "rowwise_split_input" if _is_whole(getattr(style, "input_layouts", None)) else "rowwise"
    if "SequenceParallel" in ancestors:
        return "sequence_parallel"
    if any(layout in ancestors for layout in _LAYOUT_ONLY):
        return "local_params"
    cls = type(style)
    raise WrittenPlanError(
        f"{name}: {pattern!r} has a {cls.__module__}.{cls.__qualname__}, which is no style that autoplan knows",
        hint="use ColwiseParallel, RowwiseParallel or SequenceParallel, a subclass of them, or a style's name "
        "such as 'packed_colwise'",
    )


def _is_whole(layouts: Any) -> bool:
    """Is the (first) layout Replicate()?"""
    first = layouts[0] if isinstance(layouts, (list, tuple)) and layouts else layouts
    return type(first).__name__ == "Replicate"


def _written(style: Any) -> str:
    layouts = [
        f"{side}={layout[0] if isinstance(layout, tuple) and layout else layout}"
        for side in ("input_layouts", "output_layouts")
        if (layout := getattr(style, side, None)) is not None
    ]
    return f"{type(style).__name__}({', '.join(layouts)})"
