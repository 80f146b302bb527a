"""Choose the axis classes to split, and list the tp sizes at which all of them are divisible."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import gcd, prod
from types import MappingProxyType

from autoplan.analyse.infer import Axes, Shards
from autoplan.analyse.splits.packed import Packed, inside_blocks, marks_at, parted_blocks
from autoplan.axes.events import FORBIDDING
from autoplan.axes.terms import Term, factors, find, leaves
from autoplan.common.layout import chunk
from autoplan.ops import op_record
from autoplan.ops.attention import BOX
from autoplan.ops.convolutions import groups_of
from autoplan.ops.records.answers import Drawn, Linear, Shows
from autoplan.ops.records.record import nothing
from autoplan.values import Op, Ref, Trace
from autoplan.values.reasons import (
    AlreadySplit,
    DoesNotDivide,
    InsideQuantisedBlock,
    InsideScaledBlock,
    Narrow,
    NeedsSums,
    NeverContracted,
    OnBothDims,
    ReadAcross,
    Reason,
    ResidualStream,
    SingleWeight,
    SizeOfInput,
    TooFewRows,
)

# Candidates and choices.
#
# A class can be split when no event on it forbids it, it is in weights and is contracted with one (so that sharding it
# pays), and it is neither input data nor the residual stream. The residual is recognised by structure, `x + f(x)`
# where f goes through a weight, not by name or frequency. Among the candidates the ones that hold most bytes win; a
# weight is sharded along one class.
#
# The vocabulary is a special case: rows of a table that is looked up, columns of the head whose product leaves the
# model. It may be sharded unevenly.

# Events that allow a split at a price: classes without them go first.
PRICE = {"contract_a": 4, "reduce_lin": 2, "norm": 2, "variance": 4, "length": 4, "created": 1, "const": 1}
FREE = frozenset({"contract_w", "batch_w", "batch_a", "free_a", "conv_group", "random", "experts"})
_OTHER_PRICE = 2
_WORTHWHILE = 16  # splitting a narrower dim saves less than its sum costs
_EXPENSIVE = 3  # a class this expensive goes after all cheaper ones, whatever its size
# A norm written out in ops, over a free dim of products.
_TOO_EXPENSIVE = (frozenset({"variance", "free_a"}), frozenset({"length", "free_a"}))

Occurrences = dict[Term, dict[int, set[int]]]
_Candidate = tuple[bool, int, int, Term]  # (is expensive, minus elements held, price, leaf)


@dataclass
class SplitMarks:
    """The split leaves with their marks, and for every other candidate the reason against it."""

    marks: dict[Term, str] = field(default_factory=dict)
    reasons: dict[Term, Reason] = field(default_factory=dict)
    indivisible: dict[Term, int] = field(default_factory=dict)
    partners: dict[Term, Term] = field(default_factory=dict)  # query heads that follow key/value heads, see `_partner`
    vocabularies: set[Term] = field(default_factory=set)
    order: tuple[Term, ...] = ()  # candidates: of those that share a weight, the first divisible one is split

    def mark_vocabulary(self, leaf: Term) -> None:
        self.marks[leaf] = "!"
        self.vocabularies.add(leaf)
        self.reasons.pop(leaf, None)


def occurrences(trace: Trace, axes: Axes) -> Occurrences:
    """Return the parameters that each leaf is in, with the dims."""
    places: Occurrences = defaultdict(dict)
    for tensor in range(len(trace.tensors)):
        if not axes.is_stored_weight(tensor):
            continue
        for dim, term in enumerate(axes.of(tensor)):
            for leaf in leaves(term):
                places[find(leaf)].setdefault(tensor, set()).add(dim)
    return places


def residual_leaves(trace: Trace, axes: Axes) -> set[Term]:
    """Return the leaves of the residual stream: dims on both sides of `x + f(x)` when f goes through a weight."""
    same = _Sameness(trace, axes)
    reached: dict[int, int] = defaultdict(int)  # tensor -> bit set of its ancestors
    through: dict[int, int] = defaultdict(int)  # the same, on paths through a contraction with a weight
    terms: set[Term] = set()
    for op in trace.ops:
        mentioned = op.reads
        inputs = [same.root(t) for t in mentioned if t not in axes.weights]
        outputs = [same.root(t) for t in op.results]
        if op_record(op.name).linear is Linear.ADDS and len(inputs) >= 2:
            left, right = inputs[0], inputs[1]
            if through[right] >> left & 1 or through[left] >> right & 1:
                shared = {find(x) for t in axes.of(left) for x in leaves(t)}
                terms |= shared & {find(x) for t in axes.of(right) for x in leaves(t)}
        weighted = _contracts_weight(op, mentioned, trace, axes)
        above = through_above = 0
        for tensor in inputs:
            above |= reached[tensor] | 1 << tensor
            through_above |= through[tensor]
        for tensor in outputs:
            if tensor not in inputs:  # in place or the same value: no ancestor of itself
                reached[tensor] |= above
                through[tensor] |= above if weighted else through_above
    return {leaf for leaf in terms if not leaf.data}


class _Sameness:
    """Values that are one value cast, copied, scaled by a number or shifted: the stream in another dtype is the stream.
    Scaled channel by channel it is not: `f(x) + D * x`, inside a mixer, is no stream."""

    def __init__(self, trace: Trace, axes: Axes) -> None:
        self._root: dict[int, int] = {}
        for op in trace.ops:
            mentioned = op.reads
            active = [t for t in mentioned if t not in axes.weights and trace.tensors[t].kind != "constant"]
            outputs = op.results
            if not _stays_itself(op) or len(active) != 1 or not outputs or outputs[0] == active[0]:
                continue
            if op_record(op.name).drawn is Drawn.MUL and any(
                prod(trace.tensors[t].shape) > 1 for t in mentioned if t in axes.weights
            ):
                continue
            if trace.tensors[outputs[0]].shape == trace.tensors[active[0]].shape:
                self._root.setdefault(outputs[0], self.root(active[0]))

    def root(self, tensor: int) -> int:
        return self._root.get(tensor, tensor)


def _stays_itself(op: Op) -> bool:
    """Return whether the op returns a copy, a reshaped value, or the value scaled and shifted by numbers."""
    record = op_record(op.name)
    dropped = record.random.when == "rate" and record.reduces is nothing
    scaled = record.drawn is Drawn.MUL or record.linear in (Linear.ADDS, Linear.SUBTRACTS)
    return record.shows in (Shows.RESHAPED, Shows.COPIED) or dropped or scaled


def _contracts_weight(op: Op, tensors: tuple[int, ...], trace: Trace, axes: Axes) -> bool:
    """Return whether the op mixes the features of a value; a depthwise convolution does not."""
    record = op_record(op.name)
    if record.drawn is Drawn.CONVOLUTION and trace.tensors[op.args[1].id].shape[1] == 1 and groups_of(op) > 1:
        return False
    mixes = op.name == BOX or record.product is not None
    return mixes and any(tensor in axes.computed for tensor in tensors)


def choose(
    trace: Trace,
    axes: Axes,
    tp: int,
    *,
    refused: dict[Term, Reason],
    vocabularies: set[Term] | None = None,
    uneven: Mapping[Term, int] = MappingProxyType({}),
) -> SplitMarks:
    """Choose the classes to split at `tp`. `refused` are leaves an earlier round could not place, with reasons.

    `uneven`: leaves that may be split unevenly, with the number of units that stay together.
    """
    choice = SplitMarks()
    places = occurrences(trace, axes)
    taken: set[int] = set()
    candidates = _candidates(trace, axes, places, refused, choice)
    rivalled = []
    for leaf in sorted(vocabularies or (), key=lambda x: -x.size):
        if leaf in refused:
            choice.reasons[leaf] = refused[leaf]
        elif not chunk(leaf.size, tp, tp - 1):
            choice.reasons[leaf] = TooFewRows(leaf.size, tp)
        elif _rivalled(leaf, candidates, places, trace, tp):
            rivalled.append(leaf)
        else:
            choice.mark_vocabulary(leaf)
            taken |= weights_of(leaf, places, trace)
    choice.order = tuple(leaf for _, _, _, leaf in candidates)
    for leaf in choice.order:
        own = weights_of(leaf, places, trace)
        if leaf in choice.marks:
            continue
        if own & taken:
            choice.reasons[leaf] = AlreadySplit()
            continue
        partner = _partner(leaf, places, candidates, taken, trace, axes)
        if _mark(choice, leaf, partner, tp, uneven):
            taken |= own
    for leaf in rivalled:
        if not weights_of(leaf, places, trace) & taken:
            choice.mark_vocabulary(leaf)
        elif leaf not in choice.marks:
            choice.reasons[leaf] = AlreadySplit(cheaper=True)
    return choice


def _candidates(
    trace: Trace, axes: Axes, occurring: Occurrences, refused: dict[Term, Reason], choice: SplitMarks
) -> list[_Candidate]:
    """Return the leaves that could be split, cheapest and largest first; record reasons against the others."""
    residual = residual_leaves(trace, axes)
    inside = inside_blocks(axes)
    candidates: list[_Candidate] = []
    for leaf, places in occurring.items():
        reason = _why_not(leaf, places, trace, axes, residual, refused)
        if reason is not None or leaf in inside:
            choice.reasons[leaf] = reason if reason is not None else InsideScaledBlock()
            continue
        weights = [t for t in places if len(trace.tensors[t].shape) >= 2]
        elements = sum(prod(trace.tensors[t].shape) for t in weights)
        price = sum(0 if e in FREE else PRICE.get(e, _OTHER_PRICE) for e in leaf.events)
        candidates.append((price > _EXPENSIVE, -elements, price, leaf))
    return sorted(candidates, key=lambda c: c[:3])


def _mark(choice: SplitMarks, leaf: Term, partner: Term | None, tp: int, uneven: Mapping[Term, int]) -> bool:
    """Mark a class as split, or record why it cannot be; return whether it is split."""
    if partner is not None:
        choice.partners[leaf] = partner
    groups = gcd(leaf.size, tp)
    if partner is None and leaf in uneven:
        choice.marks[leaf] = f"!~{uneven[leaf]}"
    elif leaf.size % tp and groups > 1 and partner is not None and partner.size % (tp // groups) == 0:
        choice.marks[leaf] = f"!{groups}@{tp // groups}"
        choice.marks[partner] = f"!{tp // groups}@1"
    elif leaf.size % tp:
        choice.reasons[leaf] = DoesNotDivide(leaf.size, tp)
        choice.indivisible[leaf] = leaf.size
        return False
    else:
        choice.marks[leaf] = "!"
    return True


def _rivalled(rows: Term, candidates: list[_Candidate], occurring: Occurrences, trace: Trace, tp: int) -> bool:
    """Return whether a head is narrower than its input, which can be split: its output is then the cheaper sum."""
    elements = sum(prod(trace.tensors[t].shape) for t in weights_of(rows, occurring, trace))
    return any(
        not expensive and -more > elements and leaf.size > rows.size and leaf.size % tp == 0 and leaf is not rows
        for expensive, more, _, leaf in candidates
        if weights_of(leaf, occurring, trace) & weights_of(rows, occurring, trace)
    )


def _partner(
    leaf: Term, occurring: Occurrences, candidates: list[_Candidate], taken: set[int], trace: Trace, axes: Axes
) -> Term | None:
    """Return the axis that splits further where `leaf` (key/value heads, fewer than ranks) cannot: query heads within a
    group. Ranks form groups; each group holds some key/value heads, and its ranks shard the query heads of those."""
    mine = weights_of(leaf, occurring, trace)
    for _, _, _, other in candidates:
        theirs = weights_of(other, occurring, trace)
        if other is leaf or not theirs or not theirs < mine or theirs & taken or "batch_a" not in other.events:
            continue
        if all(_follows(leaf, other, axes.of(t)) for t in theirs):
            return other
    return None


def _follows(major: Term, minor: Term, terms: tuple[Term, ...]) -> bool:
    """Return whether some dim runs over `minor` right inside `major`."""
    for term in terms:
        parts = [find(part) for part in factors(term)]
        if major in parts and minor in parts and parts.index(minor) == parts.index(major) + 1:
            return True
    return False


def weights_of(leaf: Term, occurring: Occurrences, trace: Trace) -> set[int]:
    return {tensor for tensor in occurring.get(leaf, ()) if len(trace.tensors[tensor].shape) >= 2}


def _why_not(
    leaf: Term,
    places: dict[int, set[int]],
    trace: Trace,
    axes: Axes,
    residual: set[Term],
    refused: dict[Term, Reason],
) -> Reason | None:
    """Return the first reason against splitting a leaf, if there is one."""
    if leaf.data:
        return SizeOfInput()
    if leaf in residual:
        return ResidualStream()
    against = sorted(leaf.events & FORBIDDING)
    if against:
        return ReadAcross(tuple(map(str, against)))
    expensive = next((events for events in _TOO_EXPENSIVE if leaf.events >= events), None)
    if expensive is not None:
        return NeedsSums(tuple(sorted(expensive)))
    of_table = _is_summed_table(leaf, places, trace)
    if not leaf.events & {"contract_w", "batch_w"} and not of_table:
        return NeverContracted()
    single = len([t for t in places if len(trace.tensors[t].shape) >= 2]) < 2
    if single and not of_table and not _made_and_summed(leaf, trace, axes):
        return SingleWeight()
    narrow = max(_width(trace.tensors[t].shape, d) for t, dims in places.items() for d in dims) < _WORTHWHILE
    if narrow and "experts" not in leaf.events:
        return Narrow(_WORTHWHILE)
    if any(len(dims) > 1 for dims in places.values()):
        return OnBothDims()
    return refused.get(leaf)


def _is_summed_table(leaf: Term, places: dict[int, set[int]], trace: Trace) -> bool:
    """Return whether a leaf is the columns of one matrix that is most of the model, of which only sums leave: scores of
    pairs of rows, as recommenders and graph models make them."""
    matrices = [t for t in places if len(trace.tensors[t].shape) >= 2]
    total = sum(prod(t.shape) for t in trace.tensors if t.kind == "parameter" and len(t.shape) >= 2)
    summed = leaf.events & {"reduce_lin", "contract_a"}
    columns = len(matrices) == 1 and places[matrices[0]] == {len(trace.tensors[matrices[0]].shape) - 1}
    return bool(summed) and columns and 2 * prod(trace.tensors[matrices[0]].shape) >= total


def _made_and_summed(leaf: Term, trace: Trace, axes: Axes) -> bool:
    """Return whether products with the same weight both produce a leaf and sum over it (an autoencoder with tied
    weights)."""
    summed: dict[int, set[bool]] = defaultdict(set)
    for op in trace.ops:
        product = op_record(op.name).product
        if product is None:
            continue
        value, weight = (op.args[place] for place in (product.value, product.weight))
        if isinstance(value, Ref) and isinstance(weight, Ref) and weight.id in axes.sources:
            weights, values = ({find(x) for t in axes.of(operand.id) for x in leaves(t)} for operand in (weight, value))
            if leaf in weights:
                summed[axes.sources[weight.id]].add(leaf in values)
    return any(len(ways) == 2 for ways in summed.values())


def _width(shape: tuple[int, ...], dim: int) -> int:
    """Return the width of a weight's side that a dim belongs to: heads and head width may be two dims."""
    others = sorted(size for d, size in enumerate(shape) if d != dim)
    return shape[dim] * prod(others[:-1])


