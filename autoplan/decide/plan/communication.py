"""The communication of a plan, block by block: equal blocks said once, a line for whatever exceeds the least."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autoplan.analyse.moved import block_traffic
from autoplan.analyse.solve import Solution
from autoplan.decide.plan.folding import Names
from autoplan.values import Finding, Stack, Traffic

__all__ = ["communication"]


def communication(
    solution: Solution, layers: Iterable[Stack], names: Names
) -> tuple[tuple[Traffic, ...], tuple[Finding, ...]]:
    """What blocks move compared with the least they need, and findings that explain each excess."""
    if solution.shards is None or solution.tp_size == 1:
        return (), ()
    blocks = [fqn for stack in layers for fqn in stack.fqns]
    found, excesses = block_traffic(solution.shards, solution.runtime, solution.reductions, blocks)
    alike: dict[str, tuple[Traffic, list[str]]] = {}
    for one in found:
        same = replace(one, block="")
        alike.setdefault(repr(same), (same, []))[1].append(one.block)
    said: dict[str, list[str]] = {}
    for excess in excesses:
        said.setdefault(excess.reason, []).append(excess.block)
    traffic = [replace(same, block=pattern) for same, members in alike.values() for pattern in names.fold(members)]
    notes = [
        Finding("communication", "note", pattern, reason)
        for reason, members in said.items()
        for pattern in names.fold(members)
    ]
    return tuple(traffic), tuple(notes)
