"""prefixes: keys that are right but for the path in front of them (`model.`, `model.language_model.`).

Nothing matches, nothing is split, and nothing is said. Where one prefix fixes several keys, it is named.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited
from autoplan.decide.plan.folding import starred
from autoplan.values import Finding

NAME = "prefixes"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    dead = [f.where for f in found if f.check == "dead-keys"]
    if not dead:
        return
    shapes = {starred(name) for name in [*subject.modules, *subject.parameters]}
    for prefix in sorted((name for name in subject.modules if name), key=lambda name: (name.count("."), name)):
        fixed = [key for key in dead if f"{starred(prefix)}.{starred(key)}" in shapes]
        if fixed:
            yield Finding(
                NAME, "warn", ", ".join(fixed[:3]), f"{len(fixed)} of {len(dead)} dead keys exist under {prefix!r}",
                f"write them as {prefix}.{fixed[0]} etc.",
            )  # fmt: skip
            return
    stripped = {key: key.partition(".")[2] for key in dead if starred(key.partition(".")[2]) in shapes}
    if stripped:
        first = next(iter(stripped))
        yield Finding(
            NAME, "warn", ", ".join(list(stripped)[:3]), f"{len(stripped)} dead keys exist without their first part",
            f"write {stripped[first]!r} for {first!r}",
        )  # fmt: skip
