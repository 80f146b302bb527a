"""norms: a statistic (norm, softmax, top-k, mean) over an axis that is split, so that each rank normalises by its
shard.

OLMo2's query and key norms run over all heads at once. The statistic must be summed over ranks, or the axis gathered.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoplan.check.audit.subject import Audited, Weight
from autoplan.common.patterns import starred
from autoplan.values import Finding

NAME = "norms"
_MATCHED = "sum"  # partial sums of products: pairing speaks of those


def run(subject: Audited, found: tuple[Finding, ...]) -> Iterator[Finding]:
    if subject.plan.plan is not None:
        return
    groups: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}  # by weights that are cut: these, and the modules
    for call, kind in subject.solution.reductions.items():
        if kind != _MATCHED:
            along = [weight.name for weight in _cut_along(subject, call)]
            if along:
                cut_here, modules = groups.setdefault(tuple(map(starred, along)), ([], []))
                cut_here += along
                modules.append(subject.solution.trace.calls[call].module)
    for cut, modules in groups.values():
        text = f"{modules[0]} normalises over an axis along which {cut[0]} is sharded: each rank sees only its shard"
        hint = "sum the statistic over ranks (autoplan does), or gather the output first"
        names = [*cut, *(name for name in subject.parameters if name.rpartition(".")[0] in modules)]
        yield subject.suspect(NAME, subject.patterns(subject.folds.expand_all(modules)), text, hint, names=names)


def _cut_along(subject: Audited, call: int) -> Iterator[Weight]:
    """Weights that the plan cuts along the axes which a call sums over, and whose output it keeps cut."""
    shards, trace = subject.solution.shards, subject.solution.trace
    assert shards is not None
    made = trace.calls[call]
    axes = {leaf for tensor in made.reads for leaf in shards.split_leaves(tensor)}
    for name, tensor in trace.by_name.items():
        weight = subject.by_name.get(name)
        if weight is None or not weight.is_matrix or not axes & shards.split_leaves(tensor):
            continue
        style = "gather" if weight.said.line is None else weight.said.line.style
        keeps = "gather" not in style and not style.startswith(("rowwise", "embedding"))
        if keeps and weight.said.dim is not None and weight.said.dim == weight.fact.dim:
            yield weight