# The sizes at which every class that can be split is divisible, and no block of a quantised weight is split.


@dataclass(frozen=True)
class Tried:
    """The candidates in the order in which they were tried first, and those that were given up at this size.

    `blocked`: axes that would be split inside a block of a quantised weight, each with its partner axis. `why`: where
    that would be.
    """

    order: tuple[Term, ...] = ()
    blocked: Mapping[Term, Term | None] = field(default_factory=dict)
    why: Mapping[Term, InsideQuantisedBlock] = field(default_factory=dict)


def legal_sizes(trace: Trace, axes: Axes, choice: SplitMarks, tried: Tried, packed: Packed) -> tuple[int, ...]:
    """Return the sizes by which every class is divisible, between blocks of quantised weights. Key/value heads may be
    shared by groups of ranks, or replicated while the queries of each are sharded."""
    vocabularies = choice.vocabularies
    partners = {**choice.partners, **{leaf: other for leaf, other in tried.blocked.items() if other is not None}}
    splittable = dict.fromkeys((*choice.marks, *choice.indivisible, *tried.blocked))
    followers = set(partners.values())
    alone = [leaf for leaf in splittable if leaf not in vocabularies | followers and leaf not in partners]
    largest = min([*(leaf.size for leaf in alone), *(a.size * b.size for a, b in partners.items())], default=1)
    first = _first_choices(trace, axes, tried, splittable) if packed else set()

    def fits(tp: int) -> bool:
        if any(leaf.size % tp for leaf in alone):
            return False
        if not all(b.size % (tp // gcd(a.size, tp)) == 0 for a, b in partners.items()):
            return False
        marks = {leaf: "!" for leaf in splittable if leaf in first and leaf not in followers}
        for leaf, partner in partners.items():
            marks |= marks_at(leaf, partner, tp) if leaf in first else {}
        return not packed or not parted_blocks(Shards(trace, axes, marks, tp), packed)  # splits fall between blocks

    return tuple(tp for tp in range(1, largest + 1) if tp == 1 or fits(tp))


def _first_choices(trace: Trace, axes: Axes, tried: Tried, splittable: Iterable[Term]) -> set[Term]:
    """Return the classes split where all are divisible: later ones count only for weights still unsplit."""
    places = {leaf: number for number, leaf in enumerate(tried.order)}
    occurring = occurrences(trace, axes)
    choices, taken = set(), set[int]()
    for leaf in sorted(splittable, key=lambda axis: places.get(axis, -1)):
        weights = weights_of(leaf, occurring, trace)
        if not weights & taken:
            choices.add(leaf)
            taken |= weights
    return choices
