"""Is each cut right by itself, and beside its neighbours? Pairs, edges, layouts, units, heads."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Literal

from autoplan.analyse.picture.flow import Node, node_of
from autoplan.axes.terms import factors, find, segments
from autoplan.check.audit.subject import EXACT_ALONE, Audited, Weight
from autoplan.common.layout import Layout
from autoplan.common.patterns import matches, starred
from autoplan.emit.words import few
from autoplan.values import Finding, IntegerEdit, SplitLogits, VocabularyTable
from autoplan.values.reasons import DoesNotDivide, sentence


def pairing(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """pairing: one side of a column/row pair is cut and the other is not.

    All weights along one axis are cut, or none of them; or the output is gathered, or the input split first, which
    costs a collective. Forgotten weights are named.
    """
    logits = {end.pattern for kind in (VocabularyTable, SplitLogits) for end in subject.solution.runtime.of(kind)}
    groups: dict[tuple[int, tuple[str, ...]], list[tuple[list[Weight], list[Weight]]]] = {}
    for axis in subject.solution.classes:
        places = dict(axis.parameters)
        weights = [subject.by_name[name] for name in places if name in subject.by_name]
        weights = [w for w in weights if w.is_matrix and w.module not in logits]
        if not axis.split or len(weights) < 2:
            continue
        not_exact_alone = [w for w in weights if w.said.line is not None and w.said.line.style not in EXACT_ALONE]
        cut = [w for w in not_exact_alone if w.said.dim == places.get(w.name, w.fact.dim)]
        whole = [w for w in weights if w.said.dim is None]
        if cut and whole:
            groups.setdefault((axis.size, tuple(starred(w.name) for w in whole)), []).append((cut, whole))
    for (size, _), pairs in groups.items():
        # each weight in every block that it stands for: a trace holds few blocks of a kind
        cut, whole = ([w for pair in pairs for w in subject.all_of(pair[side])] for side in (0, 1))
        text = f"shards an axis of {size} along which {few(subject.patterns(w.name for w in whole))} is replicated"
        names = [w.name for w in (*cut, *whole)]
        hint = f"shard {subject.folded(w.module for w in whole)} too, or gather the output"
        yield subject.suspect(check, subject.patterns(w.module for w in cut), text, hint, names=names)


Lies = Literal["whole", "a shard", "a part of the sequence", ""]
_GATHERED: tuple[Lies, Lies] = ("a part of the sequence", "whole")
_CONTRACTIONS = ("linear", "stacked", "conv")
_SHARDED_OUT, _SHARDED_IN = ("colwise", "packed_colwise"), ("rowwise", "packed_rowwise")
_KNOWN = (*_SHARDED_OUT, *_SHARDED_IN, "colwise_gather_output", "rowwise_split_input", "replicate")


def edges(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """edges: what one layer hands on is not what the next one takes.

    Each style says how its input and output lie on ranks (whole, a shard, a part of the sequence). From a weight to the
    next that contract the same axis the two must agree; where shapes fit by chance nothing raises.
    """
    if subject.plan.plan is not None or subject.level == "note":
        return  # what a plan of ours hands on is derived, not said; and what is exact agrees
    groups: dict[tuple[str, str, Lies, Lies], list[tuple[Weight, Weight]]] = {}
    # Norms and prepared inputs may gather the sequence between two layers
    gathers = any(line.style in ("sequence_parallel", "local_params") for line in subject.plan.lines)
    for giver, taker in _edges(subject):
        gives, takes = _lies(subject, giver, "output"), _lies(subject, taker, "input")
        if gathers and (gives, takes) == _GATHERED:
            continue
        if gives and takes and gives != takes:
            groups.setdefault((starred(giver.module), starred(taker.module), gives, takes), []).append((giver, taker))
    for (_, _, gives, takes), pairs in groups.items():
        givers, takers = zip(*pairs, strict=True)
        text = f"outputs {gives}, but {takers[0].module} expects {takes}"
        hint = f"shard both or neither: {subject.folded(t.module for t in takers)} reads it"
        where = subject.patterns(giver.module for giver in givers)
        yield subject.suspect(check, where, text, hint, names=[w.name for w in (*givers, *takers)])


def _edges(subject: Audited) -> Iterator[tuple[Weight, Weight]]:
    """Weights of which the second contracts the very axis that the first makes."""
    flow, seen = subject.flow, set()
    for box in flow:
        taken = _weight(subject, node_of(flow, box), "in")
        if taken is None:
            continue
        for other in _makers(flow, box):
            producer = _weight(subject, node_of(flow, other), "out")
            if producer is None or not producer[1] & taken[1] or (producer[0].name, taken[0].name) in seen:
                continue
            seen.add((producer[0].name, taken[0].name))
            yield from subject.alike(producer[0], taken[0])


def _makers(flow: Any, box: int) -> Iterator[int]:
    """The contractions that a box's data come from, through whatever has no weights to contract."""
    todo, seen = list(flow.predecessors(box)), set()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        if node_of(flow, current).kind in _CONTRACTIONS:
            yield current
        else:
            todo += flow.predecessors(current)


