"""dialects: words that the plan's own library does not know, or knows under another name.

One unknown style may discard a whole plan; old names of transformers' styles are gone or going; and a dict handed to
`DistributedConfig(tp_plan=…)` is laid over the shipped plan, whose other rules stay in force.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.lines import Line
from autoplan.check.audit.subject import Audited, Level
from autoplan.common.conventions import conventions
from autoplan.values import Finding

NAME = "dialects"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    known = _known(subject)
    yield from _surviving(subject)
    for line in subject.plan.lines:
        written = str(subject.plan.raw.get(line.pattern, line.written))
        if not line.style:
            hint = "use a style that the library knows"
            yield Finding(NAME, _level(subject), line.pattern, line.unread, hint, proof=_proof(subject))
        elif subject.plan.dialect == "torch" and isinstance(subject.plan.raw.get(line.pattern), str):
            text = f"{line} is a string among style objects: parallelize_module refuses it"
            yield Finding(NAME, _level(subject), line.pattern, text, _objects(line), proof=_proof(subject))
        elif subject.plan.dialect == "transformers" and known and written not in known:
            text = f"{line}: the installed transformers has no style {written!r}"
            yield Finding(NAME, _level(subject), line.pattern, text, f"write {line.style!r}", proof=_proof(subject))
        elif subject.plan.dialect == "transformers" and written != line.style:
            text = f"{line}: {written!r} is a deprecated name of {line.style!r}"
            yield Finding(NAME, "note", line.pattern, text, f"write {line.style!r}")


def _surviving(subject: Audited) -> Iterator[Finding]:
    """Rules of the shipped plan that a dict does not name, and that transformers keeps."""
    shipped = conventions().shipped_plan(subject.model)
    kept = [f"{key}: {style}" for key, style in shipped.items() if key not in subject.plan.raw]
    if subject.plan.dialect == "transformers" and subject.plan.lines and kept:
        text = f"DistributedConfig(tp_plan=…) would also apply {len(kept)} shipped rules: {', '.join(kept[:3])}"
        yield Finding(NAME, "note", "", text, "write 'replicate' for the ones to disable")


def _level(subject: Audited) -> Level:
    return "error" if subject.is_wrong else "warn"


def _proof(subject: Audited) -> str:
    return subject.proof() if subject.is_wrong else ""


def _objects(line: Line) -> str:
    return "use ColwiseParallel() or RowwiseParallel()" if "wise" in line.style else "use a ParallelStyle object"


def _known(subject: Audited) -> frozenset[str]:
    """The styles of the installed transformers."""
    if subject.plan.dialect != "transformers":
        return frozenset()
    from autoplan.hf.own_sharding import known_styles

    return known_styles()
