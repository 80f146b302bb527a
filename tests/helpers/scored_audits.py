"""Score the audit of a known mistake: rejected, its cause first, in the dialect's words, with a fix that passes."""

from __future__ import annotations

import re

from mistakes import Mistake, Model

from autoplan.check.audit.auditor import audit_source
from autoplan.common.patterns import starred
from autoplan.values import Finding

__all__ = ["is_about", "score"]

# Words of one dialect that a reader of another does not know.
_FOREIGN = {
    "torch": r"replicated_with_grad_allreduce|moe_tp_experts|partition_type|'colwise|'rowwise",
    "automodel": r"replicated_with_grad_allreduce|moe_tp_experts|partition_type|'colwise|'rowwise",
    "hf": r"ColwiseParallel|RowwiseParallel|partition_type",
    "shipped": r"ColwiseParallel|RowwiseParallel|partition_type",
    "hf-old": r"ColwiseParallel|RowwiseParallel|partition_type",
    "deepspeed": r"ColwiseParallel|RowwiseParallel|: 'colwise|: 'rowwise",
    "plan file": r"ColwiseParallel|RowwiseParallel|partition_type",
}


def plain(place: str) -> str:
    """A place as a path, whatever the dialect writes."""
    text = place.replace("[^.]+", "*").replace(r"\d+", "*").replace("\\", "").strip("^$")
    return starred(re.sub(r"\.(weight|bias)$", "", text))


def is_about(finding: Finding, causes: tuple[str, ...]) -> bool:
    return bool({plain(place) for place in finding.about} & {plain(cause) for cause in causes})


def score(model: Model, dialect: str, mistake: Mistake) -> tuple[str, str]:
    """How an audit of a mistake ends, and what it said."""
    report = audit_source(model.source, mistake.plan, mistake.tp_size)
    said = "; ".join(f"{f.level} {f.check} {f.where}: {f.message[:90]} -> {f.hint[:110]}" for f in report.findings[:3])
    if report.ok and report.details["outcome"] == "exact":
        warned = [f for f in report.findings if any(is_about(f, cause) for cause in mistake.causes)]
        return ("exact, said" if warned else "exact, silent"), said
    marks = ["rejected" if not report.ok else "accepted"]
    first = report.findings[: len(mistake.causes)]
    if all(any(is_about(f, cause) for f in first) for cause in mistake.causes) and not report.ok:
        marks.append("cause")
    shown = " ".join(f"{f.message} {f.hint}" for f in report.findings if f.level == "error" and not f.is_consequence)
    own = dialect == "plan file"  # where layouts are written so
    if not re.search(_FOREIGN[dialect], shown) and (own or not re.search(r"\d!", shown)):
        marks.append("words")
    if report.fixed is not None and audit_source(model.source, report.fixed, mistake.tp_size, correct=False).ok:
        marks.append("fixed")
    return " ".join(marks), said
