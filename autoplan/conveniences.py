"""The implementations of `plan.save(…)`, `plan.explain(…)` and similar methods of values.

They are at the top of the import order, since they use rooms all over the package.

Importing this imports no torch: each function loads its room when it is called.

It also registers transformers' conventions for rooms below hf/ (common/conventions.py).
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any

from autoplan.common.conventions import conventions, hand_in
from autoplan.common.options import check_argument
from autoplan.hf.conventions import TRANSFORMERS
from autoplan.values import Change, Plan
from autoplan.values.estimate import Estimate, provide

if TYPE_CHECKING:
    from autoplan.emit.exports.export import Exported, Surroundings


def _late(function: str) -> Callable[..., Any]:
    """Return a function, given as "room:function", that is loaded when it is called."""
    room, _, name = function.partition(":")
    return lambda *args, **kwargs: getattr(import_module(f"autoplan.{room}"), name)(*args, **kwargs)


def _text(view: str) -> Callable[[Any], str]:
    """Return a function that shows a value as text, by its view for terminals."""
    return lambda value: str(_late("emit.tables.terminal:plain_text")(_late(view)(value)))


def _page(page: str) -> Callable[[Any, str | PathLike[str]], None]:
    """Return a function that writes a value's page."""
    return lambda value, path: _late("emit.pages.markup:write_page")(path, lambda: _late(page)(value))


def _explain(plan: Plan, path: str) -> str:
    from autoplan.emit.explain import explain

    check_argument("path", path, str, "pass the path of a module or a parameter, or a pattern")
    return explain(plan, path)


def _diff(plan: Plan, other: Plan) -> tuple[Change, ...]:
    from autoplan.emit.explain import diff

    check_argument("other", other, Plan, "pass another plan, such as autoplan.load_plan(path)")
    return diff(plan, other)


def _to_torch(plan: Plan, *, gather_logits: bool | None) -> dict[str, Any]:
    from autoplan.execute.parallelize import to_torch

    return dict(to_torch(plan, gather_logits=gather_logits))


def _to_hf(plan: Plan, model: Any, *, old: bool, drop: bool) -> dict[str, str]:
    from autoplan.emit.exports.hf import to_hf

    return to_hf(plan, shipped=tuple(conventions().shipped_plan(model)), old=old, drop=drop)


def _export(plan: Plan, target: str, model: Any, *, drop: bool) -> Exported:
    from autoplan.emit.exports.export import Surroundings, export

    check_argument("target", target, str, "pass a target system; `autoplan export --help` lists them")
    if model is None:
        return export(plan, target, Surroundings(), drop=drop)
    return export(plan, target, surroundings(plan, model), drop=drop)


def surroundings(plan: Plan, model: Any) -> Surroundings:
    """Return the parts of a model that an export needs: its own plan, the classes of its blocks, its linear layers."""
    from torch import nn

    from autoplan.emit.exports.export import Surroundings

    kinds = (type(model.get_submodule(name)) for stack in plan.layers for name in stack.fqns)
    blocks = dict.fromkeys(f"{cls.__module__}.{cls.__qualname__}" for cls in kinds)
    linears = tuple(name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    library = conventions()
    base = library.base_path(model)
    inner = {
        f"{name}.{key}": style
        for name, child in model.get_submodule(base).named_children()
        for key, style in library.shipped_plan(child).items()
    }
    return Surroundings(tuple(library.shipped_plan(model)), tuple(blocks), linears, base, tuple(inner.items()))


def _part_for(plan: Plan, model: Any) -> Plan:
    from torch import nn

    from autoplan.execute.parallelize import part_for

    check_argument("model", model, nn.Module, "pass the stage itself, an nn.Module")
    return part_for(plan, model)


def _plan_report(
    plan: Plan, path: str | PathLike[str], *, estimate: Estimate | None, memory: str | int | None, what_if: Any
) -> None:
    from autoplan.emit.pages.markup import write_page
    from autoplan.emit.pages.page import plan_page

    check_argument("estimate", estimate, (Estimate, type(None)), "pass the result of autoplan.estimate")
    check_argument("what_if", what_if, (dict, type(None)), "pass {tp size: autoplan.WhatIf}")
    write_page(path, lambda: plan_page(plan, plan.to_dict(), estimate, _bytes(memory), what_if or {}))


def _bytes(memory: str | int | None) -> int:
    check_argument("memory", memory, (str, int, type(None)), "pass it like 80GB, or a number of bytes")
    if memory is None or isinstance(memory, int):
        return memory or 0
    from autoplan.forecast.choose import parse_memory

    return parse_memory(memory)


def _choice_page(found: Any, path: str | PathLike[str]) -> None:
    from autoplan.emit.pages.markup import write_page
    from autoplan.emit.pages.others import choice_page

    write_page(path, lambda: choice_page(found, found.plan if found.fits else None, found.pictured()))


provided: dict[str, Callable[..., Any]] = {
    "Plan.__str__": _text("emit.tables.terminal:plan_view"),
    "Plan.explain": _explain,
    "Plan.diff": _diff,
    "Plan.to_dict": _late("decide.written_plans.plan_file:plan_to_dict"),
    "Plan.to_torch": _to_torch,
    "Plan.to_hf": _to_hf,
    "Plan.export": _export,
    "Plan.part_for": _part_for,
    "Plan.save": _late("decide.written_plans.plan_file:save_plan"),
    "Plan.report": _plan_report,
    "Plan._repr_html_": _late("emit.pages.others:plan_cell"),
    "Report.report": _page("emit.pages.others:report_page"),
    "Report._repr_html_": _late("emit.pages.others:report_cell"),
    "Estimate._repr_html_": _late("emit.pages.others:estimate_cell"),
    "Choice.report": _choice_page,
    "Choice._repr_html_": _late("emit.pages.others:choice_cell"),
    "Report.__str__": _text("emit.tables.terminal:report_view"),
    "Estimate.__str__": _text("emit.tables.estimate_table:estimate_view"),
    "Estimate.to_dict": _late("emit.tables.estimate_table:estimate_to_dict"),
    "Choice.__str__": _text("emit.tables.estimate_table:choice_view"),
}
provide(provided)
hand_in(TRANSFORMERS)
