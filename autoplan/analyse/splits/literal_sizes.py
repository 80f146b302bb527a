"""Find the integers that Python passes to torch, and the value that each needs on a rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from autoplan.analyse.infer import Shards
from autoplan.ops import call_record, op_record
from autoplan.ops.records.answers import Drawn
from autoplan.ops.records.on_shards import (
    Bounds,
    Filled,
    Groups,
    Identity,
    Indexed,
    Lengths,
    MadeWhole,
    OutputShape,
    PieceCount,
    RepeatEach,
    Repeats,
    Sizes,
    Unflattened,
)
from autoplan.values import Call, Ref, Symbolic, Trace

# Arguments of a recorded call.


def is_integer(value: Any) -> bool:
    return isinstance(value, Symbolic) or (isinstance(value, int) and not isinstance(value, bool))


def number(value: Any) -> int:
    return value.value if isinstance(value, Symbolic) else int(value)


def argument(call: Call, position: int, *names: str) -> tuple[tuple[Any, ...], Any]:
    """Return an argument by position or name, with its path."""
    if len(call.args) > position:
        return ("args", position), call.args[position]
    for name in names:
        if name in call.kwargs:
            return ("kwargs", name), call.kwargs[name]
    return (), None


# Calls that split a value into equal pieces, where the local pieces are unequal.
#
# Of two pieces of one projection one may be sharded and the other replicated. No single argument of the call gives a
# rank's lengths then, so they are planned.


def parted_dim(call: Call, shards: Shards) -> int:
    dims = len(shards.trace.tensors[call.reads[0]].shape)
    sizes = call_record(call.name).sizes
    if isinstance(sizes, PieceCount) and sizes.dim is not None:  # the call says it by its name
        return min(sizes.dim, dims - 1)
    _, dim = argument(call, 2, "dim")
    return number(dim if dim is not None else 0) % dims


def pieces_given(call: Call, shards: Shards) -> tuple[int, tuple[tuple[int, ...], ...]] | None:
    """Return, for a call that makes equal pieces, the dim (from the end) and the lengths that the pieces must have on
    each rank, if those are unequal: where one piece is sharded and its neighbour is replicated."""
    record = call_record(call.name).sizes
    if not isinstance(record, (Lengths, PieceCount)):
        return None
    _, sections = argument(
        call, record.at, "split_size_or_sections", "split_size", "chunks", "sections", "indices_or_sections"
    )
    outputs = call.results
    if not is_integer(sections) or not outputs:
        return None
    dim = parted_dim(call, shards) - len(shards.axes.of(outputs[0]))  # another call may have fewer dims before it
    wanted = tuple(
        tuple(shards.local_size(shards.axes.of(output)[dim], rank) for output in outputs) for rank in range(shards.tp)
    )
    return None if all(_follow(record, sizes, len(outputs)) for sizes in wanted) else (dim, wanted)


def _follow(record: Lengths | PieceCount, sizes: tuple[int, ...], count: int) -> bool:
    """Return whether the call gives pieces of these lengths when passed the length of the first, or their number."""
    whole = sum(sizes)
    if isinstance(record, PieceCount) and record.even:
        return sizes == tuple(whole // count + (place < whole % count) for place in range(count))
    first = sizes[0] if isinstance(record, Lengths) else -(-whole // count)
    return first > 0 and sizes == tuple(max(0, min(first, whole - place * first)) for place in range(count))


# The integers that a module's Python passes to torch, and the value of each on a rank.
#
# A recorded call has its literals with their origins (`values.Symbolic`). For every literal that follows a split
# dimension this module states a requirement: at this place, this rank must pass this number. Whether an edited
# attribute already makes it so is arithmetic on the origin (`evaluate`); nothing is run.

Path = tuple[Any, ...]
Found = list[tuple[Path, Any, tuple[int, ...]]]


@dataclass(frozen=True)
class Requirement:
    """An integer that ranks must pass at `path` in the arguments of call `call`: `want` (one per rank) instead of
    `have`. `seen` is the integer that a sharded model would pass there, with local sizes and edited integers."""

    call: int
    path: Path
    have: Any
    want: tuple[int, ...]
    seen: tuple[int, ...] = ()

    @property
    def old(self) -> int:
        return self.have.value if isinstance(self.have, Symbolic) else int(self.have)

    @property
    def uniform(self) -> bool:
        return len(set(self.want)) == 1


def requirements(index: int, call: Call, shards: Shards) -> list[Requirement]:
    """Return a requirement for every literal of a call that follows a split dimension."""
    outputs = (call.args[0].id,) if call_record(call.name).assigns else call.results
    if not any(shards.is_split(tensor) for tensor in (*call.reads, *outputs)):
        return []
    literals = _found(call_record(call.name).sizes, call, outputs, shards)
    return [Requirement(index, path, have, want) for path, have, want in literals]


def _found(sizes: Sizes, call: Call, outputs: tuple[int, ...], shards: Shards) -> Found:
    """Return the literals of each kind of size that follow a split dim, with their values on the ranks."""
    match sizes:
        case OutputShape() | Filled():
            names = sizes.names if isinstance(sizes, OutputShape) else ("size",)
            passed = _sizes(call, sizes.first, *names)
            return _of_shape(passed, outputs[0], shards) if _covers(passed, outputs[0], shards.trace) else []
        case Unflattened():
            path, parts = argument(call, sizes.sizes, "sizes")
            unflattened = number(argument(call, sizes.dim, "dim")[1]) % len(shards.trace.tensors[call.args[0].id].shape)
            return _of_shape([((*path, i), item) for i, item in enumerate(parts)], outputs[0], shards, unflattened)
        case Identity():  # the rows, and the columns if they are passed
            arguments = argument(call, sizes.rows, "n"), argument(call, sizes.columns, "m")
            passed = [(path, item) for path, item in arguments if is_integer(item)]
            return _of_shape(passed, outputs[0], shards) if made_in_shards(call, shards) else []
        case Lengths():
            return _split(sizes, call, outputs, shards)
        case Bounds():
            tensor = call.args[0].id
            _, along = argument(call, sizes.dim, "dim")
            if not sizes.length or along is None:
                return []
            dim = number(along) % len(shards.trace.tensors[tensor].shape)
            if shards.layout_of(shards.axes.of(tensor)[dim]) is None:
                return []
            start_path, start = argument(call, sizes.start, "start")
            length_path, length = argument(call, sizes.end, "length")
            if not is_integer(start) or not is_integer(length):
                return []
            low = _bounds(shards, tensor, dim, number(start))
            high = _bounds(shards, tensor, dim, number(start) + number(length))
            width = tuple(h - lo for h, lo in zip(high, low, strict=True))
            return [(start_path, start, low), (length_path, length, width)]
        case Indexed():
            return _getitem(call, shards)
        case Repeats():
            return _repeat(sizes, call, outputs[0], shards)
        case RepeatEach():
            return _repeat_interleave(sizes, call, outputs[0], shards)
        case Groups():
            return _groups(sizes, call, shards)
    return []  # no sizes, sizes that stay, or a number of pieces (`pieces_given`)


def made_in_shards(call: Call, shards: Shards) -> bool:
    """Return whether this call creates a rank's shard of its value when passed the local sizes."""
    sizes = call_record(call.name).sizes
    identity = isinstance(sizes, Identity) and not shards.axes.identities.isdisjoint(call.results)
    return isinstance(sizes, Filled) or identity


