"""Shared parts of all commands: options that mean the same everywhere, output, and exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.common.errors import AutoplanError
from autoplan.common.files.plain import write_whole
from autoplan.common.stages import set_inside, watched

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoplan.values import Plan

OK, FINDINGS, FAILED = 0, 1, 2


class Engine(StrEnum):
    """The ways to simulate ranks."""

    threads = "threads"
    gloo = "gloo"


Model = Annotated[str, typer.Argument(metavar="MODEL", help="Model to plan; see the end of `autoplan --help`.")]
TpSize = Annotated[int, typer.Option("--tp", min=1, help="Number of ranks.")]
EpSize = Annotated[
    int, typer.Option("--ep", min=1, help="Place experts on this many ranks: those of --tp, or with --tp 1 any.")
]
CpSize = Annotated[int, typer.Option("--cp", min=1, help="Shard the sequence over this many ranks.")]
LongCut = Annotated[
    int, typer.Option("--cp", min=1, help="Shard the sequence over N ranks; alone it is --mesh dp_shard=1,cp=N.")
]
Cut = Annotated[bool, typer.Option("--sequence-parallel", help="Shard the residual stream along the sequence.")]
Trust = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that ships with the model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _in_a_folder(path: Path | None) -> Path | None:
    """Refuse a file that cannot be written before anything is computed for it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise AutoplanError(f"cannot write {path}: there is no folder {path.parent}", hint="make it, or choose another")
    return path


Output = Annotated[
    Path | None,
    typer.Option("-o", "--output", metavar="FILE", help="Write to this file, not stdout.", callback=_in_a_folder),
]


def page_path(path: Path | None) -> Path | None:
    """Refuse a file that is no page before anything is computed for it."""
    from autoplan.emit.pages.markup import check_page

    return None if path is None else check_page(path)


Page = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Also write an HTML page.", callback=page_path)
]


def write_report(shown: Any, page: Path | None, **more: Any) -> None:
    """Write the page of a value, if it was asked for."""
    if page is not None:
        shown.report(page, **more)
        note(f"written to {page}")


def plan_of(
    model: str, tp: int | None, trust_remote_code: bool, *, ep: int = 1, cp: int = 1, or_file: str = "", **how: Any
) -> Plan:
    """Make a plan; with `or_file`, what is missing without `--tp`, MODEL may be a plan file instead."""
    import autoplan
    from autoplan.decide.written_plans.plan_file import load_plan, names_plan_file

    if or_file and names_plan_file(model):
        return load_plan(model)
    if tp is None:
        raise typer.BadParameter(or_file, param_hint="--tp")
    how |= {"trust_remote_code": trust_remote_code}
    how |= ({"ep_size": ep} if ep > 1 else {}) | ({"cp_size": cp} if cp > 1 else {})
    sizes = " ".join(f"{name} {size}" for name, size in (("tp", tp), ("cp", cp)) if size > 1)
    with progress(f"planning {model} for {sizes or 'one rank'}"):
        return autoplan.plan(model, tp_size=tp, **how)


_WORDS = re.compile(
    r"(?<![,\w])(?P<name>[a-z_]+)=(?P<value>\{(?:[^{}]|\{[^{}]*\})*\}|'[\w-]+'|\"[\w-]+\"|True|False|[\d.]*\d)?(?![\w=]|,\w)"
    r"(?: \(--[a-z-]+\))?"
)
_SIZES = frozenset(("tp", "ep", "cp"))  # "14336 is not divisible by tp=3" is a fact, not an argument
_OTHERWISE = {"tp_size": "--tp", "ep_size": "--ep", "cp_size": "--cp"}
_options: ContextVar[frozenset[str]] = ContextVar("_options", default=frozenset())


def speaking_of(options: frozenset[str]) -> AbstractContextManager[None]:
    """Make `as_options` use these options inside the block."""
    return set_inside(_options, options)


def as_options(text: str) -> str:
    """Write arguments of Python functions as options of the command that runs, if it has them.


    >>> with speaking_of(frozenset(("--prove", "--inputs", "--tp", "--sequence-parallel"))):
    ...     for text in ("prove='none' plans it", "with inputs={'x': tensor}", "tp_size=3", "tp=3", "pass inputs= if"):
    ...         print(as_options(text))
    --prove none plans it
    with --inputs MODULE:FUNCTION (it returns {'x': tensor})
    --tp 3
    tp=3
    pass --inputs if
    """
    return _WORDS.sub(_as_option, text)


def _as_option(match: re.Match[str]) -> str:
    option = _OTHERWISE.get(match["name"], f"--{match['name'].replace('_', '-')}")
    if match["name"] in _SIZES or option not in _options.get():
        return match[0]
    match match["value"]:
        case None | "True":
            return option
        case "False":
            return f"no {option}"
        case value if value.startswith("{"):
            return f"{option} MODULE:FUNCTION (it returns {value})"
        case value:
            return f"{option} {value.strip(chr(34) + chr(39))}"


def emit(view: RenderableType | str, data: Any, as_json: bool, output: Path | None) -> None:
    """Print text, a table or JSON to stdout or a file. Colour only on a terminal; elsewhere the text of `str(plan)`."""
    from autoplan.emit.tables.terminal import plain_text

    if output is None and not as_json and not isinstance(view, str) and sys.stdout.isatty():
        from rich.console import Console

        console = Console(highlight=False, markup=False)
        with console.capture() as captured:
            console.print(view)
        print(as_options(captured.get()), end="")
        return
    shown = as_options(view if isinstance(view, str) else plain_text(view))
    text = json.dumps(data, indent=2, ensure_ascii=False) if as_json else shown
    if output is None:
        with _to_stdout():
            print(text)
            sys.stdout.flush()
        return
    write_whole(output, f"{text}\n")
    note(f"written to {output}")


def note(text: str) -> None:
    with suppress(OSError):  # stderr is closed
        print(text, file=sys.stderr, flush=True)


@contextmanager
def _to_stdout() -> Iterator[None]:
    """Ignore a closed pipe (`| head`) inside the block, and raise on a full disk."""
    try:
        yield
    except OSError as error:
        # Discard stdout's buffer, which would fail again when Python ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise AutoplanError(f"cannot write to stdout: {error.strerror}", hint="or use -o") from error


def flushed(code: int) -> int:
    """Return the exit code after all output is flushed."""
    try:
        with _to_stdout():
            sys.stdout.flush()
    except AutoplanError as error:
        note(f"error: {error}")
        return FAILED
    return code


@contextmanager
def ended_on_request() -> Iterator[None]:
    """Let SIGTERM end a command like Ctrl-C: no process and no half-written file is left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress(text: str) -> Iterator[None]:
    """Show on stderr what slow code is doing, and for how long; silent unless stderr is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(text, total=None)
        with watched(lambda stage: shown.update(task, description=f"{text}: {stage}")):
            yield
