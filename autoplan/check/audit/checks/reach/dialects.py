"""dialects: words that the plan's own library does not know, or knows under another name.

One unknown style may discard a whole plan; old names of transformers' styles are gone or going; and a dict handed to
`DistributedConfig(tp_plan=…)` is laid over the shipped plan, whose other rules stay in force.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited, Level
from autoplan.common.conventions import conventions
from autoplan.emit.words import few
from autoplan.values import Finding

NAME = "dialects"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    known: frozenset[str] = frozenset()
    if subject.plan.dialect == "transformers":
        from autoplan.hf.own_sharding import known_styles

        known = known_styles()
        # Rules of the shipped plan that a dict does not name, and that transformers keeps
        shipped = conventions().shipped_plan(subject.model)
        kept = [f"{key}: {style}" for key, style in shipped.items() if key not in subject.plan.raw]
        if subject.plan.lines and kept:
            text = f"DistributedConfig(tp_plan=…) would also apply shipped rules: {few(kept)}"
            yield Finding(NAME, "note", "", text, "write 'replicate' for the ones to disable")
    level: Level = "error" if subject.is_wrong else "warn"
    proof = subject.proof() if subject.is_wrong else ""
    for line in subject.plan.lines:
        written = str(subject.plan.raw.get(line.pattern, line.written))
        if not line.style:
            yield Finding(NAME, level, line.pattern, line.unread, "use a style that the library knows", proof=proof)
        elif subject.plan.dialect == "torch" and isinstance(subject.plan.raw.get(line.pattern), str):
            text = f"{line} is a string among style objects: parallelize_module refuses it"
            objects = "ColwiseParallel() or RowwiseParallel()" if "wise" in line.style else "a ParallelStyle object"
            yield Finding(NAME, level, line.pattern, text, f"use {objects}", proof=proof)
        elif subject.plan.dialect == "transformers" and known and written not in known:
            text = f"{line}: the installed transformers has no style {written!r}"
            yield Finding(NAME, level, line.pattern, text, f"write {line.style!r}", proof=proof)
        elif subject.plan.dialect == "transformers" and written != line.style:
            text = f"{line}: {written!r} is a deprecated name of {line.style!r}"
            yield Finding(NAME, "note", line.pattern, text, f"write {line.style!r}")
