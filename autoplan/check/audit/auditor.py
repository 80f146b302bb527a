"""Hold a plan that somebody wrote against the model, or two of them against each other.

    read the plan → analyse the model → run the plan on simulated ranks → the checks → a verdict for each entry

The run decides what is an error: a finding at error level is numerically wrong, or cannot run at this size.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from autoplan.check.audit.checks import CHECKS
from autoplan.check.audit.lines import ForeignPlan, Line, foreign_of, read_foreign
from autoplan.check.audit.repair import causes, needs_repair, repair, with_causes
from autoplan.check.audit.subject import Audited, Said, Settings, Weight
from autoplan.check.audit.trial import AuditRun, drafted, try_on_ranks
from autoplan.common.errors import AutoplanError, PlanMismatchError
from autoplan.common.options import Wish, check_count
from autoplan.common.patterns import Universe, fold_names, is_under, matches
from autoplan.decide.plan.chosen import choices_of_plan, experts_of, wish_of_plan
from autoplan.decide.plan.folding import Names, flow_of
from autoplan.emit.words import LEVELS
from autoplan.execute.tensor_parallel import check_names
from autoplan.values import AllGather, Capabilities, CutsOf, Drawn, Finding, Plan, Report
from autoplan.values.plan import digest

DEFAULT = Settings()
DTYPES = ("bfloat16", "float16", "float32", "float64")


def audit(
    model: Any,
    plan: Any,
    tp_size: int = 2,
    *,
    inputs: Mapping[str, Any] | None = None,
    layers: Any = None,
    tokens: int = 8192,
    gradient_norm: Any = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
) -> Report:
    """Audit `plan` for `model` at `tp_size`.

    `model` and `inputs` are what `autoplan.plan` takes. `plan` is a dict of styles (torch's objects or transformers'
    strings), "hf" (what transformers ships), "inferred", a plan file, a plan id, a dotted path, or a Plan.

    `layers` are the modules that FSDP wraps or checkpointing recomputes: class names, paths or patterns, a function
    (model) -> modules, or {"fsdp": …, "checkpointing": …}. `tokens` of one step weigh what is gathered.
    `gradient_norm` is a function (model, mesh) -> number that computes a norm for clipping on every rank. `dtype`
    ("bfloat16") shows how much of a difference is rounding.

    `report.details["verdicts"]` says of each entry: same, costlier, different, wrong, or dead (it matches nothing).
    """
    from autoplan.hf.source import resolve

    # Refuse what is of another kind before anything is built
    check_count("tokens", tokens)
    if gradient_norm is not None and not callable(gradient_norm):
        raise AutoplanError(f"gradient_norm={gradient_norm!r}", hint="pass a function (model, mesh) -> number")
    if dtype is not None and (not isinstance(dtype, str) or dtype not in DTYPES):
        raise AutoplanError(f"dtype={dtype!r}", hint=f"choose one of {', '.join(DTYPES)}")
    source = resolve(model, trust_remote_code=trust_remote_code, inputs=inputs)
    return audit_source(source, plan, tp_size, Settings(tokens, layers, gradient_norm, dtype))


def audit_source(
    source: Any, plan: Any, tp_size: int, settings: Settings = DEFAULT, *, run: bool = True, correct: bool = True
) -> Report:
    """`audit` of a resolved source. Not `run`: no trial on ranks; not `correct`: no search for a correction."""
    start = time.perf_counter()
    subject = subject_of(source, plan, tp_size, settings, run=run)
    noted = tuple(_findings(subject))
    noted, fixed = _corrected(subject, source, noted) if run and correct else (noted, None)
    findings = sorted(noted, key=lambda finding: (LEVELS.index(finding.level), finding.is_consequence))
    stored, possible = held_bytes(subject)
    numbers = subject.numbers
    return Report(
        ok=not any(finding.level == "error" for finding in findings),
        findings=tuple(findings),
        gradients=dict(numbers.gradients) if numbers is not None else {},
        forward=numbers.forward if numbers is not None else None,
        tp_size=tp_size,
        details={
            "model": subject.name,
            "plan": subject.plan.name,
            "dialect": subject.plan.dialect,
            "verdicts": verdicts(subject, findings),
            "bytes_per_rank": stored,
            "bytes_per_rank_inferred": possible,
            "whole": unsplit_share(subject),
            "ran": _ran(subject),
            "outcome": subject.outcome,
            "seconds": round(time.perf_counter() - start, 2),
        },
        drawn=drawn_of(subject),
        fixed=fixed,
    )


def _corrected(subject: Audited, source: Any, findings: tuple[Finding, ...]) -> tuple[tuple[Finding, ...], Any]:
    """The findings with their causes first, and a correction of the plan that passes its own audit, if one does."""
    if subject.plan.plan is None:
        repaired = repair(subject, source) if needs_repair(subject, findings) else None
        return (findings, None) if repaired is None else (with_causes(subject, findings, repaired), repaired.raw)
    if subject.is_wrong:
        for other in causes.candidates(subject, source):
            if audit_source(source, other, subject.plan.plan.tp_size, correct=False).ok:
                return causes.with_differences(subject, findings, other), other
    return findings, None


def _ran(subject: Audited) -> str:
    if subject.numbers is None:
        return f"not run: {subject.unproven}"
    by = "an imitation of DeepSpeed's layers" if subject.plan.dialect == "deepspeed" else subject.plan.dialect
    ranks = subject.numbers.tp_size
    stand_in = f" (tried at tp={ranks} in place of tp={subject.tp_size})" if ranks != subject.tp_size else ""
    outcome = "exact" if subject.numbers.ok else "wrong"
    return f"{outcome} on {ranks} simulated ranks{stand_in}, run by {by}"


def _findings(subject: Audited) -> Iterable[Finding]:
    """Return all findings. Hints about rows are marked: a repair replaces them by changes that passed an audit."""
    findings: list[Finding] = []
    for check in CHECKS:
        own = check.run(subject, tuple(findings))
        findings += [
            replace(finding, hint=f"{finding.hint} (not audited)") if check.rows and finding.hint else finding
            for finding in own
        ]
    return findings


def subject_of(source: Any, plan: Any, tp_size: int, settings: Settings = DEFAULT, *, run: bool = True) -> Audited:
    """Read the plan, analyse the model, run the plan."""
    from autoplan.analyse.picture.dataflow import dataflow
    from autoplan.analyse.splits.experts import solve_experts
    from autoplan.hf.stacks import layers
    from autoplan.planning import capture_source

    check_count("tp_size", tp_size)
    module = source.module()
    foreign = _read(source, plan, module, tp_size)
    captured = capture_source(source, module)
    ours = foreign.plan or Plan(source.name, tp_size)
    tp_size = ours.ranks
    solution = solve_experts(captured.trace, tp_size, experts=experts_of(ours.tp_size, ours.ep_size, Capabilities()))
    right = None  # what the choices of a plan of ours give when everything else is derived again
    if foreign.plan is not None:
        right = drafted(source, wish_of_plan(foreign.plan), module, choices=choices_of_plan(foreign.plan))
    trial = try_on_ranks(source, foreign, tp_size, right) if run else AuditRun(reason="not requested")
    return Audited(
        model=module,
        name=source.name,
        plan=foreign,
        tp_size=tp_size,
        solution=solution,
        flow=dataflow(captured.trace),
        stacks=layers(module),
        settings=settings,
        numbers=trial.numbers,
        unproven=trial.reason or "the unsharded model's outputs or gradients are NaN",
        right=right,
        refused=_refused(module, foreign.plan, right) if run else "",
        ran_at_full_size=trial.full_size,
        extra={"clone": trial.tiny, "thawed": trial.thawed, "captured": captured},
        packed=source.packed(module),
    )


def _read(source: Any, plan: Any, module: Any, tp_size: int) -> ForeignPlan:
    foreign = read_foreign(plan, module, source.name)
    if isinstance(foreign, str):
        from autoplan.decide.written_plans.read import read_source
        from autoplan.planning import draft_plan

        written = read_source(foreign, None, module, name=source.name, tp_size=tp_size)
        ours = written if isinstance(written, Plan) else draft_plan(source, Wish(tp_size), choices=written).plan
        return replace(foreign_of(ours), name=f"the {foreign} plan")
    if foreign.plan is not None and foreign.plan.tp_size != tp_size:
        hint = f"audit it at tp_size={foreign.plan.tp_size}, or make a new plan"
        raise PlanMismatchError(f"{foreign.name} is a plan for {foreign.plan.over}, not tp={tp_size}", hint=hint)
    return foreign


def _refused(model: Any, plan: Plan | None, right: Plan | None) -> str:
    """Return why `parallelize` would not apply an autoplan plan; "" if it would, as far as can be told unproven."""
    if plan is None or plan.ranks == 1:
        return ""
    try:
        check_names(model, plan)
    except PlanMismatchError as error:
        return f"{error.message}: `parallelize` refuses it"
    if right is None or not plan.made_for.content or digest(plan) == plan.made_for.content:
        return ""
    styles = [{(entry.pattern, entry.style) for entry in each.entries} for each in (plan, right)]
    if plan.runtime == right.runtime and styles[0] == styles[1]:
        return ""
    return "the plan was edited after it was made and no longer follows from its choices: `parallelize` refuses it"


def compare_plans(source: Any, a: Any, b: Any, tp_size: int) -> Report:
    """Compare two plans (in any form that `audit` takes). The report is ok when neither is wrong.

    `details["differ"]` counts the weights that they cut otherwise, and `details["verdict"]` says it in a word.
    """
    first, other = (subject_of(source, plan, tp_size) for plan in (a, b))
    groups: dict[tuple[str, str], list[Weight]] = {}
    for left, right in zip(first.weights, other.weights, strict=True):
        a_does, b_does = ((weight.said.dim, weight.said.rows, gathers(weight.said)) for weight in (left, right))
        if a_does != b_does:
            groups.setdefault((cut_text(left.said), cut_text(right.said)), []).append(left)
    differ = sum(map(len, groups.values()))
    wrong = [subject for subject in (first, other) if subject.is_wrong]
    findings = [Finding("numbers", "error", "", f"{s.plan.name} is wrong", proof=s.proof()) for s in wrong]
    for (a_text, b_text), weights in groups.items():
        where = ", ".join(fold_names([weight.name for weight in weights], first.parameters)[:4])
        size = sum(weight.bytes for weight in weights)
        findings.append(Finding("difference", "note", where, f"a: {a_text}; b: {b_text}", bytes=size))
    verdict = "wrong" if wrong else "they differ" if groups else "alike"
    return Report(
        ok=not wrong,
        findings=tuple(findings),
        tp_size=tp_size,
        details={
            "model": first.name,
            "verdict": verdict,
            "a": _side(first),
            "b": _side(other),
            "alike": len(first.weights) - differ,
            "differ": differ,
        },
        drawn=drawn_of(first, other),
    )


def _side(subject: Audited) -> dict[str, Any]:
    exact = "not run" if subject.numbers is None else "exact" if subject.numbers.ok else "wrong"
    return {"plan": subject.plan.name, "ran": exact, "bytes_per_rank": held_bytes(subject)[0]}


# One word for each entry of a plan (same, costlier, different, wrong, or dead), and what a page draws of it.
#
# *same*: it cuts what analysis would cut, in the same rows. *costlier*: it is right, and holds or moves more (a weight
# left whole, an output gathered). *different*: right, and cut in another way. *wrong*: a finding at error level is
# about it. *dead*: it matches nothing, and so does nothing.


def verdicts(subject: Audited, findings: Iterable[Finding]) -> dict[str, str]:
    """The verdict of every line, by pattern."""
    findings = tuple(findings)
    errors = [place for f in findings if f.level == "error" and f.kind != "follows" for place in f.about]
    dead = {finding.where for finding in findings if finding.check == "dead-keys"}
    return {
        line.pattern: "dead" if line.pattern in dead else _verdict(subject, line, errors) for line in subject.plan.lines
    }


def _verdict(subject: Audited, line: Line, errors: list[str]) -> str:
    weights = subject.of_line(line)
    names = [name for weight in weights for name in weight.names]
    if any(place == line.pattern or any(is_under(place, name) for name in names) for place in errors):
        return "wrong"
    kinds = {_kind(subject, weight) for weight in [w for w in weights if w.is_matrix] or weights}
    gathered = [gather.pattern for gather in subject.solution.runtime.of(AllGather)]
    gathers = line.style == "colwise_gather_output" and not any(
        matches(pattern, weight.module) for weight in weights for pattern in gathered
    )
    if kinds <= {"same"}:
        return "costlier" if gathers else "same"
    return "costlier" if kinds <= {"same", "whole"} else "different"


def _kind(subject: Audited, weight: Weight) -> str:
    said, fact = weight.said, weight.fact
    if said.dim is None:
        return "same" if fact.dim is None else "whole"
    if fact.dim == said.dim and subject.wanted_rows(weight) == said.rows:
        return "same"
    return "different"


def held_bytes(subject: Audited) -> tuple[int, int]:
    """Bytes of parameters that rank 0 holds: under this plan, and as analysis would split."""

    def held(weight: Weight, dim: int | None, rows: tuple[tuple[int, ...], ...]) -> int:
        return weight.bytes if dim is None or not rows else weight.bytes * len(rows[0]) // weight.fact.shape[dim]

    stored = sum(held(weight, weight.said.dim, weight.said.rows) for weight in subject.weights)
    cut = ((w, w.fact.dim, () if w.fact.dim is None else subject.wanted_rows(w)) for w in subject.weights)
    return stored, sum(held(*args) for args in cut)


def unsplit_share(subject: Audited) -> float:
    """Return the share of the bytes of shardable matrices that this plan replicates."""
    able = [weight for weight in subject.weights if weight.is_matrix and weight.fact.dim is not None]
    total = sum(weight.bytes for weight in able)
    return round(sum(weight.bytes for weight in able if weight.said.dim is None) / total, 4) if total else 0.0


def drawn_of(*subjects: Audited) -> Drawn:
    """All of one model."""
    trace = subjects[0].solution.trace
    sides = []
    for subject in subjects:
        groups: dict[tuple[int | None, str], list[str]] = {}
        for weight in subject.weights:
            groups.setdefault((weight.said.dim, cut_text(weight.said)), []).append(weight.name)
        universe = Universe(name for names in groups.values() for name in names)
        cuts = [(pattern, *cut) for cut, names in groups.items() for pattern in fold_names(names, universe)]
        sides.append(CutsOf(subject.plan.name, tuple(cuts)))
    return Drawn(flow_of(trace, subjects[0].stacks, Names(trace)), tuple(sides))


def gathers(said: Said) -> bool:
    return said.dim is not None and said.line is not None and said.line.style == "colwise_gather_output"


def cut_text(said: Said) -> str:
    """Return how a weight is sharded, for people."""
    if said.dim is None:
        return "whole"
    gathered = ", output gathered" if gathers(said) else ""
    return f"sharded along dim {said.dim}, {len(said.rows[0])} rows on rank 0, from {said.rows[0][0]}{gathered}"
