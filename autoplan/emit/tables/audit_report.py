"""An audit for a terminal, as Markdown for pull requests, and as SARIF 2.1.0 for code-review tools; a scoreboard."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoplan.common.patterns import is_under
from autoplan.emit.tables.estimate_table import TRAFFIC_COLUMNS, traffic_row
from autoplan.emit.tables.terminal import findings_view, heading, plain_table
from autoplan.emit.words import bytes_text
from autoplan.values import Finding, Report, Score, Scoreboard
from autoplan.version import __version__

_COLOURS = {"same": "green", "costlier": "yellow", "different": "cyan", "wrong": "bold red", "dead": "dim"}
_SARIF_LEVELS = {"error": "error", "warn": "warning", "note": "note"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_IN_A_CELL = str.maketrans({"|": "\\|", "\n": " "})  # of a table in Markdown


def audit_view(report: Report) -> RenderableType:
    """Return an audit for a terminal: verdict, entries, findings."""
    verdict = ("no errors", "bold green") if report.ok else ("wrong", "bold red")
    lines: list[RenderableType] = [
        Text.assemble((str(report.details["model"]), "bold"), f" · tp {report.tp_size} · ", verdict),
        Text(f"  {_summary(report)}"),
    ]
    table = plain_table("verdict", "entry", header=False)
    for pattern, word in report.details["verdicts"].items():
        table.add_row(Text(word, _COLOURS[word]), Text(pattern, "cyan"))
    if table.row_count:
        lines += [heading("Entries"), table]
    consequences = tuple(finding for finding in report.findings if finding.is_consequence)
    causes = tuple(finding for finding in report.findings if not finding.is_consequence)
    if not any(finding.level == "error" for finding in causes):  # then all findings are causes
        causes, consequences = report.findings, ()
    if causes:
        lines += [heading("Findings"), *findings_view(causes)]
    if consequences:
        lines.append(heading("What follows"))
    shown = "\n".join(finding.proof for finding in causes)  # a run's failure is told once
    followed: set[str] = set()
    for finding in consequences:
        where = finding.where if finding.kind == "follows" else ""
        where, text = (re.sub(r"\.\d+(?=[.,: ]|$)", ".*", words) for words in (where, finding.message))
        text = f"{', '.join(dict.fromkeys(where.split(', ')))}: {text}" if where else text  # once for all layers
        if text not in followed:
            proof = next(iter(finding.proof.splitlines()), "")
            short = proof if len(proof) <= 160 else f"{proof[:157]}..."
            lines.append(Padding(Text(text if proof in shown else f"{text}: {short}"), (0, 0, 0, 2)))
            shown += f"\n{proof}"
            followed.add(text)
    return Group(*lines)


def claims_view(report: Report) -> RenderableType:
    """Return a table of what a class claims, and whether it holds."""
    colours = {"holds": "green", "wrong": "bold red", "doubtful": "yellow", "not claimed": "dim"}
    table = plain_table("claim", "verdict", header=False)
    for claim, word in report.details["claims"].items():
        table.add_row(Text(claim, "cyan"), Text(word, colours[word]))
    lines: list[RenderableType] = [Text(f"{report.details['model']} · {report.details['verdict']}", "bold"), table]
    if report.findings:
        lines += [heading("Findings"), *findings_view(report.findings)]
    return Group(*lines)


def _summary(report: Report) -> str:
    details = report.details
    actual, possible = bytes_text(details["bytes_per_rank"]), bytes_text(details["bytes_per_rank_inferred"])
    return f"{details['plan']}: {details['ran']}; {actual} of parameters per rank ({possible} if fully sharded)"


def markdown(report: Report) -> str:
    """Return an audit as a comment on a pull request."""
    counts = Counter(finding.level for finding in report.findings)
    mark = "✅" if report.ok else "❌"
    head = f"### {mark} autoplan audit: `{report.details['model']}` at tp {report.tp_size}"
    lines = [head, "", _summary(report), ""]
    verdicts = Counter(report.details["verdicts"].values())
    lines.append(f"Entries: {', '.join(f'{n} {word}' for word, n in verdicts.items()) or 'none'}. ")
    lines.append(f"Findings: {', '.join(f'{n} {level}' for level, n in counts.items()) or 'none'}.")
    if report.findings:
        lines += ["", "| level | check | where | what | do |", "|---|---|---|---|---|"]
    for finding in report.findings:
        text = f"{finding.message}. {finding.proof}" if finding.proof else finding.message
        text += f" ({bytes_text(finding.bytes)})" if finding.bytes else ""
        where = f"`{finding.where}`" if finding.where else ""
        cells = (finding.level, finding.check, where, text, finding.hint)
        lines.append(f"| {' | '.join(cell.translate(_IN_A_CELL) for cell in cells)} |")
    return "\n".join(lines)


def sarif(
    report: Report, checks: Mapping[str, str], artifact: str = "plan", lines: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Return an audit for code-review tools. `checks`: names and documentation; `artifact`: the plan's file; `lines`:
    the lines of patterns."""
    names = list(checks)
    rules = [
        {"id": name, "shortDescription": {"text": text.splitlines()[0]}, "fullDescription": {"text": text}}
        for name, text in checks.items()
    ]
    results = [_result(finding, names, artifact, _line_of(finding, lines or {})) for finding in report.findings]
    driver = {"name": "autoplan", "version": __version__, "rules": rules}
    properties = {"model": report.details["model"], "tp_size": report.tp_size, "verdicts": report.details["verdicts"]}
    run = {"tool": {"driver": driver}, "results": results, "properties": properties}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _line_of(finding: Finding, lines: Mapping[str, int]) -> int:
    """Return the line of the entry that a finding is about; line 1 if there is no single one."""
    for place in (place.strip() for about in finding.about for place in about.split(",")):
        near = [p for p in lines if p == place or is_under(p, place) or is_under(place, p)]
        if near:
            return lines[max(near, key=lambda pattern: (pattern == place, len(pattern)))]
    return 1


