"""The implementations of `plan.save(…)`, `plan.explain(…)` and similar methods of values.

They are at the top of the import order, since they use rooms all over the package.

Importing this imports no torch: each function loads its room when it is called.

It also registers transformers' conventions for rooms below hf/ (common/conventions.py).
"""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from typing import TYPE_CHECKING, Any

from autoplan.common.conventions import conventions, hand_in
from autoplan.common.options import check_argument
from autoplan.hf.conventions import TRANSFORMERS
from autoplan.values import Change, Plan, Report
from autoplan.values.estimate import Estimate, provide

if TYPE_CHECKING:
    from autoplan.emit.exports.export import Exported, Surroundings


def _plan_text(plan: Plan) -> str:
    from autoplan.emit.tables.terminal import plain_text, plan_view

    return plain_text(plan_view(plan))


def _report_text(report: Report) -> str:
    from autoplan.emit.tables.terminal import plain_text, report_view

    return plain_text(report_view(report))


def _explain(plan: Plan, path: str) -> str:
    from autoplan.emit.explain import explain

    check_argument("path", path, str, "pass the path of a module or a parameter, or a pattern")
    return explain(plan, path)


def _diff(plan: Plan, other: Plan) -> tuple[Change, ...]:
    from autoplan.emit.explain import diff

    check_argument("other", other, Plan, "pass another plan, such as autoplan.load_plan(path)")
    return diff(plan, other)


def _to_dict(plan: Plan) -> dict[str, Any]:
    from autoplan.decide.written_plans.plan_file import plan_to_dict

    return plan_to_dict(plan)


def _to_torch(plan: Plan, *, gather_logits: bool | None) -> dict[str, Any]:
    from autoplan.execute.styles import to_torch

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

    from autoplan.execute.styles import part_for

    check_argument("model", model, nn.Module, "pass the stage itself, an nn.Module")
    return part_for(plan, model)


def _save(plan: Plan, path: str | PathLike[str]) -> None:
    from autoplan.decide.written_plans.plan_file import save_plan

    save_plan(plan, path)


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


def _report_page(report: Report, path: str | PathLike[str]) -> None:
    from autoplan.emit.pages.markup import write_page
    from autoplan.emit.pages.others import report_page

    write_page(path, lambda: report_page(report))


def _choice_page(found: Any, path: str | PathLike[str]) -> None:
    from autoplan.emit.pages.markup import write_page
    from autoplan.emit.pages.others import choice_page

    write_page(path, lambda: choice_page(found, found.plan if found.fits else None, found.pictured()))


def _in_notebook(of: str) -> Callable[[Any], str]:
    def shown(value: Any) -> str:
        from autoplan.emit.pages import others

        return str(getattr(others, of)(value))

    return shown


def _estimate_text(found: Estimate) -> str:
    from autoplan.emit.tables.estimate_table import estimate_view
    from autoplan.emit.tables.terminal import plain_text

    return plain_text(estimate_view(found))


def _estimate_to_dict(found: Estimate) -> dict[str, Any]:
    from autoplan.emit.tables.estimate_table import estimate_to_dict

    return estimate_to_dict(found)


def _choice_text(found: Any) -> str:
    from autoplan.emit.tables.estimate_table import choice_view
    from autoplan.emit.tables.terminal import plain_text

    return plain_text(choice_view(found))


provided: dict[str, Callable[..., Any]] = {
    "Plan.__str__": _plan_text,
    "Plan.explain": _explain,
    "Plan.diff": _diff,
    "Plan.to_dict": _to_dict,
    "Plan.to_torch": _to_torch,
    "Plan.to_hf": _to_hf,
    "Plan.export": _export,
    "Plan.part_for": _part_for,
    "Plan.save": _save,
    "Plan.report": _plan_report,
    "Plan._repr_html_": _in_notebook("plan_cell"),
    "Report.report": _report_page,
    "Report._repr_html_": _in_notebook("report_cell"),
    "Estimate._repr_html_": _in_notebook("estimate_cell"),
    "Choice.report": _choice_page,
    "Choice._repr_html_": _in_notebook("choice_cell"),
    "Report.__str__": _report_text,
    "Estimate.__str__": _estimate_text,
    "Estimate.to_dict": _estimate_to_dict,
    "Choice.__str__": _choice_text,
}
provide(provided)
hand_in(TRANSFORMERS)
