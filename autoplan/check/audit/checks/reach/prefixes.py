"""prefixes: keys that are right but for the path in front of them (`model.`, `model.language_model.`).

Nothing matches, nothing is split, and nothing is said. Where one prefix fixes several keys, it is named.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited
from autoplan.common.patterns import starred
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
            text, hint = f"{len(fixed)} of {len(dead)} dead keys exist under {prefix!r}", f"{prefix}.{fixed[0]} etc."
            yield Finding(NAME, "warn", ", ".join(fixed[:3]), text, f"write them as {hint}")
            return
    stripped = {key: key.partition(".")[2] for key in dead if starred(key.partition(".")[2]) in shapes}
    if stripped:
        first, text = next(iter(stripped)), f"{len(stripped)} dead keys exist without their first part"
        hint = f"write {stripped[first]!r} for {first!r}"
        yield Finding(NAME, "warn", ", ".join(list(stripped)[:3]), text, hint)
