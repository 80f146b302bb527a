"""sequence: sequence-parallel styles, and who reads the sequence that they cut.

Between split regions the stream holds this rank's positions only: rotary tables and masks derive their length from it.
A plan that marks some norms and forgets a consumer runs on sequences of two lengths.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited
from autoplan.values import Finding, SequenceBoundary

NAME = "sequence"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    plan = subject.plan.plan
    if plan is not None:
        cuts = bool(plan.runtime.of(SequenceBoundary))
        if plan.sequence_parallel and not cuts:
            text = "the plan sets sequence_parallel but shards no sequence"
            yield Finding(NAME, "warn", "", text, "plan again with sequence_parallel=True")
        return
    raw = subject.plan.raw  # a norm of heads is "sharded" along these
    lines = [
        line
        for line in subject.plan.lines
        if line.style == "sequence_parallel"
        and not any(layout.dim != 1 for layout in getattr(raw.get(line.pattern), "sequence_sharding", ()))
    ]
    if not lines:
        return
    reached = [name for line in lines for name in subject.modules if subject.plan.reaches(line, name)]
    # What analysis says of cutting this model's stream
    from autoplan.analyse.solve import solve

    stacks = tuple(stack.fqns for stack in subject.stacks)
    solution = solve(subject.solution.trace, subject.tp_size, sequence_stacks=stacks)
    reason = "; ".join(map(str, solution.whole_sequence[:2]))
    text = f"{len(reached)} modules expect an input sharded along the sequence"
    if reason:
        text += f", but the full sequence is needed: {reason}"
    where = tuple(line.pattern for line in lines)
    hint = "sequence_parallel=True shards the stream only where every consumer is known"
    names = [name for line in lines for weight in subject.of_line(line) for name in weight.names]
    yield subject.suspect(NAME, where, text, hint, names=names)