def _result(finding: Finding, names: list[str], artifact: str, line: int) -> dict[str, Any]:
    text = ". ".join(filter(None, (finding.message, finding.proof, finding.hint and f"Fix: {finding.hint}")))
    places = [{"physicalLocation": {"artifactLocation": {"uri": artifact}, "region": {"startLine": line}}}]
    if finding.where:
        places[0]["logicalLocations"] = [{"fullyQualifiedName": finding.where}]  # type: ignore[assignment]
    level = _SARIF_LEVELS[finding.level]
    result = {"ruleId": finding.check, "level": level, "message": {"text": text}, "locations": places}
    return result | ({"ruleIndex": names.index(finding.check)} if finding.check in names else {})


# A scoreboard as tables: one line per architecture, reasons for what is not exact, totals at the end.


_VERDICTS = {"exact": "green", "wrong": "bold red", "failed": "bold red", "refused": "yellow"}
_GOOD_SHARE = 0.99
_NO_MORE = 1.005  # the bound ignores a few numbers per token


def scoreboard_view(board: Scoreboard) -> RenderableType:
    """Return the scoreboard with all its sections."""
    experts = f" · ep {board.ep_size}" if board.ep_size > 1 else ""
    split = f"tp {board.tp_size}{experts}" if board.cp_size == 1 else f"cp {board.cp_size}"
    split = f"tp {board.tp_size}, {split}" if min(board.cp_size, board.tp_size) > 1 else split
    facts = [split, board.engine, ", ".join(board.checks)]
    facts += ["sequence parallel"] * board.sequence_parallel
    facts += [f"checkpointing ({board.checkpointing})"] * bool(board.checkpointing)
    facts += [f"training on {board.mesh}"] * bool(board.mesh)
    facts += [f"length {', '.join(map(str, board.lengths))}"] * bool(board.lengths)
    title = "".join(f" · {fact}" for fact in facts)
    sections: list[RenderableType] = [Text.assemble((board.mapping, "bold"), title), _scores(board)]
    for field, head in (("reason", "Why not"), ("uncut", "Not sharded along the sequence")):
        if reasons := [(score, getattr(score, field)) for score in board.scores if getattr(score, field)]:
            sections += [heading(head), _reasons(reasons)]
    if any(score.communication for score in board.scores):
        table = _table("type", *TRAFFIC_COLUMNS)
        for score in board.scores:
            for traffic in score.communication:
                table.add_row(Text(score.model_type, "cyan"), *map(Text, traffic_row(traffic)))
        sections += [heading("Communication of a block, in bytes per token"), table]
    return Group(*sections, heading("Totals"), *_totals(board))


