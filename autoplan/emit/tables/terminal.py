"""A plan and a report as tables: the same renderables in colour on a terminal and as plain text by `str(plan)`. Rules
are printed as in the rule files.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from io import StringIO
from itertools import groupby
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoplan.common.patterns import fold_counted, fold_names, starred
from autoplan.decide.rulebook.read import Rule
from autoplan.decide.rulebook.rule_tests import RuleResult
from autoplan.emit.tables.estimate_table import TRAFFIC_COLUMNS, equal_blocks, traffic_lines, traffic_row, valid_sizes
from autoplan.emit.words import bytes_text, count, few
from autoplan.values import Cost, Entry, Finding, Plan, Proof, Replicated, Report, Stack, Traffic
from autoplan.values.plain import plain

_LEVELS = {"error": "bold red", "warn": "yellow", "note": "cyan"}
_NARROWEST = 80
_ALIKE = 5  # findings of one check and level that are printed in full


def plain_text(view: RenderableType, width: int | None = None) -> str:
    """Return a view without colour or trailing blanks, `width` columns wide (by default the terminal's width)."""
    columns = width or max(shutil.get_terminal_size((120, 24)).columns, _NARROWEST)
    console = Console(file=StringIO(), width=columns, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(view)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def plan_view(plan: Plan) -> RenderableType:
    """Return all sections of a plan."""
    sections: list[RenderableType] = [_headline(plan)]
    if plan.entries:
        sections += [heading("Split"), EntryTable(plan.entries), heading("Why"), _reasons(plan.entries)]
    if plan.replicated:
        total = bytes_text(sum(item.bytes for item in plan.replicated))
        sections += [heading(f"Replicated on every rank: {total}"), *_replicated(plan.replicated)]
    if plan.layers:
        sections += [heading("Layers"), _stacks(plan.layers)]
    if plan.communication:
        table = plain_table(*TRAFFIC_COLUMNS, right=("moved/least",))
        for block in equal_blocks(plan.communication):
            table.add_row(*map(Text, traffic_row(block)))
        sections += [heading("Communication of a block, in bytes per token"), table]
    if plan.fed:
        # The inputs of two calls of the forward, and the reasons for them.
        table = plain_table("argument", "given", "why", header=False)
        for argument in plan.fed:
            also = f", then {argument.also}" if argument.also and argument.also != argument.given else ""
            table.add_row(Text(argument.argument, "cyan"), Text(f"{argument.given}{also}"), Text(argument.why))
        sections += [heading("Example inputs (inferred; override with inputs=)"), table]
    if plan.findings:
        sections += [heading("Findings"), *findings_view(plan.findings)]
    return Group(*sections, Text(), proof_text(plan.proof))


def report_view(report: Report, title: str = "") -> RenderableType:
    """Return the outcome of a check: verdict first, then what was compared, then the findings."""
    title = title or str(report.details.get("model", "report"))
    verdict = (report.verdict, "bold green" if report.ok else "bold red")
    facts = plain_table("what", "value", header=False)
    if report.forward is not None:
        facts.add_row("forward", f"off by {report.forward:.1e}")
    if report.gradients:
        worst = max(report.gradients, key=lambda name: report.gradients[name])
        largest = f"largest error {report.gradients[worst]:.1e} at {worst}"
        facts.add_row("gradients", f"{len(report.gradients)} compared, {largest}")
    for name, value in report.details.items():
        if name not in ("verdict", "ranks") and (value or value == 0) and (text := _detail(value)):
            facts.add_row(name.replace("_", " "), text)
    ranks = str(report.details.get("ranks", f"tp {report.tp_size}")).replace("=", " ")
    lines: list[RenderableType] = [Text.assemble((title, "bold"), f" · {ranks} · ", verdict)]
    if facts.row_count:
        lines.append(Padding(facts, (0, 0, 0, 2)))
    if report.findings:
        lines += [heading("Findings"), *findings_view(report.findings)]
    return Group(*lines)


def _detail(value: object) -> str:
    """Return a value as text; a mapping takes a line per key, with nested values in it."""
    if isinstance(value, tuple) and value and isinstance(value[0], Traffic):
        return "\n".join(traffic_lines(value))
    if isinstance(value, dict):
        texts = {k: bytes_text(v) if k.startswith("bytes_") else _in_line(v) for k, v in value.items()}
        return "\n".join(f"{key.replace('bytes_per_rank', 'per rank')}: {text}" for key, text in texts.items())
    return _in_line(value)


def _in_line(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{inner} {key}" for key, inner in value.items())
    return ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


def plan_facts(plan: Plan) -> list[str]:
    """Return the sizes and options of a plan."""
    experts = [f"ep {plan.ep_size}"] if plan.ep_size > 1 else []
    along = ["sequence parallel"] if plan.sequence_parallel else []
    return [plan.over.replace("=", " "), *experts, plan.source, *along, *valid_sizes(plan)]


def _headline(plan: Plan) -> RenderableType:
    facts = plan_facts(plan)
    if plan.proof.failed:
        facts.append("verification failed")
    elif plan.proof.trial.outcome == "skipped":
        facts.append("not verified")
    return Text.assemble((plan.model, "bold"), *(f" · {fact}" for fact in facts))


def _reasons(entries: tuple[Entry, ...]) -> RenderableType:
    """Return each rule's reasons, once each, with the roles it assigned."""
    roles_by_reason: dict[tuple[str, str], dict[str, None]] = {}
    for entry in entries:
        if entry.reason:
            roles_by_reason.setdefault((entry.rule or entry.source, entry.reason), {})[entry.role] = None
    table = plain_table("rule", "roles", "reason")
    previous = ""
    for (rule, reason), roles in roles_by_reason.items():
        table.add_row(rule if rule != previous else "", ", ".join(filter(None, roles)), reason)
        previous = rule
    return table


def _replicated(items: tuple[Replicated, ...]) -> Iterable[RenderableType]:
    """Yield replicated parameters by reason, largest first, with repeated blocks folded."""
    by_reason: dict[str, dict[int, list[str]]] = {}
    for item in items:
        by_reason.setdefault(item.reason, {}).setdefault(item.bytes, []).append(item.fqn)
    names = [item.fqn for item in items]
    weights = {reason: sum(size * len(fqns) for size, fqns in sizes.items()) for reason, sizes in by_reason.items()}
    for reason in sorted(by_reason, key=lambda reason: -weights[reason]):
        folds = ((size, fold_counted(fqns, names)) for size, fqns in by_reason[reason].items())
        rows = [(members * size, pattern) for size, folded in folds for pattern, members in folded]
        table = plain_table("bytes", "parameter", header=False, right=("bytes",))
        for size, pattern in sorted(rows, key=lambda row: -row[0]):
            table.add_row(bytes_text(size), Text(pattern, "cyan"))
        yield Text(reason or "(no reason given)")
        yield Padding(table, (0, 0, 0, 2))


def layers_view(stacks: tuple[Stack, ...], title: str) -> RenderableType:
    """Return the repeated stacks of a model."""
    if not stacks:
        return Text.assemble((title, "bold"), " · no repeated blocks")
    return Group(Text.assemble((title, "bold"), f" · {count(len(stacks), 'stack')}"), _stacks(stacks))


def _stacks(stacks: tuple[Stack, ...]) -> RenderableType:
    table = plain_table("stack", "kind", "blocks", "paths", "note", header=False, right=("blocks",))
    for stack in stacks:
        paths = ", ".join(fold_names(stack.fqns))
        table.add_row(Text(stack.name, "cyan"), stack.kind, count(len(stack.fqns), "block"), paths, stack.note)
    return table


def findings_view(findings: tuple[Finding, ...]) -> Iterable[RenderableType]:
    """Yield findings by check; of many similar ones only the first are shown in full (`--json` has all)."""
    by_check: dict[tuple[str, str], list[Finding]] = {}
    proofs: set[str] = set()  # of a run that fails, each finding has the same
    same: dict[Finding, dict[str, None]] = {}  # what says the same, and of which places
    for finding in findings:
        same.setdefault(replace(finding, where=""), {})[finding.where] = None
    for finding in (replace(first, where=few([*names])) for first, names in same.items()):
        by_check.setdefault((finding.check, finding.level), []).append(finding)
    for alike in by_check.values():
        for finding in alike[:_ALIKE]:
            level, weight = f"{finding.level:<6}", f" ({bytes_text(finding.bytes)})" if finding.bytes else ""
            where = (finding.where and f" · {finding.where}", "cyan")
            yield Text.assemble((level, _LEVELS[finding.level]), finding.check, where, weight)
            proof = "" if finding.proof in proofs else finding.proof
            proofs.add(proof)
            for text in (finding.message, proof, finding.hint and f"→ {finding.hint}"):
                if text:
                    yield Padding(Text(text), (0, 0, 0, 6))
        if rest := alike[_ALIKE:]:
            places = ", ".join(fold_names(finding.where for finding in rest))
            yield Padding(Text(f"and {count(len(rest), 'more place')}: {places}"), (0, 0, 0, 6))


def proof_text(proof: Proof) -> Text:
    """Return what a plan may be trusted for. Without a trial on ranks it is not "proven", whatever the graph says."""
    if proof.trial.outcome == "wrong" and proof.method != "ranks":
        return Text.assemble(("Proof failed", "bold red"), f" on simulated ranks: {proof.trial.why}")
    if proof.trial.outcome == "skipped" and not proof.failed:
        text = Text.assemble(("Not verified on simulated ranks", "bold yellow"), f": {proof.trial.why}")
        text.append(f"; {proof.trial.hint}" if proof.trial.hint else "")
        return text if proof.method == "none" else text.append(f". On the graph: {proof.text}")
    if proof.method == "none":
        same = "; on simulated ranks the tiny clone's results were equal" if proof.trial.outcome == "passed" else ""
        return Text(f"Not proven{same}.", "yellow")
    where = {"graph": "on the graph", "ranks": f"on {count(proof.tp_size, 'simulated rank')}"}
    verdict = Text.assemble(("Proven", "bold green") if proof.ok else ("Proof failed", "bold red"))
    if proof.ok and proof.method == "graph" and not proof.checked and proof.trial.outcome == "passed":
        ranks = count(proof.trial.ranks, "simulated rank")
        return verdict.append(f" on {ranks}: a tiny clone's results are equal; its graph has nothing to check")
    verdict.append(f" {where[proof.method]}")
    if proof.checked:
        verdict.append(f" by {', '.join(proof.checked)}")
    verdict.append(f": {proof.text}" if proof.text else ".")
    tried = proof.trial.outcome == "passed" and proof.trial.ranks > 2 and proof.method != "ranks"
    return verdict.append(f"; tried on {proof.trial.ranks} simulated ranks") if tried else verdict


def heading(text: str) -> RenderableType:
    return Padding(Text(text, "bold"), (1, 0, 0, 0))


def plain_table(*columns: str, header: bool = True, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, show_header=header, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


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
    flow, where = (rule.match.flow, rule.match.where) if rule.match else ("", ())
    recognised = "\n".join(map(str.strip, flow.strip().splitlines()))
    parts += _sections({"Why": rule.why, "Limits": rule.limits, "Recognises": recognised, "Where": "\n".join(where)})
    if rule.yields:
        table = _columns()
        under_sequence_parallel = dict(rule.sequence_parallel)
        for name, styles in rule.yields:
            text = " or ".join(styles)
            if name in under_sequence_parallel:
                text += f" ({under_sequence_parallel[name]} under sequence parallel)"
            table.add_row(Text(name), Text(rule.role(name)), Text(text))
        parts += _sections({"Chooses": table})
    parts += _sections({"Beats": ", ".join(rule.beats), "Seen in": ", ".join(rule.seen_in), "Unseen": rule.unseen})
    for example in rule.examples:
        picture = "\n".join(line.strip() for line in example.graph.strip().splitlines())
        outcome = ", ".join(f"{box}: {' or '.join(styles)}" for box, styles in example.expect)
        outcome = outcome or "refused" + (f": {example.because}" if example.because else "")
        parts += _sections({f"Example: {example.name}": f"{picture}\n→ at tp {example.tp}, {outcome}"})
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


def _sections(bodies: Mapping[str, str | Table]) -> Iterator[RenderableType]:
    """Yield the bodies that are not empty, each under its title."""
    for title, body in bodies.items():
        if body:
            yield from (heading(title), Padding(Text(body) if isinstance(body, str) else body, (0, 0, 0, 2)))


# The table of a plan's entries, grouped by parent. A narrow terminal omits the cut and the role, which `explain` and
# `--json` have.

_GAP = 2
_WIDE = 110
_LONG_PATH = 28
_LEAST = 10  # the narrowest that a column becomes
_ENTRY_STYLES = {"module": "cyan", "cut": "dim"}
_HEADINGS = {"sums": "sums over ranks"}
_LEGEND = "cut is dim:layout; ! is sharded over the ranks, * multiplies, | separates independently sharded segments"

Cells = dict[str, str]


class EntryTable:
    """A rich renderable of entries; its columns depend on the available width."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.max_width >= _WIDE
        columns = ["module", "style"] + ["role"] * wide + ["units"] + ["cut"] * wide + ["sums"]
        # Source and proof only if entries differ in them, else the headline has them
        columns += [name for name in ("source", "proof") if len({getattr(e, name) for e in self.entries}) > 1]
        groups = [(parent, _entry_rows(members, parent)) for parent, members in _by_parent(self.entries)]
        widths = _widths(columns, [row for _, rows in groups for row in rows], options.max_width)
        yield _grid(columns, widths, [{column: _HEADINGS.get(column, column) for column in columns}], header=True)
        for parent, rows in groups:
            if parent:
                yield Text(parent, _ENTRY_STYLES["module"], no_wrap=False, overflow="fold")
            yield _grid(columns, widths, rows)
        if wide:
            yield Text(_LEGEND, "dim")


def _by_parent(entries: Iterable[Entry]) -> Iterator[tuple[str, list[Entry]]]:
    """Yield neighbours under their common parent, and all modules of one part of a block together, although equal parts
    of other blocks lie between them; a single module keeps its path if that is short."""
    groups: dict[tuple[str, int], list[Entry]] = {}
    for number, (parent, members) in enumerate(groupby(entries, key=lambda entry: entry.pattern.rpartition(".")[0])):
        groups.setdefault((parent, 0 if "*" in starred(parent) else number), []).extend(members)
    for (parent, _), group in groups.items():
        alone = len(group) == 1 and len(group[0].pattern) <= _LONG_PATH
        yield ("" if alone else parent), group


def _entry_rows(members: Iterable[Entry], parent: str) -> list[Cells]:
    rows: list[Cells] = []
    above: list[str] = []
    for entry in members:
        leaf = entry.pattern.removeprefix(f"{parent}.") if parent else entry.pattern or "(root)"
        row = {name: getattr(entry, name) for name in ("style", "role", "units", "source", "proof")}
        row["module"], row["cut"] = f"  {leaf}" if parent else leaf, _entry_cut(entry)
        row["sums"] = "\n".join(dict.fromkeys(_entry_sum(cost, above) for cost in entry.reduces))
        rows.append(row)
        above.append(leaf)
    return rows


def _entry_sum(cost: Cost, above: Sequence[str]) -> str:
    """Return a cost without "sum", as the column says it; a shared one is listed at the first module that shares it."""
    sharers = [other for other in cost.shared_with if other in above]
    if sharers:
        return f"shared with {sharers[0]}"
    return cost.what if cost.does == "sum" and cost.of != "call" else cost.done


def _entry_cut(entry: Entry) -> str:
    """Return one line if all parameters are cut alike, else one for each. Spaces let long layouts wrap."""
    segments = [segment.replace("|", " | ") for segment in entry.segments]
    if len(set(segments)) <= 1 or len(entry.parameters) != len(segments):
        return "\n".join(dict.fromkeys(segments))
    names = (parameter.removeprefix(f"{entry.pattern}.") for parameter in entry.parameters)
    return "\n".join(f"{name} {segment}" for name, segment in zip(names, segments, strict=True))


def _widths(columns: list[str], rows: list[Cells], available: int) -> dict[str, int]:
    """Return the widths of columns: each as wide as its widest line; then the widest shrink until the table fits."""
    texts = {name: "\n".join([_HEADINGS.get(name, name), *(row[name] for row in rows)]) for name in columns}
    widths = {column: max(map(cell_len, text.split("\n"))) for column, text in texts.items()}
    giving = [column for column in columns if column not in ("module", "style")]
    while sum(widths.values()) + _GAP * (len(columns) - 1) > available:
        widest = max(giving, key=lambda column: widths[column])
        if widths[widest] <= _LEAST:
            if "module" in giving:
                break
            giving = columns
            continue
        widths[widest] -= 1
    return widths


def _grid(columns: list[str], widths: dict[str, int], rows: list[Cells], header: bool = False) -> Table:
    table = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    for column in columns:
        style = "dim" if header else _ENTRY_STYLES.get(column, "")
        table.add_column(width=widths[column], overflow="fold", style=style)
    for row in rows:
        table.add_row(*(Text(row[column]) for column in columns))
    return table
