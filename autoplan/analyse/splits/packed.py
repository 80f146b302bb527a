"""Constraints on splits: blocks of quantised weights, and what a written plan asks to replicate or to gather."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import gcd, lcm, prod

from autoplan.analyse.infer import Axes, Shards
from autoplan.axes.terms import Term, find, leaves, segments
from autoplan.common.layout import Layout, even_blocks, in_blocks, joined
from autoplan.common.patterns import is_under
from autoplan.values import Trace
from autoplan.values.quantised import PackedTensor, PackedWeight
from autoplan.values.reasons import CutOtherwiseOverBoth, InsideQuantisedBlock, Reason

# Quantised weights are split between blocks of numbers that share a scale, or not at all.
#
# The model is analysed as the plain weights that it computes with. The tensors stored in place of each are recorded
# separately (`values/quantised.py`): a split is refused if, at this size, it would fall inside a block of any of them.

# Events allowed on an axis that is split unevenly: products and elementwise ops.
_ANY_NUMBER = frozenset({"contract_w", "batch_w", "batch_a", "free_a"})

Packed = Mapping[str, tuple[PackedWeight, ...]]  # by name in the trace, for all blocks folded into one


def parted_blocks(shards: Shards, packed: Packed) -> dict[Term, InsideQuantisedBlock]:
    """Return the split axes for which a rank would hold a part of a block, each with the first such weight."""
    blocks: dict[Term, InsideQuantisedBlock] = {}
    can_be: dict[Term, int] | None = None
    for name, weights in packed.items():
        number = shards.trace.by_name.get(name)
        layouts = shards.layouts(number) if number is not None else ()
        for weight in weights if any(layouts) else ():
            for dim, why in _parted(weight, layouts, shards.tp):
                assert number is not None
                term = shards.axes.of(number)[dim]
                for leaf in leaves(term):
                    if find(leaf) in shards.marks and find(leaf) not in blocks:
                        can_be = unevenly(shards.trace, shards.axes, packed, shards.tp) if can_be is None else can_be
                        blocks[find(leaf)] = _with_uneven(why, find(leaf), can_be.get(find(leaf), 0))
    return blocks


def unevenly(trace: Trace, axes: Axes, packed: Packed, tp: int) -> dict[Term, int]:
    """Return axes that can be split between blocks though indivisible, each with how many units stay together."""
    blocks: dict[Term, int] = {}
    for name, weights in packed.items():
        for dims in axes.of(trace.by_name[name]) if name in trace.by_name else ():
            for leaf in map(find, leaves(dims)):
                layouts = Shards(trace, axes, {leaf: "!"}, tp).layouts(trace.by_name[name])
                for weight in weights:
                    blocks[leaf] = lcm(blocks.get(leaf, 1), *_kept_together(weight, layouts))
    return {leaf: block for leaf, block in blocks.items() if _can_be_uneven(leaf, block, tp)}


def _with_uneven(why: InsideQuantisedBlock, leaf: Term, block: int) -> InsideQuantisedBlock:
    """Return the reason, with the largest shard of the dim if it were split unevenly."""
    most = len(even_blocks(leaf.size, why.ranks, 0, block)) if block else 0
    return replace(why, uneven=why.size * most // leaf.size)


def _can_be_uneven(leaf: Term, block: int, tp: int) -> bool:
    """Return whether there is a block for each rank, but not the same number of blocks for each."""
    even = leaf.size % (tp * block) == 0
    return not even and -(-leaf.size // block) >= tp and leaf.events <= _ANY_NUMBER


def _kept_together(weight: PackedWeight, layouts: tuple[Layout | None, ...]) -> Iterator[int]:
    """Yield, for an axis that is split alone, how many of its units make a block, for each stored tensor."""
    for tensor in weight.tensors:
        for dim in tensor.dims:
            if any(layouts[axis] is not None for axis in dim.of):
                over = joined(tuple(layouts[axis] or Layout("factor", weight.shape[axis]) for axis in dim.of))
                yield from (dim.factor // gcd(dim.factor, inner) for inner in _inside(over))


def _inside(layout: Layout, inner: int = 1) -> Iterator[int]:
    """Yield how many elements each unit of a split part stands for."""
    if layout.split is not None:
        yield inner
    for place, part in enumerate(layout.parts):
        after = prod(part.size for part in layout.parts[place + 1 :]) if layout.kind == "product" else 1
        yield from _inside(part, inner * after)


def packed_layouts(
    weight: PackedWeight, layouts: tuple[Layout | None, ...], tp: int
) -> tuple[tuple[int, Layout] | None, ...]:
    """Return, for each stored tensor, the dim that is sharded with the weight, and its layout; None: replicated."""
    return tuple(next(iter(_cuts(weight, tensor, layouts, tp)), None) for tensor in weight.tensors)


def _cuts(
    weight: PackedWeight, tensor: PackedTensor, layouts: tuple[Layout | None, ...], tp: int
) -> Iterable[tuple[int, Layout]]:
    for place, dim in enumerate(tensor.dims):
        if dim.of and any(layouts[source] is not None for source in dim.of):
            over = joined(tuple(layouts[source] or Layout("factor", weight.shape[source]) for source in dim.of))
            segments = weight.segments if dim.of == (weight.rows,) else ()
            in_packed = in_blocks(over, tp, dim.factor, segments)
            assert in_packed is not None, f"{weight.name}: {tensor.name} is cut inside a block"
            yield place, in_packed if dim.each == 1 else joined((in_packed, Layout("factor", dim.each)))


def _parted(
    weight: PackedWeight, layouts: tuple[Layout | None, ...], tp: int
) -> Iterable[tuple[int, InsideQuantisedBlock]]:
    """Yield the dims of the plain weight whose split falls inside a block, and why."""
    for tensor in weight.tensors:
        for packed_dim in tensor.dims:
            split = [dim for dim in packed_dim.of if layouts[dim] is not None]
            if not split:
                continue
            over = joined(tuple(layouts[dim] or Layout("factor", weight.shape[dim]) for dim in packed_dim.of))
            segments = weight.segments if packed_dim.of == (weight.rows,) else ()
            if in_blocks(over, tp, packed_dim.factor, segments) is None:
                for dim in split:
                    # The size of the first segment that is split inside a block, else of the whole dim
                    layout = layouts[dim]
                    assert layout is not None
                    parts = layout.parts if layout.kind == "concatenation" else ()
                    size = next(
                        (part.size for part in parts if in_blocks(part, tp, packed_dim.factor) is None), layout.size
                    )
                    yield dim, InsideQuantisedBlock(weight.name, size, tp, packed_dim.factor)


def marks_at(leaf: Term, partner: Term | None, tp: int) -> dict[Term, str]:
    """Return how an axis is split at a size; if it has fewer units than ranks, with the axis that splits further."""
    groups = gcd(leaf.size, tp)
    if partner is None or leaf.size % tp == 0:
        return {leaf: "!"}
    if groups == 1:
        return {partner: "!"}
    return {leaf: f"!{groups}@{tp // groups}", partner: f"!{tp // groups}@1"}


# Demands of a written plan on the analysis: dims that must not be split, and products to gather at once.
#
# Units, integers and sums always come from analysis; a written plan only chooses which weights to split. So it reaches
# the solver like this: anything not to be split is refused from the start, with the reason that the plan gives.


@dataclass(frozen=True)
class Demands:
    """`whole`: why no axis in a (parameter, dim) may be split. `gathered`: weights whose product is to be gathered.

    Analysis decides about gathering other products, unless `only_those`. `packed`: quantised weights, whose blocks are
    not split; `uneven`: where blocks are indivisible, some ranks have one more. `inside`: axes, by number, in a
    (parameter, dim) that may not be split, since over ranks of context parallelism too others are.
    """

    whole: Mapping[tuple[str, int], Reason] = field(default_factory=dict)
    gathered: frozenset[str] = frozenset()
    only_those: bool = False
    packed: Packed = field(default_factory=dict)
    uneven: bool = False
    inside: frozenset[tuple[str, int, int]] = frozenset()

    def with_whole(self, trace: Trace, tensors: Iterable[int], why: Reason) -> Demands:
        """Return demands that also forbid splitting these tensors."""
        infos = [trace.tensors[number] for number in tensors]
        more = {(name, dim): why for info in infos for name in info.names[:1] for dim in range(len(info.shape))}
        return replace(self, whole={**more, **self.whole}, only_those=False)

    def and_also(self, other: Demands) -> Demands:
        """Return both: a dim that either forbids splitting stays unsplit, for its own reason if it has one."""
        whole, packed = {**other.whole, **self.whole}, {**other.packed, **self.packed}
        uneven = self.uneven or other.uneven
        gathered, inside = self.gathered | other.gathered, self.inside | other.inside
        return replace(self, whole=whole, gathered=gathered, packed=packed, uneven=uneven, inside=inside)

    def refused(self, trace: Trace, axes: Axes) -> dict[Term, Reason]:
        """Return the axes that may not be split, in the form that the solver takes."""
        axes_refused: dict[Term, Reason] = {}
        for (name, dim), why in self.whole.items():
            if name in trace.by_name:
                for leaf in leaves(axes.of(trace.by_name[name])[dim]):
                    axes_refused.setdefault(find(leaf), why)
        for name, dim, number in self.inside:
            axes_refused.setdefault(find(leaves(axes.of(trace.by_name[name])[dim])[number]), CutOtherwiseOverBoth())
        return axes_refused

    def may_gather(self, names: tuple[str, ...]) -> bool:
        """Return whether the product with the weight of these names may be computed in shards and gathered."""
        if not self.gathered.isdisjoint(names):
            return True
        return not self.only_those and not any(name in names for name, _ in self.whole)


def as_over_both(shards: Shards) -> Demands:
    """Return demands that split no axis next to one that is split over these ranks, of which several form one rank."""
    inside = set[tuple[str, int, int]]()
    for tensor, info in enumerate(shards.trace.tensors):
        for dim, term in enumerate(shards.axes.of(tensor)) if info.kind == "parameter" and info.names else ():
            for part in segments(term):
                parts = [find(leaf) for leaf in leaves(part)]
                if any(leaf in shards.marks for leaf in parts):
                    numbers = [find(leaf) for leaf in leaves(term)]
                    inside |= {(info.names[0], dim, numbers.index(leaf)) for leaf in parts if leaf not in shards.marks}
    return Demands(inside=frozenset(inside))


def divides_one_only(both: Shards, size: int) -> bool:
    """Return whether ranks of one of two dims, of this size, may split an axis next to that split by ranks of both."""
    axes, names = both.axes, both.trace.by_name
    sizes = {leaves(axes.of(names[name])[dim])[number].size for name, dim, number in as_over_both(both).inside}
    return any(number % both.tp and number % size == 0 for number in sizes)


def split_otherwise(both: Shards, alone: Shards) -> tuple[str, ...]:
    """Return modules in whose weights ranks of one dim alone split another axis than ranks of both."""
    axes, names = alone.axes, alone.trace.by_name
    return tuple(
        sorted(
            {
                name.rpartition(".")[0]
                for name, dim, number in as_over_both(both).inside
                if find(leaves(axes.of(names[name])[dim])[number]) in alone.marks
            }
        )
    )


def stay_whole(trace: Trace, patterns: tuple[str, ...], why: Reason) -> Demands:
    """Return demands that split no parameter under some modules."""
    names = [(n, t) for t in trace.tensors if t.kind == "parameter" for n in t.names]
    chosen = [(n, t) for n, t in names if any(is_under(pattern, n) for pattern in patterns)]
    return Demands({(n, dim): why for n, t in chosen for dim in range(len(t.shape))})


NO_DEMANDS = Demands()


def inside_blocks(axes: Axes) -> set[Term]:
    """Return axes inside the scaling blocks of quantised weights: companions, with one scale a block, lack them."""
    blocks: set[Term] = set()
    for weight, companions in axes.companions.items():
        scaled = [{find(leaf) for term in axes.of(other) for leaf in leaves(term)} for other in companions]
        for term in axes.of(weight):
            parts = leaves(term)
            for axes_of_scales in scaled:
                outside = [place for place, leaf in enumerate(parts) if find(leaf) in axes_of_scales]
                if outside:
                    blocks |= {find(leaf) for leaf in parts[outside[0] :] if find(leaf) not in axes_of_scales}
    return blocks