def score_line(score: Score) -> str:
    """Return one architecture in one line, for logs."""
    share = "" if score.share is None else f" share {score.share:.2f}"
    reason = f" · {score.reason}" if score.reason else ""
    reason += f" · sequence not sharded: {score.uncut}" if score.uncut else ""
    return f"{score.model_type} {score.verdict}{share} {score.seconds:.1f} s{reason}"


def _scores(board: Scoreboard) -> RenderableType:
    cut = ("regions",) if board.sequence_parallel else ()
    again = ("blocks again",) if board.checkpointing else ()
    columns = ("type", "class", "verdict", "share", "split", "unused", "forward", "backward")
    table = _table(*columns, *cut, *again, "moved/least", "error", "not checked", "seconds")
    for score in board.scores:
        share = score.share
        table.add_row(
            Text(score.model_type, "cyan"),
            score.class_name,
            Text(score.verdict, _VERDICTS.get(score.verdict, "")),
            "" if share is None else Text(f"{share:.2f}", "" if share >= _GOOD_SHARE else "yellow"),
            f"{score.split}/{score.counted}" if score.counted else "",
            str(len(score.unused) or ""),
            _number(score.forward),
            _number(score.backward),
            *([_number(score.regions)] if board.sequence_parallel else []),
            *(["{1}/{0}".format(*score.recomputed) if score.recomputed else ""] if again else []),
            "" if score.ratio is None else f"{score.ratio:.2f}",
            "" if score.error is None else f"{score.error:.0e}",
            ", ".join(score.not_checked),
            f"{score.seconds:.1f}",
        )
    return table


def _reasons(reasons: list[tuple[Score, str]]) -> RenderableType:
    table = _table("type", "verdict", "reason", header=False)
    for score, reason in reasons:
        verdict = Text(score.verdict, _VERDICTS.get(score.verdict, ""))
        table.add_row(Text(score.model_type, "cyan"), verdict, Text(reason))
    return table


def _totals(board: Scoreboard) -> list[RenderableType]:
    table = _table("verdict", "number", header=False)
    for verdict, number in board.totals().items():
        table.add_row(Text(verdict, _VERDICTS.get(verdict, "")), str(number))
    shares = [score.share for score in board.scores if score.share is not None]
    full = sum(share >= _GOOD_SHARE for share in shares)
    lines: list[RenderableType] = [table]
    if shares:
        lines.append(Text(f"{full} of {len(shares)} shard at least {_GOOD_SHARE:.0%} of their weights"))
    ratios = [score.ratio for score in board.scores if score.ratio is not None]
    if ratios:
        least = sum(ratio < _NO_MORE for ratio in ratios)
        lines.append(Text(f"{least} of {len(ratios)} communicate no more than the minimum for their split"))
    if board.sequence_parallel:
        cut = [score for score in board.scores if score.regions is not None]
        exact = sum(score.verdict == "exact" for score in cut)
        lines.append(Text(f"{len(cut)} sharded along the sequence, {exact} of them exact"))
    done = [score.recomputed for score in board.scores if score.recomputed]
    if done:
        blocks, again = (sum(counts) for counts in zip(*done, strict=True))
        lines.append(Text(f"all {blocks} blocks of {len(done)} architectures checkpointed, {again} recomputed"))
    versions = ", ".join(f"{name} {version}" for name, version in board.versions.items())
    lines.append(Text(f"{len(board.scores)} architectures in {board.seconds:.0f} s ({versions})"))
    return lines


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}" if value == int(value) else f"{value:.1f}"


_RIGHT = ("share", "split", "unused", "forward", "backward", "regions", "blocks again", "moved/least", "error",
          "seconds", "number")  # fmt: skip


def _table(*columns: str, header: bool = True) -> Table:
    return plain_table(*columns, header=header, right=_RIGHT)
