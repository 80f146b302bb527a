"""Plans of quantised models for other systems: each entry by the plain weight that its stored tensors stand for.

Other systems are told how a module is cut, and cut what they hold in its place themselves. Whether that ends at whole
blocks our plan has settled. One system cuts every stored tensor along the dim of the plain weight: what is stored
along other dims it cannot be told.
"""

from __future__ import annotations

from dataclasses import replace

from autoplan.common.patterns import matches
from autoplan.values import Entry, Plan
from autoplan.values.quantised import PackedWeight

__all__ = ["cut_otherwise", "in_plain_weights"]


def in_plain_weights(plan: Plan) -> Plan:
    """The same plan with the names and cuts of plain weights in its entries."""
    return replace(plan, entries=tuple(_plain(entry, plan) for entry in plan.entries)) if plan.packed else plan


def cut_otherwise(plan: Plan, entry: Entry) -> str:
    """Why tensor by tensor along the weight's dim is not how an entry's weight is cut; "" if it is."""
    for weight in _stored(plan, entry):
        dim = _cut(plan, weight)[0]
        first = weight.tensors[0]
        other = next((t for t in weight.tensors if t.dims and t.dim != dim), None)
        if dim is not None and (first.name != weight.parameter or other is not None):
            wrong = first if first.name != weight.parameter or other is None else other
            return f"it is stored as {weight.scheme.title}: {wrong.name} is not cut along the dim of the weight"
    return ""


def _plain(entry: Entry, plan: Plan) -> Entry:
    parameters = dict(zip(entry.parameters, entry.segments, strict=True))
    for weight in _stored(plan, entry):
        dim, layout = _cut(plan, weight)
        named = next((n for n in parameters if n.rpartition(".")[2] == weight.tensors[0].name), None)
        if named is None:
            continue
        before = named.removesuffix(weight.tensors[0].name)
        gone = {f"{before}{tensor.name}" for tensor in weight.tensors}
        others = {name: segment for name, segment in parameters.items() if name not in gone}
        parameters = {f"{before}{weight.parameter}": "whole" if dim is None else f"{dim}:{layout}"} | others
    return replace(entry, parameters=tuple(parameters), segments=tuple(parameters.values()))


def _stored(plan: Plan, entry: Entry) -> list[PackedWeight]:
    """The first of like weights, for each parameter."""
    mine = [w for w in plan.packed if matches(entry.pattern, w.owner) or matches(entry.pattern, w.name)]
    return list({weight.parameter: weight for weight in reversed(mine)}.values())


def _cut(plan: Plan, weight: PackedWeight) -> tuple[int | None, str | None]:
    rules = plan.runtime.parameters
    found = next((one for one in rules if matches(one.pattern, weight.name) or one.pattern == weight.name), None)
    return (None, None) if found is None else (found.dim, found.layout)
