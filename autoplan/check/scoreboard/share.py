"""How much of a model does a plan cut, and what does a block of it cost? The figures on a scoreboard.

Only parameters with two dims or more count (norms and biases weigh nothing). Position and type tables (every table but
the largest that the model's own inputs look up: in a tiny clone a position table may be larger than the vocabulary) and
the small latents of latent attention may stay whole without counting. A parameter that no run of the model used is
whole for want of evidence: it counts, and is listed apart.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from autoplan.analyse.picture.dataflow import dataflow
from autoplan.analyse.picture.flow import Flow, node_of
from autoplan.analyse.solve import Solution
from autoplan.common.patterns import matches
from autoplan.decide.naming import Reading, readings
from autoplan.decide.plan.folding import Names
from autoplan.values import Collective, Instruction, Move, Plan, SequenceBoundary, Stack

_TABLE = {"embedding", "shift", "parameter"}  # what may be done to a table: looked up, added
_LATENT = "latent"  # how the roles of latent attention end


@dataclass(frozen=True)
class Share:
    """`split` of `counted` elements of weights are cut; `whole` and `unused` are patterns of the others."""

    split: int
    counted: int
    whole: tuple[str, ...]
    unused: tuple[str, ...]


def share_of(solution: Solution, plan: Plan) -> Share:
    """Count the elements of the whole model's weights, blocks that were folded included."""
    names = Names(solution.trace)
    facts = [fact for fact in solution.parameters if not fact.buffer and sum(size > 1 for size in fact.shape) > 1]
    flow = dataflow(solution.trace)
    read = readings(flow, solution.parameters)
    tables = {fact.names[0] for fact in facts if _is_table(read.get(fact.names[0], ()))}
    looked_up = [fact for fact in facts if _by_input(read.get(fact.names[0], ()), flow)]
    largest = max(looked_up, key=lambda fact: fact.bytes, default=None)
    latents = [item.fqn for item in plan.replicated if any(role.split()[-1] == _LATENT for role in item.roles)]
    counted = cut = 0
    whole: dict[str, list[str]] = {}
    unused: list[str] = []
    for fact in facts:
        name = fact.names[0]
        small = (name in tables and fact is not largest) or any(matches(pattern, name) for pattern in latents)
        if fact.dim is None and small:
            continue
        number = len(names.expand(name)) * prod(fact.shape)
        counted += number
        if fact.dim is not None:
            cut += number
        elif not read.get(name):
            unused.append(name)
        else:
            whole.setdefault(fact.reason, []).append(name)
    listed = [f"{p}: {why}" for why, members in whole.items() for p in names.fold(members, parameters=True)]
    return Share(cut, counted, tuple(listed), names.fold(unused, parameters=True) if unused else ())


def _is_table(read: Iterable[Reading]) -> bool:
    kinds = {reading.node.kind for reading in read}
    return bool(kinds) and kinds <= _TABLE


def _by_input(read: Iterable[Reading], flow: Flow) -> bool:
    """Is it looked up by what the model was given (token ids), not by numbers that it made (positions, types)?"""
    boxes = [reading.box for reading in read if reading.node.kind == "embedding"]
    return any(node_of(flow, source).kind == "input" for box in boxes for source in flow.predecessors(box))


def main_stack(stacks: Iterable[Stack]) -> Stack | None:
    """The decoder if there is one, else the longest stack."""
    found = sorted(stacks, key=lambda stack: (stack.kind != "decoder", -len(stack.fqns)))
    return found[0] if found else None


def reductions_per_block(plan: Plan) -> tuple[float | None, float | None]:
    """All-reduces in a block of the main stack, forward and backward, on average over its blocks."""
    stack = main_stack(plan.layers)
    if stack is None:
        return None, None
    sites = _sites(plan)
    inside = [(f, b) for fqn in stack.fqns for pattern, f, b in sites if _is_inside(pattern, fqn)]
    blocks = len(stack.fqns)
    return sum(f for f, _ in inside) / blocks, sum(b for _, b in inside) / blocks


def regions_per_block(plan: Plan) -> float | None:
    """How often a block of the main stack gathers the whole sequence where it enters a region, on average."""
    stack = main_stack(plan.layers)
    if stack is None:
        return None
    gathers = [b.pattern for b in plan.runtime.of(SequenceBoundary) if Move(Collective.ALL_GATHER) in b.moves]
    return sum(_is_inside(pattern, fqn) for fqn in stack.fqns for pattern in gathers) / len(stack.fqns)


def _sites(plan: Plan) -> list[tuple[str, int, int]]:
    """Where the plan reduces: pattern, all-reduces forward, all-reduces backward."""
    runtime = plan.runtime
    found = [(one.pattern, _sums(one, backward=False), _sums(one, backward=True)) for one in runtime.instructions]
    found += [(rule.pattern, 0, 1) for rule in runtime.parameters if rule.gradient != "local"]
    return found


def _sums(one: Instruction, *, backward: bool) -> int:
    return sum(move.times for move in one.moves if move.backward == backward and move.sums)


def _is_inside(pattern: str, block: str) -> bool:
    """Is what the pattern names the block, or in it?"""
    depth = block.count(".") + 1
    return matches(".".join(pattern.split(".")[:depth]), block)