def _weight(subject: Audited, node: Node, side: str) -> tuple[Weight, set[int]] | None:
    """The weight that a box contracts, and the axes of its input or output dim."""
    dim = node.dim(side) if node.kind in _CONTRACTIONS else None
    if dim is None or dim.dim is None or dim.parameter not in subject.by_name:
        return None
    place = (subject.by_name[dim.parameter].fact.names[0], dim.dim)
    return subject.by_name[dim.parameter], {fact.id for fact in subject.solution.classes if place in fact.parameters}


def _lies(subject: Audited, weight: Weight, side: Literal["input", "output"]) -> Lies:
    """Return how a layer's input or output lies on ranks by its style; "" if unknown."""
    line = weight.said.line
    if line is None:
        return "whole"
    if line.style not in _KNOWN:
        return ""
    # What a style object of torch itself says about this side comes first
    layouts = getattr(subject.plan.raw.get(line.pattern), f"{side}_layouts", None)
    layout = layouts[0] if isinstance(layouts, (list, tuple)) and layouts else layouts
    dim = getattr(layout, "dim", None)
    if dim is not None:
        return "a shard" if dim in (-1, 2) else "a part of the sequence"
    sharded = line.style in (_SHARDED_OUT if side == "output" else _SHARDED_IN)
    return "a shard" if sharded and type(layout).__name__ != "Replicate" else "whole"


