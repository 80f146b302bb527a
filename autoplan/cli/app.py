"""The command line. Data goes to stdout, messages to stderr; exit code 0 (success), 1 (findings) or 2 (failure).

torch is imported by commands that need it, so that `--help` answers at once.
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from autoplan.cli.audit import audit, compare
from autoplan.cli.estimate import AskedGpu, Estimated, calibrate, choose, dryrun, estimate, report, sizes_of
from autoplan.cli.library import doctor, rules_app, scoreboard
from autoplan.cli.shared import (
    FAILED,
    FINDINGS,
    OK,
    AsJson,
    CpSize,
    Cut,
    Engine,
    EpSize,
    Model,
    Output,
    TpSize,
    Trust,
    as_options,
    emit,
    ended_on_request,
    flushed,
    note,
    plan_of,
    progress,
    speaking_of,
)
from autoplan.common.errors import AutoplanError
from autoplan.common.stages import seldom_collected

if TYPE_CHECKING:
    from autoplan.values import Finding

app = typer.Typer(
    help="Plan the tensor parallelism of a model that has no plan, and verify it before paying for GPUs.",
    epilog="MODEL is a folder with a config.json, package.module:builder, a model type (llama), or a hub id.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


Prove = StrEnum("Prove", ["graph", "ranks", "none"])
Source = Annotated[str, typer.Option(help="Source of the decisions: auto or inferred (analysis), or a plan file.")]


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=lambda wanted: _version(wanted), help="Print it.")
    ] = False,
) -> None:
    pass


def _version(wanted: bool) -> None:
    from autoplan.version import __version__

    if wanted:
        print(f"autoplan {__version__}")
        raise typer.Exit(OK)


@app.command()
def plan(
    model: Model,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Number of ranks.")] = None,
    source: Source = "auto",
    prove: Annotated[Prove, typer.Option(help="How to verify the plan before it is printed.")] = Prove.graph,
    ep: EpSize = 1,
    cp: CpSize = 1,
    sequence_parallel: Cut = False,
    uneven: Annotated[
        str, typer.Option(metavar="never|blocks", help="May ranks hold unequal numbers of quantised blocks?")
    ] = "never",
    trial_seconds: Annotated[
        float, typer.Option("--trial-seconds", min=0.001, help="Time limit of the trial on simulated ranks.")
    ] = 300.0,
    inputs: Annotated[
        str | None,
        typer.Option(metavar="MODULE:FUNCTION", help="Function that returns example arguments for the forward."),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of your own rules and plans, which take precedence.")
    ] = None,
    cache: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Cache plans in this folder.")] = None,
    memory: Estimated = False,
    gpu: AskedGpu = None,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Say how a model is split, and why. -o writes a plan file (.yaml or .json)."""
    from rich.console import Group

    from autoplan.decide.written_plans.plan_file import check_suffix
    from autoplan.emit.tables.terminal import plan_view

    if output is not None:
        check_suffix(output)
    if gpu is not None:
        from autoplan.forecast.devices import load_device

        load_device(gpu)  # before the plan is made, and printed
    if tp is None and cp == 1:
        raise typer.BadParameter("pass the number of ranks, or --cp", param_hint="--tp")
    how: dict[str, Any] = {"ep": ep, "cp": cp, "sequence_parallel": sequence_parallel, "trial_seconds": trial_seconds}
    how |= {"uneven": uneven, "rules": rules, "cache": cache}
    example: dict[str, Any] = {}
    if inputs is not None:
        from autoplan.hf.model_string import inputs_from_string

        example["inputs"] = inputs_from_string(inputs)
    result = plan_of(model, tp or 1, trust_remote_code, source=source, prove=prove.value, **how, **example)
    if output is None:
        emit(plan_view(result), result.to_dict(), as_json, None)
        if not as_json:  # print the plan before the slow estimate of a step
            sizes = sizes_of(model, result, memory, gpu, trust_remote_code=trust_remote_code, **example)
            if sizes is not None:
                emit(Group("", sizes), None, False, None)
    else:
        result.save(output)
        note(f"written to {output}")
    raise typer.Exit(_exit_code(result.findings) if result.proof.ok or not result.proof.was_asked else FINDINGS)