def made_whole(call: Call, shards: Shards) -> bool:
    """Return whether this call must create its full value, of which a rank then keeps its shard: its sizes stay."""
    return isinstance(call_record(call.name).sizes, (MadeWhole, Identity)) and not made_in_shards(call, shards)


def _sizes(call: Call, first: int, *names: str) -> list[tuple[Path, Any]]:
    """Return the sizes passed as a tuple or as trailing integers."""
    path, value = argument(call, first, *names)
    if isinstance(value, tuple):
        return [((*path, i), item) for i, item in enumerate(value)]
    trailing = [(("args", i), item) for i, item in enumerate(call.args) if i >= first]
    return [(path, item) for path, item in trailing if is_integer(item) or isinstance(item, Ref)]


def _recorded(item: Any, size: int) -> Any:
    """Return the literal, or the recorded size if it is an element of a tensor, which sharding does not change."""
    return size if isinstance(item, Ref) else item


def _local(shards: Shards, tensor: int, dim: int) -> tuple[int, ...]:
    term = shards.axes.of(tensor)[dim]
    return tuple(shards.local_size(term, rank) for rank in range(shards.tp))


def sizes_given(call: Call, trace: Trace) -> list[tuple[int, Any]]:
    """Return the sizes passed to a reshaping call, with the dim of its output that each belongs to."""
    outputs = call.results
    record = call_record(call.name).sizes
    if not isinstance(record, OutputShape) or not outputs:
        return []
    sizes = _sizes(call, record.first, *record.names)
    return [(dim, item) for dim, (_, item) in enumerate(sizes)] if _covers(sizes, outputs[0], trace) else []


