"""`autoplan scoreboard`: every architecture of a transformers mapping, planned and verified, one line each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli.shared import FINDINGS, OK, AsJson, Cut, Engine, EpSize, Output, TpSize, emit, note

if TYPE_CHECKING:
    from autoplan.values import Score


class Checks(StrEnum):
    """How much of verify a scoreboard runs."""

    fast = "fast"
    all = "all"


class Checkpointing(StrEnum):
    """What activation checkpointing computes again."""

    block = "block"
    submodule = "submodule"
    selective = "selective"


def scoreboard(
    mapping: Annotated[
        str, typer.Argument(metavar="MAPPING", help="causal_lm, image_text, seq2seq, masked_lm, speech or base.")
    ],
    only: Annotated[list[str] | None, typer.Option(metavar="TYPE", help="Only this model type; repeatable.")] = None,
    tp: TpSize = 2,
    ep: EpSize = 1,
    engine: Annotated[Engine, typer.Option(help="Ranks as threads, or as processes that talk over gloo.")] = (
        Engine.threads
    ),
    checks: Annotated[Checks, typer.Option(help="fast: outputs and every gradient; all: all that verify does.")] = (
        Checks.fast
    ),
    jobs: Annotated[int, typer.Option(min=1, help="Architectures at a time.")] = 1,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="For each architecture.")] = 180.0,
    sequence_parallel: Cut = False,
    seq: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Run sequences of this length; repeatable (default 10).")
    ] = None,
    checkpointing: Annotated[
        Checkpointing | None, typer.Option(help="Checkpoint all blocks: whole, their parts, or by operation.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="SIZES", help="Train on this mesh too (dp=2,tp=2), as `verify --mesh` does.")
    ] = None,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Plan and verify tiny clones of all architectures that transformers lists in a mapping."""
    from autoplan.check.scoreboard.run import scoreboard as run
    from autoplan.emit.tables.scoreboard_table import scoreboard_view

    asked: dict[str, Any] = {"ep_size": ep} if ep > 1 else {}
    asked |= {"checkpointing": checkpointing.value} if checkpointing else {}
    asked |= {"mesh": mesh} if mesh else {}
    with _bar() as progress:
        board = run(
            mapping,
            tp,
            only=only or (),
            engine=engine.value,
            checks=checks.value,
            jobs=jobs,
            timeout=timeout,
            sequence_parallel=sequence_parallel,
            lengths=seq or (),
            progress=progress,
            **asked,
        )
    emit(scoreboard_view(board), board.to_dict(), as_json, output)
    raise typer.Exit(OK if board.ok else FINDINGS)


@contextmanager
def _bar() -> Iterator[Any]:
    """Where a long list stands, on stderr: a bar on a terminal, elsewhere (a log) a line for each that is done."""
    from autoplan.emit.tables.scoreboard_table import score_line

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
