"""dead-keys: a key that matches nothing in the model.

Libraries skip such a key with a log line at best, and the weights it was written for stay whole on every rank. The hint
names the nearest path that exists. DeepSpeed's AutoTP reads no specs for what is no linear layer and no table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from autoplan.check.audit.subject import Audited
from autoplan.common.patterns import fold_names, matches, nearest
from autoplan.decide.written_plans.choices import CUTS
from autoplan.values import Finding

NAME = "dead-keys"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    known = [*subject.modules, *subject.parameters]
    for line in subject.plan.lines:
        if not any(subject.plan.reaches(line, name) for name in known):
            # What a key may have been meant for: names without a row, for a sharding style with one matrix to shard
            able = {n for w in subject.weights if w.fact.dim is not None and w.is_matrix for n in w.names}
            owners = Counter(name.rpartition(".")[0] for name in able)
            able |= {owner for owner, matrices in owners.items() if matrices == 1}
            cuts = CUTS.get(line.style, "any") not in ("whole", "nothing")
            free = [name for name in known if subject.plan.line_for(name) is None and (name in able or not cuts)]
            close = nearest(line.pattern, fold_names(free))
            if subject.plan.dialect == "deepspeed":
                shown = ", ".join(fold_names(subject.parameters)[:3])
                hint = f"DeepSpeed matches from the start of a name (begin with '.*'); names look like {shown}"
                yield Finding(NAME, "warn", line.pattern, f"{line} matches no parameter that is not yet matched", hint)
                continue
            if subject.plan.dialect == "transformers" and any(matches(line.pattern, name) for name in known):
                hint = "remove it: transformers looks every number up as *, so a row is about all blocks or none"
                yield Finding(NAME, "warn", line.pattern, f"{line} names a single block, and is never looked up", hint)
                continue
            hint = f"did you mean {close[0]!r}?" if close else "remove it: no similar path is missing a row"
            meant = [w for w in subject.weights if close and any(matches(close[0], n) for n in (w.name, w.module))]
            size = sum(w.bytes for w in meant)
            yield Finding(NAME, "warn", line.pattern, f"{line} matches no module and no parameter", hint, size)
        elif subject.plan.dialect == "deepspeed" and CUTS.get(line.style, "whole") != "whole":
            weights = subject.of_line(line)
            if weights and all(weight.said.dim is None for weight in weights):
                owner = type(subject.modules[weights[0].module]).__name__
                text = f"{line} matches {weights[0].name} of {owner}, but AutoTP shards only linear layers and tables"
                yield Finding(NAME, "warn", line.pattern, text, "remove it: it is replicated")