@app.command()
def explain(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As in `autoplan plan`, or a plan file.")],
    path: Annotated[str, typer.Argument(metavar="PATH", help="A module, a parameter, or a pattern of either.")],
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Number of ranks; a plan file has its own.")] = None,
    source: Source = "auto",
    ep: EpSize = 1,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Say why one module or parameter is split, or whole, and what runs around it."""
    missing = "required unless MODEL is a plan file"
    result = plan_of(model, tp, trust_remote_code, ep=ep, or_file=missing, source=source, prove="none")
    text = result.explain(path)
    emit(text, {"path": path, "explanation": text.splitlines()}, as_json, output)


@app.command()
def verify(
    model: Model,
    tp: Annotated[
        int | None, typer.Option("--tp", min=1, help="Tensor-parallel ranks; default: those of the plan, or 2.")
    ] = None,
    written: Annotated[
        str | None, typer.Option("--plan", metavar="PLAN", help="Verify this plan instead of making one.")
    ] = None,
    engine: Annotated[Engine, typer.Option(help="Run ranks as threads, or as processes that communicate by gloo.")] = (
        Engine.threads
    ),
    mesh: Annotated[
        str | None, typer.Option(help="Simulate a mesh, such as dp=2,tp=2, and check training on it.")
    ] = None,
    ep: Annotated[
        int | None, typer.Option("--ep", min=1, help="As in `autoplan plan`; a plan file has its own.")
    ] = None,
    cp: CpSize = 1,
    sequence_parallel: Cut = False,
    rounding: Annotated[
        bool, typer.Option("--rounding", help="Also run in bfloat16, to distinguish bugs from rounding.")
    ] = False,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    output: Output = None,
) -> None:
    """Prove a plan on simulated ranks: outputs, loss, every gradient, checkpoint, optimizer steps."""
    import autoplan
    from autoplan.decide.written_plans.plan_file import load_plan, names_plan_file
    from autoplan.emit.tables.terminal import report_view

    if written is None:
        loaded = None
    elif names_plan_file(written):
        loaded = load_plan(written)
    else:
        how: dict[str, Any] = {"source": written, "prove": "none", "sequence_parallel": sequence_parallel}
        loaded = plan_of(model, tp or 2, trust_remote_code, ep=ep or 1, **how)
    options: dict[str, Any] = {"tp_size": tp} | ({} if mesh is None else {"mesh": mesh})
    options |= {"engine": engine.value, "trust_remote_code": trust_remote_code, "rounding": rounding}
    options |= {"sequence_parallel": sequence_parallel} | ({} if ep is None else {"ep_size": ep})
    options |= {"cp_size": cp} if cp > 1 else {}
    ranks = mesh or tp or (cp if cp > 1 else 2 if loaded is None else loaded.ranks)
    with progress(f"verifying {model} on {ranks} simulated ranks"):
        report = autoplan.verify(model, loaded, **options)
    emit(report_view(report, model), report.to_dict(), as_json, output)
    raise typer.Exit(_exit_code(report.findings) if report.ok else FINDINGS)


@app.command()
def layers(model: Model, trust_remote_code: Trust = False, as_json: AsJson = False, output: Output = None) -> None:
    """The repeated blocks of a model: what FSDP2 gathers together and activation checkpointing takes."""
    import autoplan
    from autoplan.emit.tables.terminal import layers_view
    from autoplan.values.plain import plain

    with progress(f"looking for the blocks of {model}"):
        from autoplan.hf.source import resolve  # loads torch and transformers, which takes seconds

        source = resolve(model, trust_remote_code=trust_remote_code)
        stacks = autoplan.layers(source.module())
    emit(layers_view(stacks, source.name), plain(stacks), as_json, output)
    raise typer.Exit(OK if stacks else FINDINGS)


Target = StrEnum(
    "Target",
    {"torch": "torch", "hf": "hf", "hf_old": "hf-old", "automodel": "automodel", "deepspeed": "deepspeed",
     "accelerate": "accelerate", "megatron_fsdp": "megatron-fsdp", "vllm": "vllm"},
)  # fmt: skip


@app.command()
def export(
    model: Model,
    tp: TpSize,
    to: Annotated[Target, typer.Option(help="Target system.")],
    source: Source = "auto",
    ep: EpSize = 1,
    drop: Annotated[
        bool, typer.Option("--drop", help="Replicate what that system cannot express, instead of refusing.")
    ] = False,
    trust_remote_code: Trust = False,
    output: Output = None,
) -> None:
    """Write a plan for another system: a Python module, a dict, a config."""
    from autoplan.hf.source import resolve

    planned = plan_of(model, tp, trust_remote_code, ep=ep, source=source, prove="none")
    text = planned.export(to.value, resolve(model, trust_remote_code=trust_remote_code).module(), drop=drop)
    emit(text.rstrip("\n"), None, False, output)
    if reach := getattr(text, "note", ""):
        note(f"{to.value} {reach}")


app.add_typer(rules_app, name="rules")
for _command in (audit, compare, scoreboard, report, choose, estimate, dryrun, calibrate, doctor):
    app.command()(_command)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line; every exit has one of our exit codes."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # so that a terminal without × or → still gets the table
    code = FAILED
    with ended_on_request(), seldom_collected(), speaking_of(_options_of(arguments)):
        try:
            code = _answer(arguments)
        except AutoplanError as error:
            note(as_options(f"error: {error}"))
        except KeyboardInterrupt:
            note("interrupted")
        except Exception as error:  # a bug must not exit with 1, which means findings
            note(_mishap(error))
    sys.exit(flushed(code))


def _options_of(arguments: Sequence[str] | None) -> frozenset[str]:
    """Return the options of the requested command."""
    first = next(iter(sys.argv[1:] if arguments is None else arguments), "")
    command: Any = vars(typer.main.get_command(app))["commands"].get(first)
    return frozenset(text for option in getattr(command, "params", ()) for text in option.opts)


def _mishap(error: Exception) -> str:
    """Return the text for an unexpected error."""
    if isinstance(error, ImportError) and not (error.name or "").startswith("autoplan"):
        return f"error: {error}. A package is missing or incompatible: reinstall it"
    return f"{traceback.format_exc()}error: this is a bug in autoplan; see the traceback above"


_USAGE: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
_INTERRUPTED = 130  # typer's exit code for Ctrl-C


def _answer(arguments: Sequence[str] | None) -> int:
    """Run a command; turn what typer would print and exit with into one of our exit codes."""
    try:
        code = app(args=arguments, prog_name="autoplan", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _USAGE as error:
        error.show()
        return FAILED
    except SystemExit as ended:  # how typer handles a closed pipe
        return OK if isinstance(ended.__context__, BrokenPipeError) else FAILED
    except OSError as error:  # typer's own output: help, version
        if error.errno not in (errno.ENOSPC, errno.EIO, errno.EBADF):
            raise
        raise AutoplanError(f"cannot write to stdout: {error.strerror}") from error
    if code == _INTERRUPTED:
        raise KeyboardInterrupt
    return code if isinstance(code, int) else OK


def _exit_code(findings: tuple[Finding, ...]) -> int:
    """Return the exit code: warnings and errors count as findings, notes do not."""
    return FINDINGS if any(finding.level != "note" for finding in findings) else OK
