"""`autoplan rules list|show|test`: the documents that name what is found and choose styles."""

from __future__ import annotations

from typing import Annotated

import typer

from autoplan.cli.shared import FINDINGS, OK, AsJson, Output, emit
from autoplan.common.errors import AutoplanError

rules_app = typer.Typer(help="Read the rules that name what is found and choose styles.", no_args_is_help=True)


@rules_app.command("list")
def rules_list(as_json: AsJson = False, output: Output = None) -> None:
    """All rules, a line each."""
    from autoplan.decide.rulebook.read import load_rules
    from autoplan.emit.tables.rule_pages import rule_to_dict, rules_view

    rules = load_rules()
    emit(rules_view(rules), [rule_to_dict(rule) for rule in rules], as_json, output)


@rules_app.command("show")
def rules_show(
    rule_id: Annotated[str, typer.Argument(metavar="RULE", help="As `autoplan rules list` names it.")],
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """One rule: what it recognises, why, where it stops, examples."""
    from autoplan.common.patterns import nearest
    from autoplan.decide.rulebook.read import load_rules
    from autoplan.emit.tables.rule_pages import rule_to_dict, rule_view

    rules = {rule.id: rule for rule in load_rules()}
    if rule_id not in rules:
        close = ", ".join(nearest(rule_id, rules)) or ", ".join(rules)
        raise AutoplanError(f"there is no rule {rule_id!r}", hint=f"rules like it: {close}")
    emit(rule_view(rules[rule_id]), rule_to_dict(rules[rule_id]), as_json, output)


@rules_app.command("test")
def rules_test(
    strict: Annotated[
        bool, typer.Option("--strict", help="Also drop each part of each rule: an example must notice.")
    ] = (False),
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Does each rule do what its examples say?"""
    from autoplan.decide.rulebook.rule_tests import test_rules
    from autoplan.emit.tables.rule_pages import results_view
    from autoplan.values.plain import plain

    results = test_rules(strict=strict)
    emit(results_view(results), plain(results), as_json, output)
    raise typer.Exit(OK if all(result.ok for result in results) else FINDINGS)
