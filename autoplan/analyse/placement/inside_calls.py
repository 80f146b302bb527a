"""Check that what happens inside one call is still right on shards.

A call of torch may be many ops, and ranks can communicate before and after it, not inside. So a call returns a partial
sum only if all that it does after summing is linear. And sizes that it reads off its inputs are local: a mean written
as a sum over a count is divided by the local count, a value stretched to another's size becomes as long as the shard.
Whatever differs in this way is refused here, and the axis is not split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from math import isclose, prod
from typing import Any

from autoplan.analyse.infer import Shards
from autoplan.ops import call_record, op_record
from autoplan.ops.attention import BOX
from autoplan.ops.elementwise import COUNTING
from autoplan.ops.records.answers import Linear, Reduction, Shows
from autoplan.ops.records.on_shards import Filled, Groups, MadeWhole
from autoplan.ops.records.record import OpRecord
from autoplan.ops.views import stretches
from autoplan.values import Call, Op, Ref, Symbolic, refs
from autoplan.values.reasons import NotPlaced

_MOST_DIMS = 6
_NEAR_SIZES = (0, 1, -1)


def why_no_partial_sum(
    call: Call, shards: Shards, kinds: Mapping[int, Reduction], bias: int | None
) -> NotPlaced | None:
    """Return why the sums inside a call (op index -> kind) do not leave it as one partial sum; None if they do. `bias`:
    what the call adds to its sum, of which each rank adds a part."""
    if len(set(kinds.values())) > 1:
        return NotPlaced("sums-of-several-kinds")
    if not set(kinds.values()) <= {Reduction.SUM, Reduction.MEAN}:
        return None
    partial = set() if bias is None else {bias}
    for index in range(*call.ops):
        op = shards.trace.ops[index]
        inputs, outputs = op.reads, op.results
        partials = [tensor for tensor in inputs if tensor in partial]
        if index in kinds:
            if not set(partials) <= {bias} or _adds_whole(op, partial):
                return NotPlaced("added-to-partial", op=op.name)
        elif partials and (any(map(shards.is_split, (*inputs, *outputs))) or not _is_linear(op, partial, shards)):
            return NotPlaced("partial-is-read", op=op.name)
        if partials or index in kinds:
            partial.update(outputs)
    apart = [t for t in call.results if t not in partial and shards.trace.tensors[t].differentiable]
    if apart and any(t in partial for t in call.results):
        return NotPlaced("some-results-partial")
    count = _count_in(call, shards) if kinds else None
    return NotPlaced("counted", count=count) if count is not None else None


def _adds_whole(op: Op, partial: set[int]) -> bool:
    """Return whether a product adds a bias that is not partial."""
    product = op_record(op.name).product
    if product is None or product.bias is None or op.kwargs.get("beta", 1) == 0:
        return False
    bias = op.args[product.bias] if len(op.args) > product.bias else op.kwargs.get("bias")
    return isinstance(bias, Ref) and bias.id not in partial


def _is_linear(op: Op, partial: set[int], shards: Shards) -> bool:
    """Return whether an op applied to partial sums returns a partial sum."""
    record = op_record(op.name)
    operands = [item for item in _flat(op.args) if isinstance(item, Ref)]
    partials = [item.id in partial for item in operands]
    if record.linear in (Linear.ADDS, Linear.SUBTRACTS):
        return all(partials) and all(isinstance(item, Ref) for item in op.args[:2])
    if record.linear is Linear.WITHIN:
        return all(item.id in partial for item in operands if "float" in shards.trace.tensors[item.id].dtype)
    if record.shows is not Shows.NOTHING:
        return partials[0]
    if record.product is not None:
        return record.product.bias is None and sum(partials) == 1
    if record.linear is Linear.FIRST:
        return partials[0] and sum(partials) == 1 and not op.kwargs.get("rounding_mode")
    return record.linear is Linear.EACH and sum(partials) == 1


def _count_in(call: Call, shards: Shards) -> float | None:
    """Return a size computed inside the call that equals a sharded dim."""
    arguments = {float(number) for number in _numbers((call.args, call.kwargs))}
    computed = [
        float(number)
        for op in shards.trace.ops[slice(*call.ops)]
        if op.name.rstrip("_") in COUNTING
        for number in _numbers(op.args)
        if float(number) not in arguments and abs(number) not in (0, 1)
    ]
    sizes = _sizes_of_split(call, shards) if computed else set()
    telling = {size + step for size in sizes for step in _NEAR_SIZES if size + step > 1}
    for number in computed:
        if any(isclose(abs(number), t**power) for t in telling for power in (1, -1, 0.5, -0.5)):
            return number
    return None


def _sizes_of_split(call: Call, shards: Shards) -> set[int]:
    """Return every number of positions that a split dim of a call's inputs is a factor of."""
    counts: set[int] = set()
    for tensor in call.reads:
        if not shards.is_split(tensor):
            continue
        sizes = shards.trace.tensors[tensor].shape
        split = {dim for dim, layout in enumerate(shards.layouts(tensor)) if layout is not None}
        dims = range(len(sizes)) if len(sizes) <= _MOST_DIMS else sorted(split)
        for count in range(1, len(dims) + 1):
            counts |= {prod(sizes[dim] for dim in some) for some in combinations(dims, count) if split & set(some)}
    return counts


