"""Test rules by their examples; strictly, that some example fails when a guard, flow line or yield is dropped."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from autoplan.common.errors import AutoplanError
from autoplan.decide.match import match_rules
from autoplan.decide.rulebook.conditions import parse_condition
from autoplan.decide.rulebook.pattern import draw, parse_pattern
from autoplan.decide.rulebook.read import Example, Match, Rule, load_rules


@dataclass(frozen=True)
class RuleResult:
    """One example, or (in a strict test) one mutant. `ok`: the example holds; the mutant was noticed."""

    rule: str
    what: str
    ok: bool
    text: str = ""


def test_rules(strict: bool = False, rules: Iterable[Rule] | None = None) -> tuple[RuleResult, ...]:
    """Run every example of every rule; with `strict`, every mutant of every rule that passes, too."""
    results: list[RuleResult] = []
    for rule in load_rules() if rules is None else rules:
        own = list(_test_rule(rule))
        results += own
        if strict and rule.match is not None and all(result.ok for result in own):
            results += [_test_mutant(rule, dropped, mutant) for dropped, mutant in mutants(rule)]
    return tuple(results)


test_rules.__test__ = False  # type: ignore[attr-defined]  # pytest collects by name, and this is no test


def _test_rule(rule: Rule) -> Iterator[RuleResult]:
    for example in rule.examples:
        problem = problem_with(rule, example)
        yield RuleResult(rule.id, f"example: {example.name}", not problem, problem)
    if rule.match is None:
        return
    for wanted, present in (
        ("an example that matches", any(example.expect for example in rule.examples)),
        ("an example that is refused", any(not example.expect for example in rule.examples)),
    ):
        if not present:
            yield RuleResult(rule.id, wanted, False, f"rule {rule.id!r} lacks {wanted}")


def problem_with(rule: Rule, example: Example) -> str:
    """Return how the rule's outcome differs from the example's; "" if it does not."""
    flow = draw(example.graph)
    matching = match_rules(flow, [rule], example.tp)
    names = {box: flow.nodes[box]["node"].module for box in flow}
    styles = dict(rule.yields)
    claimed = {names[box]: styles[name] for match in matching.found for name, box in match.claims}
    expected = dict(example.expect)
    if claimed != expected:
        reasons = "; ".join(dict.fromkeys(refusal.because for refusal in matching.refusals))
        return f"claims {_styles(claimed)}, not {_styles(expected)}" + (f" (refused: {reasons})" if reasons else "")
    if example.because and not any(example.because in refusal.because for refusal in matching.refusals):
        reasons_given = "; ".join(refusal.because for refusal in matching.refusals) or "nothing: the flow is not there"
        return f"refused because of {reasons_given}, not because {example.because}"
    return ""


def _styles(claimed: dict[str, tuple[str, ...]]) -> str:
    return ", ".join(f"{name}: {' or '.join(styles)}" for name, styles in sorted(claimed.items())) or "nothing"


def _test_mutant(rule: Rule, what: str, mutant: Rule | None) -> RuleResult:
    noticed = mutant is None or any(problem_with(mutant, example) for example in rule.examples)
    return RuleResult(rule.id, f"without {what}", noticed, "" if noticed else "no example notices")


def mutants(rule: Rule) -> Iterator[tuple[str, Rule | None]]:
    """Yield the rule with one part dropped; None if the rest is not readable."""
    match = rule.match
    assert match is not None
    for text in match.where:
        yield f"guard {text}", _with(rule, match.flow, tuple(other for other in match.where if other != text))
    lines = [line for line in match.flow.strip().splitlines() if line.strip()]
    for line in lines:
        flow = "\n".join(other for other in lines if other != line)
        yield f"flow {' '.join(line.split())}", _with(rule, flow, match.where)
    for name, _ in rule.yields:
        yield f"yield {name}", replace(rule, yields=tuple(item for item in rule.yields if item[0] != name))


def _with(rule: Rule, flow: str, where: tuple[str, ...]) -> Rule | None:
    """Return the rule with another flow and guards, without guards and yields about missing boxes."""
    try:
        pattern = parse_pattern(flow)
    except AutoplanError:
        return None
    if not pattern.names:
        return None
    conditions = []
    for text in where:
        try:
            conditions.append(parse_condition(text, pattern.names))
        except AutoplanError:
            continue
    match = Match(flow, where, pattern, tuple(conditions))
    return replace(rule, match=match, yields=tuple(item for item in rule.yields if item[0] in pattern.names))
