"""Cuts of quantised weights: between blocks of numbers that share a scale, or not at all.

The model is analysed as the plain weights that it computes with. Which tensors are stored in place of each is known
beside that (`values/quantised.py`): a split is refused where, at this size, a cut would fall inside a block of any of
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import gcd

from autoplan.analyse.infer import Axes
from autoplan.analyse.shards import Shards
from autoplan.axes.terms import Term, find, leaves
from autoplan.common.blocks import in_blocks, joined
from autoplan.common.layout import Layout
from autoplan.values import Trace
from autoplan.values.quantised import PackedTensor, PackedWeight
from autoplan.values.reasons import InsideQuantisedBlock

__all__ = ["Packed", "fits_blocks", "marks_at", "packed_layouts", "parted_blocks"]

Packed = Mapping[str, tuple[PackedWeight, ...]]  # by name in the trace, for all blocks that its block stands for


def parted_blocks(shards: Shards, packed: Packed) -> dict[Term, InsideQuantisedBlock]:
    """The split axes for which a rank would hold a part of a block, each with the first weight where it would."""
    found: dict[Term, InsideQuantisedBlock] = {}
    for name, weights in packed.items():
        number = shards.trace.by_name.get(name)
        layouts = shards.layouts(number) if number is not None else ()
        for weight in weights if any(layouts) else ():
            for dim, why in _parted(weight, layouts, shards.tp):
                assert number is not None
                term = shards.axes.of(number)[dim]
                for leaf in leaves(term):
                    if find(leaf) in shards.marks:
                        found.setdefault(find(leaf), why)
    return found


def fits_blocks(trace: Trace, axes: Axes, marks: dict[Term, str], tp: int, packed: Packed) -> bool:
    """Does every cut at a size fall between blocks?"""
    return not packed or not parted_blocks(Shards(trace, axes, marks, tp), packed)


def packed_layouts(
    weight: PackedWeight, layouts: tuple[Layout | None, ...], tp: int
) -> tuple[tuple[int, Layout] | None, ...]:
    """For each stored tensor the dim that is cut with the weight, and its layout; None: it is whole."""
    return tuple(next(iter(_cuts(weight, tensor, layouts, tp)), None) for tensor in weight.tensors)


def _cuts(
    weight: PackedWeight, tensor: PackedTensor, layouts: tuple[Layout | None, ...], tp: int
) -> Iterable[tuple[int, Layout]]:
    for place, dim in enumerate(tensor.dims):
        if dim.of and any(layouts[one] is not None for one in dim.of):
            over = joined(tuple(layouts[one] or Layout("factor", weight.shape[one]) for one in dim.of))
            segments = weight.segments if dim.of == (weight.rows,) else ()
            found = in_blocks(over, tp, dim.factor, segments)
            assert found is not None, f"{weight.name}: {tensor.name} is cut inside a block"
            yield place, found if dim.each == 1 else joined((found, Layout("factor", dim.each)))


def _parted(
    weight: PackedWeight, layouts: tuple[Layout | None, ...], tp: int
) -> Iterable[tuple[int, InsideQuantisedBlock]]:
    """The dims of the plain weight whose cut falls inside a block, and why."""
    for tensor in weight.tensors:
        for one in tensor.dims:
            split = [dim for dim in one.of if layouts[dim] is not None]
            if not split:
                continue
            over = joined(tuple(layouts[dim] or Layout("factor", weight.shape[dim]) for dim in one.of))
            segments = weight.segments if one.of == (weight.rows,) else ()
            if in_blocks(over, tp, one.factor, segments) is None:
                for dim in split:
                    size = _first_parted(layouts[dim], tp, one.factor)
                    yield dim, InsideQuantisedBlock(weight.name, size, tp, one.factor)


def _first_parted(layout: Layout | None, tp: int, block: int) -> int:
    """The size of the first segment that is cut inside a block; of all of it, where none is by itself."""
    assert layout is not None
    parts = layout.parts if layout.kind == "concatenation" else ()
    return next((part.size for part in parts if in_blocks(part, tp, block) is None), layout.size)


def marks_at(leaf: Term, partner: Term | None, tp: int) -> dict[Term, str]:
    """How an axis is split at a size; where it has fewer units than ranks, with the axis that splits on."""
    groups = gcd(leaf.size, tp)
    if partner is None or leaf.size % tp == 0:
        return {leaf: "!"}
    if groups == 1:
        return {partner: "!"}
    return {leaf: f"!{groups}@{tp // groups}", partner: f"!{tp // groups}@1"}
