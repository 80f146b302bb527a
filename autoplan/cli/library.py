"""`autoplan doctor`, `autoplan rules` and `autoplan scoreboard`: commands that take no MODEL."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli.shared import FINDINGS, OK, AsJson, CpSize, Cut, Engine, EpSize, Output, emit, note, progress
from autoplan.common.errors import AutoplanError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoplan.values import Score


def doctor(as_json: AsJson = False, output: Output = None) -> None:
    """Look up all that autoplan rests on in the installed torch and transformers."""
    from autoplan.values.plain import plain

    with progress("checking what changed in the installed torch and transformers"):
        from autoplan.doctor.examine import examine

        diagnosis = examine()
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    parts: list[RenderableType] = [
        Text(f"{library} {version}, tested with {diagnosis.tested[library]}")
        for library, version in diagnosis.versions.items()
    ]
    verdict = f"{len(diagnosis.moved)} moved" if diagnosis.moved else "none moved"
    parts.append(Text(f"{diagnosis.checked} names checked, {verdict}"))
    if diagnosis.moved:
        table = Table("name", "what was seen", "therefore", box=None, header_style="bold", pad_edge=False)
        for entry in diagnosis.moved:
            table.add_row(Text(entry.name), Text(entry.what), Text(entry.consequence))
        parts.append(table)
    emit(Group(*parts), plain(diagnosis) | {"ok": diagnosis.ok}, as_json, output)
    raise typer.Exit(OK if diagnosis.ok else FINDINGS)


rules_app = typer.Typer(help="List, show and test the rules that name roles and choose styles.", no_args_is_help=True)


@rules_app.command("list")
def rules_list(as_json: AsJson = False, output: Output = None) -> None:
    """All rules, a line each."""
    from autoplan.decide.rulebook.read import load_rules
    from autoplan.emit.tables.terminal import rule_to_dict, rules_view

    rules = load_rules()
    emit(rules_view(rules), [rule_to_dict(rule) for rule in rules], as_json, output)


@rules_app.command("show")
def rules_show(
    rule_id: Annotated[str, typer.Argument(metavar="RULE", help="As listed by `autoplan rules list`.")],
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """One rule: what it recognises, why, where it stops, examples."""
    from autoplan.common.patterns import nearest
    from autoplan.decide.rulebook.read import load_rules
    from autoplan.emit.tables.terminal import rule_to_dict, rule_view

    rules = {rule.id: rule for rule in load_rules()}
    if rule_id not in rules:
        close = ", ".join(nearest(rule_id, rules))
        hint = f"rules like it: {close}" if close else "`autoplan rules list` prints all"
        raise AutoplanError(f"there is no rule {rule_id!r}", hint=hint)
    emit(rule_view(rules[rule_id]), rule_to_dict(rules[rule_id]), as_json, output)


@rules_app.command("test")
def rules_test(
    strict: Annotated[
        bool, typer.Option("--strict", help="Also remove each part of each rule: an example must fail.")
    ] = (False),
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Check that each rule does what its examples say."""
    from autoplan.decide.rulebook.rule_tests import test_rules
    from autoplan.emit.tables.terminal import results_view
    from autoplan.values.plain import plain

    with progress("testing the rules on their examples"):
        results = test_rules(strict=strict)
    emit(results_view(results), plain(results), as_json, output)
    raise typer.Exit(OK if all(result.ok for result in results) else FINDINGS)


Checks = StrEnum("Checks", ["fast", "all"])
Checkpointing = StrEnum("Checkpointing", ["block", "submodule", "selective"])


def scoreboard(
    mapping: Annotated[
        str, typer.Argument(metavar="MAPPING", help="causal_lm, image_text, seq2seq, masked_lm, speech or base.")
    ],
    only: Annotated[list[str] | None, typer.Option(metavar="TYPE", help="Only this model type; repeatable.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Number of ranks; 2 unless --cp is given.")] = None,
    ep: EpSize = 1,
    cp: CpSize = 1,
    engine: Annotated[Engine, typer.Option(help="Run ranks as threads, or as processes that communicate by gloo.")] = (
        Engine.threads
    ),
    checks: Annotated[Checks, typer.Option(help="fast: outputs and every gradient; all: all checks of verify.")] = (
        Checks.fast
    ),
    jobs: Annotated[int, typer.Option(min=1, help="Architectures to run in parallel.")] = 1,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit per architecture.")] = 180.0,
    sequence_parallel: Cut = False,
    seq: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Run sequences of this length; repeatable (default 10).")
    ] = None,
    checkpointing: Annotated[
        Checkpointing | None, typer.Option(help="Checkpoint all blocks: whole, their parts, or by operation.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="SIZES", help="Also train on this mesh (dp=2,tp=2), as `verify --mesh` does.")
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Plan and verify tiny clones of all architectures that transformers lists in a mapping."""
    from autoplan.check.scoreboard.run import scoreboard as run
    from autoplan.emit.tables.audit_report import scoreboard_view

    options: dict[str, Any] = {"ep_size": ep} if ep > 1 else {}
    options |= {"cp_size": cp} if cp > 1 else {}
    options |= {"checkpointing": checkpointing.value} if checkpointing else {}
    options |= {"mesh": mesh} if mesh else {}
    with _bar() as progress:
        board = run(
            mapping,
            tp or (1 if cp > 1 else 2),
            only=only or (),
            engine=engine.value,
            checks=checks.value,
            jobs=jobs,
            timeout=timeout,
            sequence_parallel=sequence_parallel,
            lengths=seq or (),
            progress=progress,
            **options,
        )
    emit(scoreboard_view(board), board.to_dict(), as_json, output)
    raise typer.Exit(OK if board.ok else FINDINGS)


@contextmanager
def _bar() -> Iterator[Any]:
    """Yield a progress function for stderr: a bar on a terminal, otherwise (a log) a line per finished item."""
    from autoplan.emit.tables.audit_report import score_line

    if not sys.stderr.isatty():

        def line(done: int, total: int, name: str, score: Score | None) -> None:
            if score is not None:
                note(f"{done}/{total} {score_line(score)}")

        yield line
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(done: int, total: int, name: str, score: Score | None) -> None:
            bar.update(task, completed=done, total=total, description=name)

        yield show
