"""numbers: the plan, run on simulated ranks, does not compute what the model computes.

Outputs and every gradient of a tiny clone under the plan, by the plan's own library, against the unsharded model in
double precision. A plan of ours that was edited, and is not what follows from its choices, runs nowhere: `parallelize`
refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited
from autoplan.common.patterns import fold_names
from autoplan.values import Finding

NAME = "numbers"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    if subject.refused:
        yield Finding(NAME, "error", "", subject.refused, "see the other findings", kind="cannot-run")
    elif subject.numbers is None and subject.plan.lines and subject.tp_size > 1:
        yield Finding(NAME, "note", "", f"the plan was not run on ranks: {subject.unproven}")
    if subject.numbers is None:
        return
    errors = [finding for finding in subject.numbers.findings if finding.level == "error"]
    if not errors:
        return
    ranks = f"on {subject.numbers.tp_size} simulated ranks"
    broken = [finding for finding in errors if not finding.where]
    outputs = [finding for finding in errors if finding.where and finding.check != "gradients"]
    hint, places = "see the other findings", tuple[str, ...]()
    if broken:
        yield Finding(NAME, "error", "", f"cannot run {ranks}", hint, proof=broken[0].message, kind="cannot-run")
        return
    if outputs:
        text = f"outputs are wrong {ranks} ({', '.join(f.where for f in outputs[:3])})"
    else:
        places = tuple(fold_names([finding.where for finding in errors]))
        text = f"outputs are exact, but {len(errors)} gradients are wrong {ranks}"
    proof = "; ".join(f"{finding.where}: {finding.message}" for finding in (outputs or errors)[:3])
    where = ", ".join(places[:6])
    yield Finding(NAME, "error", where, text, hint, proof=proof, kind="wrong-numbers", places=places)