def _numbers(value: Any) -> Iterator[float]:
    for item in _flat(value):
        if isinstance(item, Symbolic):
            yield item.value
        elif isinstance(item, (int, float)) and not isinstance(item, bool):
            yield item


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    elif isinstance(value, dict):
        yield from _flat(tuple(value.values()))
    else:
        yield value


def axis_lost_in(op: Op, shards: Shards) -> bool:
    """Return whether a split axis of an op's inputs is missing in its outputs: summed over or selected from."""
    if op.name == BOX or not _keeps_what_it_reads(op_record(op.name)):
        return False
    outputs = [tensor for tensor in op.results if 0 not in shards.trace.tensors[tensor].shape]
    if not outputs:
        return False
    lost = {leaf for tensor in op.reads for leaf in shards.split_leaves(tensor)}
    return not lost <= {leaf for tensor in outputs for leaf in shards.split_leaves(tensor)}


def _keeps_what_it_reads(record: OpRecord) -> bool:
    """Return whether an op's outputs should keep the axes of its inputs. Convolutions handle their channels themselves;
    some ops only create a value of the same kind; some select a segment of what a packed weight made, which may lack
    the axis of the others. (An axis they slice through is marked as cut.)"""
    groups = isinstance(record.sizes, Groups)
    creates = isinstance(record.sizes, (Filled, MadeWhole))
    parts = record.along is not None and record.along.what in ("picks", "parts")
    return not (groups or creates or parts or record.shows is Shows.PICKED)


def why_sizes_differ(call: Call, shards: Shards) -> NotPlaced | None:
    """Return why a call that gives one value the sizes of another goes wrong on shards; None if it does not."""
    ops = shards.trace.ops[slice(*call.ops)]
    if not ops or not any(map(shards.is_split, (*call.reads, *call.results))):
        return None
    record = call_record(call.name)
    like_another = record.linear is Linear.FIRST and record.shows in (Shows.RESHAPED, Shows.VIEWED)
    like_another = like_another or record.follows == "another"
    read = {tensor for op in ops for tensor in op.reads}
    outputs = [tensor for tensor in call.results if shards.is_split(tensor)]
    layouts = {shards.layouts(tensor) for tensor in outputs}
    for tensor in call.reads:
        if like_another and tensor not in read and layouts - {shards.layouts(tensor)}:
            return NotPlaced("sizes-of-another")
        if record.follows == "long" and shards.layouts(tensor)[-1] is not None:
            return NotPlaced("length-is-read")
    if record.follows == "all" and any(_stretched(op, call, shards) for op in ops):
        return NotPlaced("stretched")
    return None


def _stretched(op: Op, call: Call, shards: Shards) -> bool:
    """Return whether an op expands a dim of 1 to the length of an input's split dim without being linked to it."""
    if not stretches(op.name):
        return False
    (output,), (source,) = op.results, list(refs(op.args))[:1]
    layouts, shape = shards.layouts(output), shards.trace.tensors[output].shape
    before = shards.trace.tensors[source].shape
    longer = (1,) * (len(shape) - len(before)) + before
    wide = {size for size, was, layout in zip(shape, longer, layouts, strict=True) if was == 1 and layout is None}
    read = (zip(shards.trace.tensors[t].shape, shards.layouts(t), strict=True) for t in call.reads)
    return not wide.isdisjoint(size for dims in read for size, layout in dims if layout is not None and size > 1)


def made_of(call: Call, tensor: int, shards: Shards) -> set[int]:
    """Return the results of a call that depend on this input of it."""
    reached = {tensor}
    for op in shards.trace.ops[slice(*call.ops)]:
        if not reached.isdisjoint(op.reads):
            reached.update(op.results)
    return reached & set(call.results)
