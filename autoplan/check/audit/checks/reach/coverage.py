"""coverage: how much of what could be split is split, and the largest weights that the plan leaves whole.

A plan may be right and still run out of memory. Counted are weights with two dims or more that analysis can split.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited, Level, Weight
from autoplan.common.patterns import is_under, starred
from autoplan.emit.words import bytes_text
from autoplan.values import Finding

NAME = "coverage"
_ENOUGH = 0.9


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    matrices = [weight for weight in subject.weights if weight.is_matrix]
    if subject.tp_size > 1 and not any(weight.said.dim is not None for weight in matrices):
        total = sum(weight.bytes for weight in subject.weights)
        text = f"the plan shards nothing: {bytes_text(total)} are replicated"
        yield Finding(NAME, "warn", "", text, "see `autoplan plan` for what can be sharded", total)
        return
    able = [weight for weight in matrices if weight.fact.dim is not None]
    missed = [weight for weight in able if weight.said.dim is None]
    total = sum(weight.bytes for weight in able)
    if not missed or not total:
        return
    share = 1 - sum(weight.bytes for weight in missed) / total
    held = sum(weight.bytes for weight in missed) * (subject.tp_size - 1) // subject.tp_size
    text = f"{share:.0%} of the shardable bytes are sharded; {_largest(subject, missed)} are replicated"
    # The stack whose blocks are split least, where that is less than half.
    said = []
    for stack in subject.stacks:
        mine = [weight for weight in able if any(is_under(block, weight.name) for block in stack.fqns)]
        whole = sum(weight.bytes for weight in mine if weight in missed)
        total = sum(weight.bytes for weight in mine)
        if total and whole / total > 0.5:
            said.append(f"blocks of {stack.name} are sharded by {1 - whole / total:.0%}")
    level: Level = "warn" if share < _ENOUGH or said else "note"
    hint = "; ".join([*said, "`autoplan plan` shards them"])
    first = subject.folded([weight.name for weight in missed if starred(weight.name) == starred(missed[0].name)])
    yield Finding(NAME, level, first, text, hint, held)


def _largest(subject: Audited, missed: list[Weight]) -> str:
    groups: dict[str, list[Weight]] = {}
    for weight in missed:
        groups.setdefault(starred(weight.name), []).append(weight)
    sizes = {subject.folded(w.name for w in group): sum(w.bytes for w in group) for group in groups.values()}
    heavy = sorted(sizes, key=lambda names: -sizes[names])[:3]
    return ", ".join(f"{names} ({bytes_text(sizes[names])})" for names in heavy)
