"""Any two plans for one model, weight by weight: who cuts what, who holds how much, and do both compute the model?"""

from __future__ import annotations

from typing import Any

from autoplan.check.audit.auditor import subject_of
from autoplan.check.audit.drawn import cut_text, drawn_of, gathers
from autoplan.check.audit.subject import Audited, Said, Weight
from autoplan.check.audit.verdicts import held_bytes
from autoplan.common.patterns import fold_names
from autoplan.values import Finding, Report


def compare_plans(source: Any, a: Any, b: Any, tp_size: int) -> Report:
    """Compare two plans (in any form that `audit` takes). The report is ok when neither is wrong.

    `details["differ"]` counts the weights that they cut otherwise, and `details["verdict"]` says it in a word.
    """
    one, other = (subject_of(source, plan, tp_size) for plan in (a, b))
    groups: dict[tuple[str, str], list[Weight]] = {}
    alike = 0
    for left, right in zip(one.weights, other.weights, strict=True):
        if _facts(left.said) == _facts(right.said):
            alike += 1
        else:
            groups.setdefault((cut_text(left.said), cut_text(right.said)), []).append(left)
    wrong = [_wrong(subject) for subject in (one, other) if subject.is_wrong]
    findings = wrong + [_difference(cuts, weights, one) for cuts, weights in groups.items()]
    verdict = "wrong" if wrong else "they differ" if groups else "alike"
    return Report(
        ok=not wrong,
        findings=tuple(findings),
        tp_size=tp_size,
        details={
            "model": one.name,
            "verdict": verdict,
            "a": _side(one),
            "b": _side(other),
            "alike": alike,
            "differ": len(one.weights) - alike,
        },
        drawn=drawn_of(one, other),
    )


def _side(subject: Audited) -> dict[str, Any]:
    exact = "not run" if subject.numbers is None else "exact" if subject.numbers.ok else "wrong"
    return {"plan": subject.plan.name, "ran": exact, "bytes_per_rank": held_bytes(subject)[0]}


def _wrong(subject: Audited) -> Finding:
    return Finding("numbers", "error", "", f"{subject.plan.name} is wrong", proof=subject.proof())


def _difference(cuts: tuple[str, str], weights: list[Weight], subject: Audited) -> Finding:
    where = ", ".join(fold_names([weight.name for weight in weights], subject.parameters)[:4])
    size = sum(weight.bytes for weight in weights)
    return Finding("difference", "note", where, f"a: {cuts[0]}; b: {cuts[1]}", bytes=size)


def _facts(said: Said) -> tuple[object, ...]:
    return said.dim, said.rows, gathers(said)
