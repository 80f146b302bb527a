"""wrapping: the code around a layer forbids to wrap it.

torch's and transformers' styles make the weight a DTensor and the output a view of one. Code that changes the output in
place, or reads the weight by itself, then raises in training; a convolution has no `in_features` to cut by.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoplan.analyse.picture.flow import obstacles
from autoplan.check.audit.subject import Audited
from autoplan.common.patterns import starred
from autoplan.decide.written_plans.choices import CUTS
from autoplan.values import Finding, Obstacle

NAME = "wrapping"
_WRAPPING = ("edited", "read", "shape")


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    if subject.plan.dialect not in ("torch", "transformers") or subject.level == "note":
        return
    cut = [w for w in subject.weights if w.said.dim is not None and w.name.endswith(".weight")]
    lines = {w.module: w.said.line for w in cut if w.said.line is not None}
    uncut = (None, "any", "nothing", "whole")
    lines = {name: line for name, line in lines.items() if CUTS.get(line.style) not in uncut}
    groups: dict[Obstacle, list[str]] = {}
    for obstacle in obstacles(subject.solution.trace, lines):
        if obstacle.kind in _WRAPPING:
            same = replace(obstacle, pattern=lines[obstacle.pattern].pattern, by=starred(obstacle.by))
            groups.setdefault(same, []).append(obstacle.pattern)
    for same, modules in groups.items():
        hint = f"replicate {subject.folded(modules)}, or use autoplan.parallelize, whose hooks can do this"
        names = [f"{module}.weight" for module in modules]
        why = f"{modules[0]} cannot be wrapped: {same.why}"
        yield subject.suspect(NAME, same.pattern, why, hint, names=names)