def _covers(sizes: list[tuple[Path, Any]], output: int, trace: Trace) -> bool:
    return len(sizes) == len(trace.tensors[output].shape)


def _of_shape(sizes: list[tuple[Path, Any]], output: int, shards: Shards, first: int = 0) -> Found:
    """Return the sizes that give the output its shape, from dim `first` on."""
    shape = shards.trace.tensors[output].shape
    literals = [(path, _recorded(item, shape[dim]), dim) for dim, (path, item) in enumerate(sizes, first)]
    return [
        (path, item, _local(shards, output, dim))
        for path, item, dim in literals
        if is_integer(item) and number(item) != -1
    ]


def _split(record: Lengths, call: Call, outputs: tuple[int, ...], shards: Shards) -> Found:
    path, sections = argument(call, record.at, "split_size_or_sections", "split_size", "split_sizes")
    dim = parted_dim(call, shards)
    wanted = [_local(shards, output, dim) for output in outputs]
    sizes = [shards.trace.tensors[output].shape[dim] for output in outputs]
    if isinstance(sections, tuple):
        return [((*path, i), _recorded(item, sizes[i]), wanted[i]) for i, item in enumerate(sections)]
    return [] if pieces_given(call, shards) else [(path, _recorded(sections, sizes[0]), wanted[0])]


def _bounds(shards: Shards, tensor: int, dim: int, bound: int) -> tuple[int, ...]:
    term = shards.axes.of(tensor)[dim]
    return tuple(shards.held_below(term, rank, bound) for rank in range(shards.tp))


def _getitem(call: Call, shards: Shards) -> Found:
    """Return slice bounds and single indices along split dims; negative ones stay relative to the end."""
    tensor = call.args[0].id
    path, index = argument(call, 1)
    several = isinstance(index, tuple) and not _is_list(index, call, shards)
    items = index if several else (index,)
    rank = len(shards.trace.tensors[tensor].shape)
    literals: Found = []
    for position, dim, item in indexed_dims(items, rank, shards):
        where = (*path, position) if several else path
        if dim >= rank or shards.layout_of(shards.axes.of(tensor)[dim]) is None:
            continue
        size = shards.trace.tensors[tensor].shape[dim]
        if isinstance(item, slice) and item.step not in (None, 1):
            continue  # a step selects positions inside a unit, so the bounds stay
        if isinstance(item, slice):
            for key in ("start", "stop"):
                bound = _number_in(getattr(item, key), call, shards)
                if is_integer(bound) and abs(number(bound)) < 2**31:
                    literals.append(((*where, key), bound, _index(shards, tensor, dim, number(bound), size)))
        # A row of a sharded table keeps its global index: the rank that has the row provides it
        elif is_integer(item) and not (dim == 0 and shards.axes.is_stored_weight(tensor)):
            literals.append((where, item, _index(shards, tensor, dim, number(item), size)))
        elif isinstance(item, tuple) and all(is_integer(i) for i in item):
            for i, inner in enumerate(item):
                literals.append(((*where, i), inner, _index(shards, tensor, dim, number(inner), size)))
    return literals


