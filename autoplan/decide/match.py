"""Find what rules describe in a picture of the dataflow, and settle who claims what.

A match binds every box of a rule's flow to a box of the picture, no two to the same one. The boxes that the rule yields
a style for are claimed, all or none: where a match of a rule that beats this one claims any of them, the whole match is
dropped, and beats nothing itself. Where two rules claim one box and neither beats the other, the match that binds more
boxes has it, then the rule with more guards, then the id that comes first in the alphabet: each box has one rule at
most, whatever the order of files.

A weight that runs very often (a recurrence, step by step) is bound in its first and last runs only: those between have
nothing to add to its name.

Interior boxes are not read from outside: for a direct arrow `a -> b` every reader of a must be in the match, when the
flow also says where a comes from. (`a ~> b` allows other readers: keys are read by the layers that share them.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import networkx as nx

from autoplan.analyse.picture.flow import Flow, node_of
from autoplan.decide.rulebook.conditions import Condition
from autoplan.decide.rulebook.pattern import Arrow, Pattern
from autoplan.decide.rulebook.read import Rule

TRANSPARENT = {"scale", "shift"}
CARRYING = {
    *("scale", "shift", "norm", "split", "cat", "mul", "add", "mix", "write", "pick", "scatter", "sum", "softmax"),
    *("statistic",),
}
ENDS = 4  # runs of a weight at each end that are bound
MOST_STEPS = 300_000  # steps between boxes in the search for one rule: architectures of transformers need 2,200 at most


@dataclass(frozen=True)
class Found:
    """A rule that matches at these boxes; `claims` are those it yields a style for."""

    rule: Rule
    boxes: tuple[tuple[str, int], ...]

    @property
    def claims(self) -> tuple[tuple[str, int], ...]:
        bound = dict(self.boxes)
        return tuple((name, bound[name]) for name, _ in self.rule.yields)


@dataclass(frozen=True)
class Refusal:
    """A match of the flow in which a guard does not hold."""

    rule: Rule
    boxes: tuple[tuple[str, int], ...]
    because: str


@dataclass(frozen=True)
class Contest:
    """Two rules claimed one box and neither beats the other: `winner` has it."""

    winner: str
    loser: str
    box: int


@dataclass(frozen=True)
class Matching:
    """The outcome for one picture."""

    found: tuple[Found, ...]
    refusals: tuple[Refusal, ...]
    contests: tuple[Contest, ...]
    given_up: tuple[str, ...] = ()  # rules whose search was ended early


def match_rules(flow: Flow, rules: Iterable[Rule], tp: int | None = None, *, refused: bool = True) -> Matching:
    """Match every rule. `tp` is checked against sizes only in examples. `refused`: also collect refusals, of which
    there may be many (without, guards are checked early)."""
    reach = _Reach(flow)
    matched: list[Found] = []
    refusals: list[Refusal] = []
    for rule in rules:
        some, not_held = match_rule(reach, rule, tp, refused=refused)
        matched += some
        refusals += not_held
    agreed, contests = _settled(_without_beaten(matched))
    return Matching(tuple(agreed), tuple(refusals), tuple(contests), tuple(reach.given_up))


def _settled(matched: list[Found]) -> tuple[list[Found], list[Contest]]:
    """Give each box to one rule, in the order of the module docstring; return the remaining matches as ordered."""
    owner: dict[int, str] = {}
    contests: dict[Contest, None] = {}
    lost: set[int] = set()
    for place, match in sorted(enumerate(matched), key=lambda item: _strength(item[1])):
        rule, boxes = match.rule.id, [box for _, box in match.claims]
        taken = [Contest(owner[box], rule, box) for box in boxes if owner.get(box, rule) != rule]
        if taken:
            contests.update(dict.fromkeys(taken))
            lost.add(place)
        else:
            owner.update(dict.fromkeys(boxes, rule))
    return [match for place, match in enumerate(matched) if place not in lost], list(contests)


def _strength(match: Found) -> tuple[int, int, str]:
    guards = 0 if match.rule.match is None else len(match.rule.match.where)
    return -len(match.boxes), -guards, match.rule.id


def _without_beaten(matched: list[Found]) -> list[Found]:
    """Drop matches that a surviving match of a stronger rule overlaps: the strongest rules first."""
    beats = nx.DiGraph((match.rule.id, loser) for match in matched for loser in match.rule.beats)
    beats.add_nodes_from(match.rule.id for match in matched)
    claimed: dict[int, set[str]] = {}
    dropped: set[int] = set()
    for rule in nx.lexicographical_topological_sort(beats):
        stronger = set(beats.predecessors(rule))
        for place, match in enumerate(matched):
            if match.rule.id != rule:
                continue
            boxes = [box for _, box in match.claims]
            if any(claimed.get(box, set()) & stronger for box in boxes):
                dropped.add(place)
                continue
            for box in boxes:
                claimed.setdefault(box, set()).add(rule)
    return [match for place, match in enumerate(matched) if place not in dropped]


def match_rule(
    reach: _Reach, rule: Rule, tp: int | None = None, *, refused: bool = True
) -> tuple[list[Found], list[Refusal]]:
    """Return all matches of one rule, and, if `refused`, its refusals where the flow matched."""
    if rule.match is None:
        return [], []
    matched: list[Found] = []
    refusals: list[Refusal] = []
    seen: set[frozenset[int]] = set()
    order = _order(reach, rule.match.pattern)
    for bound in _bindings(reach, rule, order) if refused else _guarded_bindings(reach, rule, order, tp):
        claimed = frozenset(bound[name] for name, _ in rule.yields)
        boxes = tuple(bound.items())
        because = ""
        if refused:
            nodes = {name: node_of(reach.flow, box) for name, box in boxes}
            because = next(filter(None, (condition.check(nodes, tp) for condition in rule.match.conditions)), "")
        if because:
            refusals.append(Refusal(rule, boxes, because))
        elif claimed not in seen:  # the same boxes the other way round (a product has no order) are one match
            seen.add(claimed)
            matched.append(Found(rule, boxes))
    # Without refusals of boxes that were claimed after all, bound in another way
    claims = [frozenset(dict(refusal.boxes)[name] for name, _ in rule.yields) for refusal in refusals]
    return matched, [refusal for refusal, boxes in zip(refusals, claims, strict=True) if boxes not in seen]


def _guarded_bindings(reach: _Reach, rule: Rule, order: list[str], tp: int | None) -> list[dict[str, int]]:
    """Return the bindings under which all guards hold, in `order`, by a search that prunes what guards exclude."""
    assert rule.match is not None
    conditions = rule.match.conditions
    early = _guarded_first(order, rule.match.pattern, conditions)
    checks = [
        [
            condition
            for condition in conditions
            if name in condition.names and condition.names <= set(early[: place + 1])
        ]
        for place, name in enumerate(early)
    ]

    def allowed(position: int, bound: dict[str, int]) -> bool:
        if not checks[position]:
            return True
        nodes = {name: node_of(reach.flow, box) for name, box in bound.items()}
        return not any(check.check(nodes, tp) for check in checks[position])

    return sorted(_bindings(reach, rule, early, allowed), key=lambda bound: [bound[name] for name in order])


def _guarded_first(order: list[str], pattern: Pattern, conditions: Sequence[Condition]) -> list[str]:
    """Return the same names, those that allow most guards first, each joined to an earlier one if possible."""
    early, left = order[:1], order[1:]
    while left:
        near = [name for name in left if any({name} < {a.source, a.reader} <= {name, *early} for a in pattern.arrows)]
        early.append(
            max(near or left[:1], key=lambda name: sum(condition.names <= {name, *early} for condition in conditions))
        )
        left.remove(early[-1])
    return early


class _Reach:
    """The (reader, port) pairs that a value reaches in one step of a pattern, cached."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        # The boxes with at least ENDS readers of the same parameters both before and after them
        runs: dict[tuple[str, ...], list[int]] = {}
        for box in flow:
            node = node_of(flow, box)
            if node.parameters:
                runs.setdefault((node.kind, node.module, *node.parameters), []).append(box)
        self.between = frozenset(box for several in runs.values() for box in several[ENDS:-ENDS])
        self.by_kind: dict[str, list[int]] = {}
        self.given_up: list[str] = []
        self.steps = 0
        for box in flow:
            if box not in self.between:
                self.by_kind.setdefault(node_of(flow, box).kind, []).append(box)
        self._forward: dict[tuple[int, bool], dict[int, frozenset[str]]] = {}
        self._backward: dict[tuple[int, bool], dict[int, frozenset[str]]] = {}

    def readers(self, box: int, direct: bool) -> dict[int, frozenset[str]]:
        """Return the boxes that are reached from `box`, with the ports at which they read it."""
        if (box, direct) in self._forward:
            return self._forward[box, direct]
        through = TRANSPARENT if direct else CARRYING
        reached: dict[int, frozenset[str]] = {}
        waiting, seen = [box], {box}
        while waiting:
            current = waiting.pop()
            self.steps += 1
            for reader in self.flow.successors(current):
                reached[reader] = reached.get(reader, frozenset()) | self.flow.edges[current, reader]["ports"]
                if reader not in seen and node_of(self.flow, reader).kind in through:
                    seen.add(reader)
                    waiting.append(reader)
        self._forward[box, direct] = reached
        return reached

    def sources(self, box: int, direct: bool) -> dict[int, frozenset[str]]:
        """Return the boxes from which `box` is reached, with the ports at which it reads them."""
        if (box, direct) in self._backward:
            return self._backward[box, direct]
        through = TRANSPARENT if direct else CARRYING
        reached: dict[int, frozenset[str]] = {}
        waiting: list[tuple[int, frozenset[str] | None]] = [(box, None)]
        seen: set[tuple[int, frozenset[str] | None]] = set(waiting)
        while waiting:
            current, ports = waiting.pop()
            self.steps += 1
            for source in self.flow.predecessors(current):
                arriving = self.flow.edges[source, current]["ports"] if ports is None else ports
                reached[source] = reached.get(source, frozenset()) | arriving
                if node_of(self.flow, source).kind in through and (source, arriving) not in seen:
                    seen.add((source, arriving))
                    waiting.append((source, arriving))
        self._backward[box, direct] = reached
        return reached


