"""A scoreboard as tables: one line per architecture, reasons for what is not exact, totals at the end."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from autoplan.emit.tables.entry_table import TRAFFIC_COLUMNS, traffic_row
from autoplan.emit.tables.terminal import heading, plain_table
from autoplan.values import Score, Scoreboard

_COLOURS = {"exact": "green", "wrong": "bold red", "failed": "bold red", "refused": "yellow"}
_GOOD_SHARE = 0.99
_NO_MORE = 1.005  # the bound ignores a few numbers per token


def scoreboard_view(board: Scoreboard) -> RenderableType:
    """Return the scoreboard with all its sections."""
    experts = f" · ep {board.ep_size}" if board.ep_size > 1 else ""
    facts = [
        f"tp {board.tp_size}, cp {board.cp_size}"
        if min(board.cp_size, board.tp_size) > 1
        else f"cp {board.cp_size}"
        if board.cp_size > 1
        else f"tp {board.tp_size}{experts}",
        board.engine,
        ", ".join(board.checks),
    ]
    facts += ["sequence parallel"] * board.sequence_parallel
    facts += [f"checkpointing ({board.checkpointing})"] * bool(board.checkpointing)
    facts += [f"training on {board.mesh}"] * bool(board.mesh)
    facts += [f"length {', '.join(map(str, board.lengths))}"] * bool(board.lengths)
    title = "".join(f" · {fact}" for fact in facts)
    sections: list[RenderableType] = [Text.assemble((board.mapping, "bold"), title), _scores(board)]
    spoken = [(score, score.reason) for score in board.scores if score.reason]
    if spoken:
        sections += [heading("Why not"), _reasons(spoken)]
    uncut = [(score, score.uncut) for score in board.scores if score.uncut]
    if uncut:
        sections += [heading("Not sharded along the sequence"), _reasons(uncut)]
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
            Text(score.verdict, _COLOURS.get(score.verdict, "")),
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
        verdict = Text(score.verdict, _COLOURS.get(score.verdict, ""))
        table.add_row(Text(score.model_type, "cyan"), verdict, Text(reason))
    return table


def _totals(board: Scoreboard) -> list[RenderableType]:
    table = _table("verdict", "number", header=False)
    for verdict, number in board.totals().items():
        table.add_row(Text(verdict, _COLOURS.get(verdict, "")), str(number))
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
