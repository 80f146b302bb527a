"""pairing: one side of a column/row pair is cut and the other is not.

All weights along one axis are cut, or none of them; or the output is gathered, or the input split first, which costs a
collective. Forgotten weights are named.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import EXACT_ALONE, Audited, Weight
from autoplan.common.patterns import starred
from autoplan.emit.words import few
from autoplan.values import Finding, SplitLogits, VocabularyTable

NAME = "pairing"


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    logits = {end.pattern for kind in (VocabularyTable, SplitLogits) for end in subject.solution.runtime.of(kind)}
    groups: dict[tuple[int, tuple[str, ...]], list[tuple[list[Weight], list[Weight]]]] = {}
    for axis in subject.solution.classes:
        places = dict(axis.parameters)
        weights = [subject.by_name[name] for name in places if name in subject.by_name]
        weights = [w for w in weights if w.is_matrix and w.module not in logits]
        if not axis.split or len(weights) < 2:
            continue
        kept = [w for w in weights if w.said.line is not None and w.said.line.style not in EXACT_ALONE]
        cut = [w for w in kept if w.said.dim == places.get(w.name, w.fact.dim)]
        whole = [w for w in weights if w.said.dim is None]
        if cut and whole:
            groups.setdefault((axis.size, tuple(starred(w.name) for w in whole)), []).append((cut, whole))
    for (size, _), pairs in groups.items():
        # each weight in every block that it stands for: a trace holds few blocks of a kind
        cut, whole = ([w for pair in pairs for w in subject.all_of(pair[side])] for side in (0, 1))
        text = f"shards an axis of {size} along which {few(subject.patterns(w.name for w in whole))} is replicated"
        names = [w.name for w in (*cut, *whole)]
        hint = f"shard {subject.folded(w.module for w in whole)} too, or gather the output"
        yield subject.suspect(NAME, subject.patterns(w.module for w in cut), text, hint, names=names)