def _bindings(
    reach: _Reach, rule: Rule, order: list[str], allowed: Callable[[int, dict[str, int]], bool] | None = None
) -> Iterator[dict[str, int]]:
    """Yield every binding of a rule's names under which all arrows hold and no interior box is read from outside, as
    far as the bound on the search allows; `allowed(place, bound)` prunes it."""
    assert rule.match is not None
    pattern, most = rule.match.pattern, reach.steps + MOST_STEPS

    def extend(position: int, bound: dict[str, int]) -> Iterator[dict[str, int]]:
        if position == len(order):
            if _closed(reach, pattern, bound):
                yield {name: bound[name] for name in pattern.names}
            return
        name = order[position]
        taken = set(bound.values())
        candidates = _candidates(reach, pattern, name, bound)
        reach.steps += 1 + len(candidates)
        for box in candidates if reach.steps <= most else ():
            more = {**bound, name: box}
            if box not in taken and (allowed is None or allowed(position, more)):
                yield from extend(position + 1, more)

    yield from extend(0, {})
    if reach.steps > most:
        reach.given_up.append(rule.id)


def _order(reach: _Reach, pattern: Pattern) -> list[str]:
    """Return the names, the rarest kind first, then always one joined by an arrow to an earlier one."""

    def number(name: str) -> int:
        kinds = pattern.kinds_of(name)
        return len(reach.flow) if "any" in kinds else sum(len(reach.by_kind.get(kind, ())) for kind in kinds)

    left = sorted(pattern.names, key=number)
    order = [left.pop(0)]
    while left:
        joined = {a.reader for a in pattern.arrows if a.source in order} | {
            a.source for a in pattern.arrows if a.reader in order
        }
        following = next((name for name in left if name in joined), left[0])
        left.remove(following)
        order.append(following)
    return order


