"""tied: one parameter under two names, and the two are treated differently.

A plan that names both with different cuts shards it twice, and torch's `parallelize_module` unties the two without a
word: forward stays right, the gradient does not.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited
from autoplan.decide.written_plans.choices import CUTS
from autoplan.values import Finding

NAME = "tied"
_AS_ROWS = {"rows": "out", "width": "in"}  # a table's rows are its head's columns


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    for weight in subject.weights:
        if len(weight.names) < 2 or subject.plan.plan is not None:
            continue
        lines = {name: line for name in weight.names if (line := subject.plan.line_for(name)) is not None}
        written = [CUTS.get(line.style, "whole") for line in lines.values()]
        cuts = {_AS_ROWS.get(cut, cut) for cut in written}
        whole = len(lines) < len(weight.names)
        both = " and ".join(weight.names[:2])
        where = tuple(dict.fromkeys(line.pattern for line in lines.values()))
        if lines and subject.plan.dialect == "torch":
            text = f"{both} are one tied parameter, and parallelize_module makes two of it"
            hint = "tie them again after it, before the optimizer"
            yield subject.suspect(NAME, where, text, hint, names=weight.names)
        elif len(cuts) > 1 or (cuts - {"whole", "nothing"} and whole):
            text = f"{both} are one tied parameter, but the plan gives {', '.join(map(str, lines.values()))}"
            hint = "give both the same sharding: embedding_rowwise for the table is colwise for the head"
            if subject.plan.dialect == "deepspeed":
                hint = "leave both whole"
            yield subject.suspect(NAME, where, text, hint, names=weight.names)
