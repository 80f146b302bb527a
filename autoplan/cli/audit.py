"""`autoplan audit` and `autoplan compare`: written plans, checked against the model."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoplan.cli.estimate import AskedGpu, Estimated, sizes_of
from autoplan.cli.shared import FINDINGS, OK, AsJson, Output, Page, TpSize, Trust, emit, note, progress, write_report
from autoplan.common.errors import AutoplanError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from autoplan.values import Report


FailOn = StrEnum("FailOn", ["error", "warn"])


PlanOf = Annotated[
    str,
    typer.Option("--plan", metavar="PLAN", help="hf, inferred, a plan file, a plan id, or package.module:attribute."),
]


def audit(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As in `autoplan plan`.")],
    plan: PlanOf = "hf",
    tp: TpSize = 2,
    layers: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Class name or path that FSDP or checkpointing wraps; repeatable."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per step and rank, for the cost of gathering.")] = 8192,
    dtype: Annotated[str | None, typer.Option(help="Also run in this dtype, to tell bugs from rounding.")] = None,
    fail_on: Annotated[FailOn, typer.Option("--fail-on", help="Exit with code 1 from this level on.")] = FailOn.error,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write the corrected and audited plan, in its own dialect, to the file of -o.")
    ] = False,
    claims: Annotated[
        bool, typer.Option("--claims", help="Verify all claims of the class: tp, ep, pp, cp, checkpointing.")
    ] = False,
    cp: Annotated[
        bool, typer.Option("--cp", help="Verify the claim of context parallelism alone, as accelerate would run it.")
    ] = False,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    as_sarif: Annotated[bool, typer.Option("--sarif", help="Print SARIF 2.1.0, for code review.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")] = False,
    memory: Estimated = False,
    gpu: AskedGpu = None,
    page: Page = None,
    output: Output = None,
) -> None:
    """Hold a plan against the model: what is wrong, with proof; what costs more than it needs; what is dead."""
    if as_json + as_sarif + as_markdown > 1:
        raise AutoplanError("--json, --sarif and --markdown exclude each other", hint="choose one")
    levels = ("error",) if fail_on == FailOn.error else ("error", "warn")
    if claims or cp:
        report = _claims(model, tp, "" if claims else "context-parallel", trust_remote_code, as_json, output)
        raise typer.Exit(FINDINGS if any(finding.level in levels for finding in report.findings) else OK)
    from rich.console import Group

    from autoplan.emit.tables.audit_report import audit_view, markdown

    if fix and output is None:
        raise AutoplanError("--fix writes the corrected plan to a file", hint="give -o FILE")

    with progress(f"auditing {plan} for {model} at tp {tp}"):
        from autoplan.check.audit import audit as run  # loads torch and transformers, which takes seconds

        report = run(model, plan, tp, layers=layers, tokens=tokens, dtype=dtype, trust_remote_code=trust_remote_code)
    write_report(report, page)
    if fix:
        assert output is not None
        _write_fixed(model, plan, report, output, trust_remote_code)
        output = None
    if as_sarif:
        emit(json.dumps(_sarif(report, plan), indent=2, ensure_ascii=False), None, False, output)
    else:
        plain = (memory or gpu is not None) and not as_json and not as_markdown
        memory_table = _memory(model, report, tp, gpu or "h100", trust_remote_code) if plain else None
        view = audit_view(report) if memory_table is None else Group(audit_view(report), "", memory_table)
        emit(markdown(report) if as_markdown else view, report.to_dict(), as_json, output)
    raise typer.Exit(FINDINGS if any(finding.level in levels for finding in report.findings) else OK)


def _claims(model: str, tp: int, only: str, trust_remote_code: bool, as_json: bool, output: Path | None) -> Report:
    from autoplan.emit.tables.audit_report import claims_view

    with progress(f"verifying the claims of {model}"):
        from autoplan.check.audit.claims import audit_claims
        from autoplan.hf.source import resolve

        report = audit_claims(resolve(model, trust_remote_code=trust_remote_code), tp, only=only)
    emit(claims_view(report), report.to_dict(), as_json, output)
    return report


def _write_fixed(model: str, plan: str, report: Report, output: Path, trust_remote_code: bool) -> None:
    """Write the corrected plan, or an unchanged plan if nothing is wrong; nothing if no correction passed its audit."""
    from autoplan.check.audit.lines import plan_as_written
    from autoplan.check.audit.rows import write_fixed
    from autoplan.hf.source import resolve

    fixed = report.fixed
    if fixed is None and not report.ok:
        note(f"no correction of {plan} passed the audit; {output} was not written")
        return
    if fixed is None:
        source = resolve(model, trust_remote_code=trust_remote_code)
        fixed = plan_as_written(plan, source.module(), source.name)
    write_fixed(fixed, output, f"{plan} for {model}")
    same = report.fixed is None
    note(f"nothing to correct: {output} is the plan as it was" if same else f"the corrected plan is in {output}")


def _memory(model: str, report: Report, tp: int, gpu: str, trust_remote_code: bool) -> RenderableType | None:
    """Return a rank's memory with everything split, at valid tp sizes; and how much more the audited plan keeps."""
    from rich.console import Group
    from rich.text import Text

    import autoplan
    from autoplan.emit.words import bytes_text

    try:
        ours = autoplan.plan(model, tp, source="inferred", prove="none", trust_remote_code=trust_remote_code)
    except AutoplanError:  # nothing can be split at this size, as findings say
        return None
    sizes = sizes_of(model, ours, True, gpu, trust_remote_code=trust_remote_code)
    more = report.details["bytes_per_rank"] - report.details["bytes_per_rank_inferred"]
    keeps = f"; the audited plan replicates {bytes_text(more)} more (in training, gradients and states too)"
    keeps = keeps if more > 0 else ""
    return Group(Text(f"If everything possible is sharded{keeps}:", "bold"), sizes) if sizes is not None else None


def _sarif(report: Report, plan: str) -> dict[str, Any]:
    from autoplan.check.audit.checks import CHECKS
    from autoplan.check.audit.lines import lines_of, plan_file_of
    from autoplan.emit.tables.audit_report import sarif

    file = plan_file_of(plan)
    lines = lines_of(file, report.details["verdicts"])
    return sarif(report, {check.name: check.about for check in CHECKS}, file or plan, lines)


def compare(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As in `autoplan plan`.")],
    a: Annotated[str, typer.Option("--a", metavar="PLAN", help="One plan, as in `autoplan audit --plan`.")] = "hf",
    b: Annotated[str, typer.Option("--b", metavar="PLAN", help="The other plan.")] = "inferred",
    tp: TpSize = 2,
    trust_remote_code: Trust = False,
    as_json: AsJson = False,
    page: Page = None,
    output: Output = None,
) -> None:
    """Two plans for one model, weight by weight. The exit code is 1 when they differ, or one is wrong."""
    from autoplan.emit.tables.terminal import report_view

    with progress(f"comparing {a} and {b} for {model} at tp {tp}"):
        from autoplan.check.audit.auditor import compare_plans
        from autoplan.hf.source import resolve

        report = compare_plans(resolve(model, trust_remote_code=trust_remote_code), a, b, tp)
    write_report(report, page)
    emit(report_view(report, model), report.to_dict(), as_json, output)
    raise typer.Exit(FINDINGS if report.findings else OK)
