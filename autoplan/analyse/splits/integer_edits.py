"""Find the stored integers that must become smaller on a rank, from the origin of each literal.

Every literal that was computed from a stored attribute is an equation: evaluated with the edited attributes and the
rank's own tensor sizes it must give the number that the rank needs. That holds for literals along split dimensions
(they shrink) and for all others (they stay). Equalities that the module's Python tests must keep their outcome, and an
attribute that turned into a float is never edited: it would change numbers. What no edit solves is left to the scoped
function mode or refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations, product
from math import prod
from typing import Any

from autoplan.analyse.infer import Shards
from autoplan.analyse.splits.literal_sizes import Requirement, made_whole, requirements
from autoplan.values import IntegerEdit, Symbolic, symbolics

Attribute = tuple[Any, ...]  # ("attr", module, name, index)
Values = tuple[int, ...]  # one number per rank

_MOST_EDITS = 4  # attributes edited together in one module


def evaluate(
    origin: tuple[Any, ...], size_of: Callable[[int, int], int], attribute: Callable[[Attribute], int | None]
) -> int | None:
    """Return the value of an origin on a rank, given local sizes and edited attributes; None if it is unknown."""
    kind = origin[0]
    if kind == "const":
        return int(origin[1])
    if kind == "attr":
        return attribute(origin)
    if kind == "size":
        return size_of(origin[1], origin[2])
    if kind == "numel":
        return size_of(origin[1], -1)
    values = [evaluate(part, size_of, attribute) for part in origin[1:]]
    if any(value is None for value in values):
        return None
    left = values[0]
    assert left is not None
    if kind == "neg":
        return -left
    right = values[1]
    assert right is not None
    if kind == "pow":
        return left**right if 0 <= right < 64 else None
    if kind in ("floordiv", "mod"):
        if right == 0:
            return None
        return left // right if kind == "floordiv" else left % right
    return {"add": left + right, "sub": left - right, "mul": left * right}.get(kind)


def attributes_of(size: Any) -> Iterator[Attribute]:
    """Yield the stored attributes an integer was computed from."""
    yield from size.parts("attr") if isinstance(size, Symbolic) else ()


@dataclass
class Edits:
    """The solution: new values by attribute, and the requirements and comparisons that no edit meets."""

    values: dict[Attribute, Values] = field(default_factory=dict)
    left: list[Requirement] = field(default_factory=list)
    broken_comparisons: list[tuple[str, Any, Any, bool]] = field(default_factory=list)

    def as_edits(self) -> tuple[IntegerEdit, ...]:
        edits = []
        for (_, module, name, index), values in self.values.items():
            holder, _, own = name.rpartition(".")
            per_rank = values if len(set(values)) > 1 else None
            edits.append(IntegerEdit(module, own, index, 0, values[0], per_rank, holder))
        return tuple(edits)


class _Equations:
    """All equations of a trace that involve stored attributes, by module."""

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        required = []
        for index, call in enumerate(shards.trace.calls):
            if not made_whole(call, shards):  # sliced afterwards: its sizes stay
                required += requirements(index, call, shards)
        self.required = required
        self.old: dict[Attribute, int] = {}
        self.of_module: dict[str, list[Requirement]] = defaultdict(list)
        self.plain_left: list[Requirement] = []
        self.fixed = {attribute for attribute, _ in shards.trace.escapes}
        for requirement in self._everything():
            modules = {attribute[1] for attribute in attributes_of(requirement.have)}
            for module in modules:
                self.of_module[module].append(requirement)
            if not modules and not self.holds(requirement, {}):
                self.plain_left.append(requirement)

    def _everything(self) -> Iterator[Requirement]:
        """Yield the requirements, and the literals elsewhere that must stay the same."""
        wanted = {(r.call, r.path) for r in self.required}
        yield from self.required
        for index, call in enumerate(self.shards.trace.calls):
            for path, item in (*symbolics(call.args, ("args",)), *symbolics(call.kwargs, ("kwargs",))):
                if (index, path) in wanted:
                    continue
                if any(True for _ in attributes_of(item)):
                    yield Requirement(index, path, item, (item.value,) * self.shards.tp)
                elif not (
                    made_whole(call, self.shards) or any(map(self.shards.is_split, (*call.reads, *call.results)))
                ):
                    # A size that Python reads from a sharded value and passes to a call on replicated ones
                    values = {self.value(item, {}, rank) for rank in range(self.shards.tp)}
                    if values - {None, item.value}:
                        yield Requirement(index, path, item, (item.value,) * self.shards.tp)

    def value(self, have: Any, edits: dict[Attribute, Values], rank: int) -> int | None:
        if not isinstance(have, Symbolic):
            return int(have)

        def attribute(origin: Attribute) -> int | None:
            return edits[origin][rank] if origin in edits else self.original(origin)

        return evaluate(have.origin, lambda tensor, dim: self._size(tensor, dim, rank), attribute)

    def seen(self, requirement: Requirement, edits: dict[Attribute, Values]) -> tuple[int, ...]:
        values = (self.value(requirement.have, edits, rank) for rank in range(self.shards.tp))
        return tuple(requirement.old if value is None else value for value in values)

    def original(self, attribute: Attribute) -> int | None:
        if attribute not in self.old:
            stored = self.shards.trace.attributes.get(attribute[1], {}).get(attribute[2])
            if stored is None:
                return None
            self.old[attribute] = stored if attribute[3] is None else stored[attribute[3]]
        return self.old[attribute]

    def _size(self, tensor: int, dim: int, rank: int) -> int:
        shape = self.shards.local_shape(tensor, rank)
        return prod(shape) if dim < 0 else shape[dim]

    def holds(self, requirement: Requirement, edits: dict[Attribute, Values]) -> bool:
        return all(self.value(requirement.have, edits, r) == requirement.want[r] for r in range(self.shards.tp))

    def same_outcome(self, comparison: tuple[str, Any, Any, bool], edits: dict[Attribute, Values]) -> bool:
        _, left, right, result = comparison
        if isinstance(left, float) or isinstance(right, float):
            return True
        for rank in range(self.shards.tp):
            a, b = self.value(left, edits, rank), self.value(right, edits, rank)
            if a is not None and b is not None and (a == b) != result:
                return False
        return True


def solve_edits(shards: Shards) -> Edits:
    """Find the smallest edits, module by module, that meet the most requirements and break none."""
    equations = _Equations(shards)
    solution = Edits(left=list(equations.plain_left))
    comparisons: dict[str, list[tuple[str, Any, Any, bool]]] = defaultdict(list)
    for comparison in shards.trace.comparisons:
        modules = {a[1] for side in comparison[1:3] for a in attributes_of(side)}
        for module in modules or {comparison[0]}:
            comparisons[module].append(comparison)
    for module in sorted(set(equations.of_module) | set(comparisons)):
        mine = equations.of_module.get(module, [])
        tests = comparisons.get(module, [])
        if all(equations.holds(r, {}) for r in mine) and all(equations.same_outcome(t, {}) for t in tests):
            continue
        edits = _best(equations, mine, tests)
        solution.values.update(edits)
        solution.left += [r for r in mine if not equations.holds(r, edits) and r not in solution.left]
        solution.broken_comparisons += [t for t in tests if not equations.same_outcome(t, edits)]
    solution.left = [replace(left, seen=equations.seen(left, solution.values)) for left in solution.left]
    return solution


def _best(
    equations: _Equations, mine: list[Requirement], tests: list[tuple[str, Any, Any, bool]]
) -> dict[Attribute, Values]:
    options = _options(equations, mine, tests)
    satisfied = [r for r in mine if equations.holds(r, {})]
    unchanged = [t for t in tests if equations.same_outcome(t, {})]

    def score(edits: dict[Attribute, Values]) -> int:
        if not all(equations.holds(r, edits) for r in satisfied) or not all(
            equations.same_outcome(t, edits) for t in unchanged
        ):
            return -1
        return sum(equations.holds(r, edits) for r in mine) + sum(equations.same_outcome(t, edits) for t in tests)

    best: dict[Attribute, Values] = {}
    most = score(best)
    for count in range(1, min(_MOST_EDITS, len(options)) + 1):
        for attributes in combinations(options, count):
            for values in product(*(options[a] for a in attributes)):
                edits = dict(zip(attributes, values, strict=True))
                reached = score(edits)
                if reached > most:
                    best, most = edits, reached
        if most == len(mine) + len(tests):
            break
    return best


def _options(
    equations: _Equations, mine: list[Requirement], tests: list[tuple[str, Any, Any, bool]]
) -> dict[Attribute, list[Values]]:
    """Return the values worth trying for each attribute in a failing equation: scaled as the equation asks."""
    options: dict[Attribute, dict[Values, None]] = defaultdict(dict)
    tp = equations.shards.tp
    for requirement in mine:
        if equations.holds(requirement, {}):
            continue
        for attribute in attributes_of(requirement.have):
            _add_option(equations, options, attribute, requirement.old, requirement.want)
    for test in tests:
        if not equations.same_outcome(test, {}):
            for side in test[1:3]:
                for attribute in attributes_of(side):
                    _add_option(equations, options, attribute, tp, (1,) * tp)
    return {attribute: list(values) for attribute, values in options.items()}


def _add_option(
    equations: _Equations, options: dict[Attribute, dict[Values, None]], attribute: Attribute, old: int, want: Values
) -> None:
    stored = equations.original(attribute)
    if attribute in equations.fixed or not stored:
        return
    tp = equations.shards.tp
    if old and all(stored * w % old == 0 for w in want):
        options[attribute][tuple(stored * w // old for w in want)] = None
    if stored % tp == 0:
        options[attribute][(stored // tp,) * tp] = None
