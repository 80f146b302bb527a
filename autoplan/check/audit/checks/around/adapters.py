"""adapters: the weight has moved below the module that the plan names (`q_proj` holds `q_proj.base_layer`).

The key still matches a module and reaches no weight: the base weight stays whole, or is cut apart from the adapter's.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited
from autoplan.decide.written_plans.choices import CUTS
from autoplan.values import Finding

NAME = "adapters"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    if subject.plan.plan is not None:
        return
    for line in subject.plan.lines:
        if CUTS.get(line.style, "nothing") in ("nothing", "any", "whole"):
            continue
        reached = [name for name in subject.modules if subject.plan.reaches(line, name)]
        hollow = [name for name in reached if not any(True for _ in subject.modules[name].parameters(recurse=False))]
        below = [p for name in hollow for p in subject.parameters if p.startswith(f"{name}.")]
        if hollow and len(hollow) == len(reached) and below and not any(subject.of_line(line)):
            frozen = [p for p in below if not subject.parameters[p].requires_grad]
            size = sum(w.bytes for w in subject.weights if w.name in below)
            text = f"{line} matches {subject.folded(hollow)}, which has no weight of its own: "
            text += f"its weights are {subject.folded(below)}" + (", some of them frozen" if frozen else "")
            hint = f"plan the wrapped model: {subject.folded(p.rpartition('.')[0] for p in frozen or below)!r}"
            yield Finding(NAME, "warn", line.pattern, text, hint, size)