def _is_list(index: tuple[Any, ...], call: Call, shards: Shards) -> bool:
    """Return whether the index is a list of positions along one dim, which is recorded like one index per dim."""
    looked_up = any(op_record(op.name).drawn is Drawn.ROWS for op in shards.trace.ops[slice(*call.ops)])
    return looked_up and all(map(is_integer, index))


def _number_in(bound: Any, call: Call, shards: Shards) -> Any:
    """Return a bound; one that is a number in a tensor was read out of it by an op of the call."""
    if not isinstance(bound, Ref):
        return bound
    read = (op for op in shards.trace.ops[slice(*call.ops)] if op_record(op.name).tells and op.args[0] == bound)
    return next((value for op in read for value in op.outputs if is_integer(value)), None)


def _index(shards: Shards, tensor: int, dim: int, bound: int, size: int) -> tuple[int, ...]:
    """Return the local form of an index or bound, by rank."""
    if bound >= size:  # beyond the end stays beyond the end
        return (bound,) * shards.tp
    local = _bounds(shards, tensor, dim, bound + size if bound < 0 else bound)
    if bound >= 0:
        return local
    ends = _local(shards, tensor, dim)
    return tuple(low - end for low, end in zip(local, ends, strict=True))


def indexed_dims(items: tuple[Any, ...], rank: int, shards: Shards) -> Iterator[tuple[int, int, Any]]:
    """Yield (position in the index, dim of the tensor, item) for an indexing expression."""

    def width(item: Any) -> int:
        if item is None or item is Ellipsis or isinstance(item, bool):
            return 0
        if isinstance(item, Ref) and shards.trace.tensors[item.id].dtype == "bool":
            return len(shards.trace.tensors[item.id].shape)
        return 1

    used = sum(width(item) for item in items)
    dim = 0
    for position, item in enumerate(items):
        if item is Ellipsis:
            dim += rank - used
            continue
        if width(item):
            yield position, dim, item
        dim += width(item)


def _times(lengths: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return how often each rank's size goes into its length; None if on some rank it does not."""
    pairs = list(zip(lengths, sizes, strict=True))
    return tuple(length // size for length, size in pairs) if all(b and not a % b for a, b in pairs) else None


def _repeat(record: Repeats, call: Call, output: int, shards: Shards) -> Found:
    tensor = call.args[0].id
    counts = _sizes(call, record.first, "repeats", "dims")
    pad = len(counts) - len(shards.trace.tensors[tensor].shape)
    literals: Found = []
    for dim, (path, count) in enumerate(counts):
        out = _local(shards, output, dim)
        own = _local(shards, tensor, dim - pad) if dim >= pad else (1,) * shards.tp
        times = _times(out, own)
        literals += [] if times is None else [(path, count, times)]
    return literals


def _repeat_interleave(record: RepeatEach, call: Call, output: int, shards: Shards) -> Found:
    path, count = argument(call, record.at, "repeats")
    _, along = argument(call, record.dim, "dim")
    if not is_integer(count) or along is None:
        return []
    tensor = call.args[0].id
    dim = number(along) % len(shards.trace.tensors[tensor].shape)
    out, own = _local(shards, output, dim), _local(shards, tensor, dim)
    times = _times(out, own)
    if times is None:
        return []
    length_path, length = argument(call, record.length, "output_size")
    lengths = [(length_path, length, out)] if is_integer(length) else []
    return [(path, count, times), *lengths]


def _groups(record: Groups, call: Call, shards: Shards) -> Found:
    """Scale the groups of a convolution or group norm with the channels, unless each group keeps some of them."""
    path, groups = argument(call, record.at, "groups", "num_groups")
    if groups is None or number(groups) == 1:
        return []
    tensor = call.args[0].id
    size = shards.trace.tensors[tensor].shape[1]
    local = _local(shards, tensor, 1)
    if record.weight is not None:
        in_group = _local(shards, argument(call, record.weight, "weight")[1].id, 1)
        return [(path, groups, tuple(n // own for n, own in zip(local, in_group, strict=True)))]
    return [(path, groups, tuple(number(groups) * n // size for n in local))]