def layouts(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """layouts: a weight is cut along a dim that cannot be cut, or into other rows than its neighbours.

    Each dim is an axis that other tensors share; a cut along the wrong one meets them with other rows, or with a part
    where all was expected.
    """
    groups: dict[tuple[str, str], list[Weight]] = {}
    for weight in subject.weights:
        line, reason = weight.said.line, _wrong_cut(subject, weight)
        if line is not None and reason and line.style not in EXACT_ALONE:
            groups.setdefault((line.pattern, reason), []).append(weight)
    for (pattern, reason), weights in groups.items():
        names = [weight.name for weight in weights]
        text, right = f"shards dim {weights[0].said.dim} of {names[0]}: {reason}", weights[0].fact.dim
        hint = "replicate it" if right is None else f"shard dim {right}"
        yield subject.suspect(check, pattern, text, hint, names=names)


def _wrong_cut(subject: Audited, weight: Weight) -> str:
    said, fact = weight.said, weight.fact
    if said.dim is None or not weight.is_matrix:
        return ""
    if said.dim != fact.dim:
        held = [c for c in subject.solution.classes if (fact.names[0], said.dim) in c.parameters]
        whys = sentence(c.reason for c in held if c.reason is not None)
        other = f"its neighbours are sharded along dim {fact.dim}" if fact.dim is not None else ""
        return "; ".join(filter(None, [whys, other])) or "no neighbour is sharded that way"
    if subject.wanted_rows(weight) != said.rows and Layout.parse(fact.layout or "1").contiguous(subject.tp_size):
        rows = len(subject.wanted_rows(weight)[0])
        return f"rank 0 holds other rows than its neighbours, whose shards have {rows} of {fact.shape[said.dim]}"
    return ""


def packed(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """packed: a fused weight (query, key, value; gate, up) is cut as if it were one.

    A plain cut gives rank 0 all queries and no value; shapes stay legal and the output is wrong. Each segment must be
    cut by itself. (transformers' packed styles know two equal segments, no more.)
    """
    groups: dict[tuple[str, str], list[Weight]] = {}
    for weight in subject.weights:
        said, fact = weight.said, weight.fact
        if said.line is None or said.dim is None or said.dim != fact.dim or fact.layout is None:
            continue
        packed = not Layout.parse(fact.layout).one_run(subject.tp_size) and "@" not in fact.layout
        if (packed or said.parts > 1) and subject.wanted_rows(weight) != said.rows and weight.is_matrix:
            groups.setdefault((said.line.pattern, fact.layout), []).append(weight)
    for (pattern, layout), weights in groups.items():
        first = weights[0]
        how = "in two equal halves" if first.said.parts > 1 else "as one run of rows"
        names = [weight.name for weight in weights]
        parsed = Layout.parse(layout)
        sizes = " + ".join(str(part.size) for part in parsed.parts)
        held = f"segments of {sizes} rows" if parsed.kind == "concatenation" else "interleaved segments"
        text = f"{first.name} holds {held} along dim {first.fact.dim}, but is sharded {how}"
        hint = "shard each segment separately (autoplan's packed_colwise does), or replicate it"
        if first.said.line is not None and first.said.line.style == "colwise_gather_output":
            continue
        yield subject.suspect(check, pattern, text, hint, names=names)


def units(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """units: what is cut is not divisible by the tensor-parallel size.

    Features may be divisible where heads are not: 2 key/value heads of 128 features over 4 ranks leave half a head
    each. The unit is the head, the group, the expert, the channel.
    """
    if subject.plan.plan is not None:
        return
    legal = ", ".join(map(str, subject.solution.legal_tp))
    groups: dict[tuple[str, int, int], list[Weight]] = {}
    for weight in subject.weights:
        unit = _broken_unit(subject, weight)
        if unit is not None and weight.said.line is not None:
            groups.setdefault((weight.said.line.pattern, *unit), []).append(weight)
    for (pattern, count, width), weights in groups.items():
        tp = subject.tp_size
        units = f"{count} units of {width} rows" if width > 1 else f"{count} rows" if count > 1 else "1 row"
        text = f"{weights[0].name} has {units}, not divisible by tp={tp}"
        hint = f"valid tp: {legal}; or replicate it"
        names = [weight.name for weight in weights]
        if subject.ran_at_full_size:
            yield subject.suspect(check, pattern, text, hint, names=names)
        else:
            proof = f"a rank would hold {count * width / tp:g} rows" + (f": {count / tp:g} units" if width > 1 else "")
            yield Finding(check, "error", pattern, text, hint, proof=proof)


def _broken_unit(subject: Audited, weight: Weight) -> tuple[int, int] | None:
    """(number of units, rows in a unit) where a cut leaves parts of units on ranks."""
    said, fact = weight.said, weight.fact
    if said.dim is None or said.line is None or said.line.style in EXACT_ALONE:
        return None
    size = fact.shape[said.dim]
    if size < subject.tp_size and len(fact.shape) > 1:
        return size, 1
    if not weight.is_matrix:
        return None
    if fact.dim == said.dim and fact.layout is not None and "@" in fact.layout:
        # Key/value heads shared by groups of ranks: a plain cut is right only where it gives the same rows.
        units = next((part.size for part in Layout.parse(fact.layout).parts if part.split), 1)
        same = subject.wanted_rows(weight) == said.rows
        return None if same or units % subject.tp_size == 0 else (units, size // units)
    for axis in subject.solution.classes:
        if (fact.names[0], said.dim) in axis.parameters and isinstance(axis.reason, DoesNotDivide):
            width = _width(subject, fact.names[0], said.dim, axis.size)
            if width > 1 or (subject.plan.dialect == "torch" and size % subject.tp_size):
                return axis.size, width
    return None


def _width(subject: Audited, parameter: str, dim: int, units: int) -> int:
    """Return the rows of one unit: what follows it in the segments of this dim."""
    term = subject.solution.axes.of(subject.solution.trace.by_name[parameter])[dim]
    for segment in segments(find(term)):
        sizes = [find(part).size for part in factors(find(segment))]
        if units in sizes:
            return prod(sizes[sizes.index(units) + 1 :])
    return 1


def head_counts(check: str, subject: Audited, earlier: tuple[Finding, ...]) -> Iterator[Finding]:
    """head-counts: an integer in the model's own code and the split disagree.

    `view(b, t, self.num_heads, head_dim)` on a rank with half of the heads raises, or runs and is wrong; so do heads
    that were halved although the projection stayed whole.
    """
    if subject.plan.plan is not None:
        yield from _ours(check, subject)
        return
    groups: dict[tuple[str, str, int, int], list[Weight]] = {}
    for edit in subject.solution.runtime.of(IntegerEdit):
        for weight in subject.weights:
            line = weight.said.line
            near = edit.pattern in (weight.module, weight.module.rpartition(".")[0])
            if near and line is not None and weight.said.dim is not None and line.style not in EXACT_ALONE:
                groups.setdefault((line.pattern, edit.name, edit.old, edit.new), []).append(weight)
    reported: set[tuple[str, int]] = set()
    for (pattern, attribute, old, new), weights in groups.items():
        if (attribute, old) not in reported:  # once, at the first line that splits what the number counts
            reported.add((attribute, old))
            module = weights[0].module.rpartition(".")[0]
            text = f"{module} computes with {attribute}={old}, but a rank holds {new}"
            hint = f"set {attribute} to {new} on this module when sharding it"
            yield subject.suspect(check, pattern, text, hint, names=[weight.name for weight in weights])


def _ours(check: str, subject: Audited) -> Iterator[Finding]:
    """A plan of ours carries its edits: they must be those that its own choices need."""
    if subject.right is None or subject.plan.plan is None:
        return
    have, need = (_by_place(subject, plan.runtime.of(IntegerEdit)) for plan in (subject.plan.plan, subject.right))
    for place in dict.fromkeys([*have, *need]):
        mine, right = have.get(place), need.get(place)
        if mine == right:
            continue
        module, attribute, _ = place
        says = "leaves it unchanged" if mine is None else f"sets it to {mine}"
        must = "it must stay unchanged" if right is None else f"it must be {right}"
        yield subject.suspect(check, module, f"{attribute} of {module}: the plan {says}; {must}", "plan again")


def _by_place(subject: Audited, edits: tuple[IntegerEdit, ...]) -> dict[tuple[str, str, int | None], object]:
    return {
        (module, edit.name, edit.index): edit.per_rank or edit.new
        for edit in edits
        for module in subject.modules
        if matches(edit.pattern, module)
    }