def _candidates(reach: _Reach, pattern: Pattern, name: str, bound: dict[str, int]) -> list[int]:
    kinds = pattern.kinds_of(name)
    options: set[int] | None = None
    for arrow in pattern.arrows:
        reached = _along(reach, arrow, name, bound)
        if reached is not None:
            options = reached if options is None else options & reached
    if options is None:
        allowed_kinds = reach.by_kind if "any" in kinds else kinds
        return sorted(box for kind in allowed_kinds for box in reach.by_kind.get(kind, ()))
    free = options - reach.between
    return sorted(box for box in free if "any" in kinds or node_of(reach.flow, box).kind in kinds)


def _along(reach: _Reach, arrow: Arrow, name: str, bound: dict[str, int]) -> set[int] | None:
    """Return the boxes that `name` may be, by one arrow whose other end is bound; None if no end is."""
    if arrow.reader == name and arrow.source in bound:
        reached = reach.readers(bound[arrow.source], arrow.direct)
    elif arrow.source == name and arrow.reader in bound:
        reached = reach.sources(bound[arrow.reader], arrow.direct)
    else:
        return None
    return {box for box, ports in reached.items() if not arrow.port or arrow.port in ports}


def _closed(reach: _Reach, pattern: Pattern, bound: dict[str, int]) -> bool:
    inside = set(bound.values())
    fed = {arrow.reader for arrow in pattern.arrows}
    interior = {arrow.source for arrow in pattern.arrows if arrow.direct and arrow.source in fed}
    return all(_reads_inside(reach, bound[name], inside) for name in interior)


def _reads_inside(reach: _Reach, box: int, inside: set[int]) -> bool:
    for reader in reach.flow.successors(box):
        if reader in inside:
            continue
        if node_of(reach.flow, reader).kind not in TRANSPARENT or not _reads_inside(reach, reader, inside):
            return False
    return True
