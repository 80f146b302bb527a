"""Print rules as in the rule files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoplan.decide.rulebook.read import Rule
from autoplan.decide.rulebook.rule_tests import RuleResult
from autoplan.emit.tables.terminal import heading
from autoplan.emit.words import count
from autoplan.values.plain import plain


def rule_to_dict(rule: Rule) -> dict[str, Any]:
    """Return a rule as plain data, for `--json`."""
    texts = ("id", "summary", "why", "limits", "seen_in", "unseen", "exported_as", "beats")
    return {
        **{name: plain(getattr(rule, name)) for name in texts},
        "flow": rule.match.flow if rule.match else "",
        "where": list(rule.match.where) if rule.match else [],
        "yields": {name: list(styles) for name, styles in rule.yields},
        "roles": {name: rule.role(name) for name, _ in rule.yields},
        "sequence_parallel": dict(rule.sequence_parallel),
        "examples": plain(rule.examples),
    }


def rules_view(rules: Iterable[Rule]) -> RenderableType:
    """Return one line per rule."""
    table = _columns()
    for rule in rules:
        table.add_row(Text(rule.id, "cyan"), Text(rule.summary))
    return table


def rule_view(rule: Rule) -> RenderableType:
    """Return all of a rule's document."""
    parts: list[RenderableType] = [Text.assemble((rule.id, "bold cyan"), f" · {rule.summary}")]
    parts += _section("Why", Text(rule.why))
    parts += _section("Limits", Text(rule.limits))
    if rule.match:
        lines = [line.strip() for line in rule.match.flow.strip().splitlines()]
        parts += _section("Recognises", Text("\n".join(lines)))
        if rule.match.where:
            parts += _section("Where", Text("\n".join(rule.match.where)))
    if rule.yields:
        table = _columns()
        under_sequence_parallel = dict(rule.sequence_parallel)
        for name, styles in rule.yields:
            text = " or ".join(styles)
            if name in under_sequence_parallel:
                text += f" ({under_sequence_parallel[name]} under sequence parallel)"
            table.add_row(Text(name), Text(rule.role(name)), Text(text))
        parts += _section("Chooses", table)
    if rule.beats:
        parts += _section("Beats", Text(", ".join(rule.beats)))
    if rule.seen_in:
        parts += _section("Seen in", Text(", ".join(rule.seen_in)))
    if rule.unseen:
        parts += _section("Unseen", Text(rule.unseen))
    for example in rule.examples:
        picture = "\n".join(line.strip() for line in example.graph.strip().splitlines())
        outcome = ", ".join(f"{box}: {' or '.join(styles)}" for box, styles in example.expect)
        outcome = outcome or "refused" + (f": {example.because}" if example.because else "")
        parts += _section(f"Example: {example.name}", Text(f"{picture}\n→ at tp {example.tp}, {outcome}"))
    return Group(*parts)


def results_view(results: tuple[RuleResult, ...]) -> RenderableType:
    """Return the failed checks, then the number of passed ones."""
    table = _columns()
    failed = [result for result in results if not result.ok]
    for result in failed:
        table.add_row(Text(result.rule, "cyan"), Text.assemble((result.what, "bold"), f"\n{result.text}"))
    rules = count(len({result.rule for result in results}), "rule")
    verdict = Text(f"{len(results) - len(failed)} of {count(len(results), 'check')} of {rules} passed")
    return Group(table, Text(), verdict) if failed else verdict


def _columns() -> Table:
    return Table.grid(padding=(0, 2, 0, 0), pad_edge=False)


def _section(title: str, body: RenderableType) -> tuple[RenderableType, RenderableType]:
    return heading(title), Padding(body, (0, 0, 0, 2))
