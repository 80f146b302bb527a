"""overlaps: two keys that say different things of one module or parameter.

torch applies both styles, one after the other; transformers takes the more exact key. Either way one of the two lines
is not what happens.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited
from autoplan.values import Finding

NAME = "overlaps"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    pairs: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys([*subject.modules, *subject.parameters]):
        lines = [line for line in subject.plan.lines if subject.plan.reaches(line, name)]
        for one, other in zip(lines, lines[1:], strict=False):
            if one.style != other.style:
                pairs.setdefault((str(one), str(other)), []).append(name)
    for (first, second), names in pairs.items():
        text, hint = f"{first} and {second} both match", "keep one of them"
        if subject.level == "error":
            yield subject.suspect(NAME, subject.patterns(names), text, hint, names=names)
        else:
            yield Finding(NAME, "warn", subject.folded(names), text, hint)
