"""The two ends of a model: lookup tables, heads whose product leaves the model, and products worth gathering."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator
from dataclasses import replace
from math import prod
from typing import Any

from autoplan.analyse.infer import Axes, Shards
from autoplan.analyse.placement.callflow import UNRETURNED, CallFlow, Crossing, Placement, Refusal
from autoplan.analyse.splits.packed import NO_DEMANDS, Demands
from autoplan.analyse.splits.special import branch_weights
from autoplan.axes.events import FORBIDDING
from autoplan.axes.terms import Term, find, leaves
from autoplan.common.layout import Layout, chunk
from autoplan.ops import call_record, op_record
from autoplan.ops.convolutions import groups_of, transposed
from autoplan.ops.indexing import rows_by_ids
from autoplan.ops.records.answers import Drawn, Linear, Shows
from autoplan.ops.records.record import writes_in_place
from autoplan.values import AllGather, Op, OutputShape, Ref, SplitLogits, Trace, VocabularyTable
from autoplan.values.reasons import NotPlaced

# Large tables besides the token embedding: sharded by columns, with an all-gather of the rows that were looked up.
#
# A recommender has a table for each kind of item, a character model one for the shapes of its characters. Sharded by
# rows, ids of other ranks are masked and the result is all-reduced: each number moves twice. Sharded by columns, every
# rank looks up all ids, and the columns are gathered: each number moves once. So tables that nothing else reads are
# sharded by columns. (The token embedding is sharded by rows, like its head.) Embedding bags are treated the same.

_LARGE = 0.02  # share of all matrix elements, for tables indexed by the model's inputs
_MANY_ROWS = 4096  # a table of this many rows is large whatever its ids are, in any model


def tables_to_gather(
    trace: Trace, axes: Axes, shards: Shards, arguments: Collection[int], demands: Demands
) -> dict[int, int]:
    """Return the lookups (by index of the op) whose columns are to be gathered, with their table."""
    total = sum(prod(t.shape) for t in trace.tensors if t.kind == "parameter" and len(t.shape) >= 2)
    lookups = {index: table for index, op in enumerate(trace.ops) if (table := looked_up_in(op, axes)) is not None}
    readers: dict[int, set[int]] = {table: set() for table in lookups.values()}
    for index, op in enumerate(trace.ops):
        for tensor in op.reads:
            if axes.sources.get(tensor, tensor) in readers:
                readers[axes.sources.get(tensor, tensor)].add(index)
    lookups_to_gather = {}
    for index, table in lookups.items():
        rows, width = trace.tensors[table].shape
        ids = {taken[1] for other in readers[table] if (taken := rows_by_ids(trace.ops[other])) is not None}
        large = rows >= _MANY_ROWS or (ids <= set(arguments) and rows * width >= _LARGE * total)
        alone = readers[table] <= lookups.keys() and not any(map(shards.is_split, ids))
        whole = not shards.is_split(table) and bool(chunk(width, shards.tp, shards.tp - 1))
        if large and alone and whole and demands.may_gather(trace.tensors[table].names):
            lookups_to_gather[index] = table
    return lookups_to_gather


def looked_up_in(op: Op, axes: Axes) -> int | None:
    """Return the stored table in which an op looks rows up."""
    table, _ = rows_by_ids(op) or (None, None)
    return table if table is not None and axes.is_stored_weight(table) and len(axes.of(table)) == 2 else None


# The two ends of a model: tables looked up by token, heads whose product leaves the model, products worth gathering.
#
# The vocabulary axis is not contracted with anything: it is a row of a table and a column of a head. It can be sharded
# when nothing in the forward reads across it. Where something does (a softmax in forward, a norm after a dense layer)
# the product can still be computed in shards and gathered at once: the weight is sharded, the result replicated.

_WORTH_GATHERING = 0.004  # share of all matrix elements below which a weight is not worth an all-gather
_LARGE_TABLE = 0.5  # share of the largest table: smaller ones (positions, types) are replicated
_UNEVEN = 16  # columns per rank from which an uneven split does not matter
_LOOKED_UP = "embed_index"
_PRODUCT = "free_a"  # a free dim of a product: a head whose weight is transformed first


def vocabularies(trace: Trace, axes: Axes) -> set[Term]:
    """Return the leaves that are rows of a large table or columns of a head, and that nothing reads across."""
    ends = {leaf for leaf in _table_rows(trace, axes) | _head_columns(trace, axes)}
    return {leaf for leaf in ends if not (leaf.events & FORBIDDING) - {_LOOKED_UP} and not leaf.data}


def _table_rows(trace: Trace, axes: Axes) -> set[Term]:
    inputs = _given_ids(trace)
    single = (op for op in trace.ops if op_record(op.name).drawn in (Drawn.LOOKUP, Drawn.ROWS))  # no embedding bags
    lookups = filter(None, map(rows_by_ids, single))
    tables = [table for table, ids in lookups if table in axes.weights and ids in inputs]
    largest = max((prod(trace.tensors[t].shape) for t in tables), default=0)
    row_leaves = set()
    for table in tables:
        rows = leaves(axes.of(table)[0])
        large = prod(trace.tensors[table].shape) >= _LARGE_TABLE * largest
        if large and len(rows) == 1 and rows[0].size == trace.tensors[table].shape[0]:
            row_leaves.add(find(rows[0]))
    return row_leaves


def _given_ids(trace: Trace, rounded: bool = False) -> set[int]:
    """Return the model's inputs, slices of them (ids of several codebooks in one tensor) and copies (one a frame).
    With `rounded` also integers made of floats: columns of a matrix that has features and ids."""
    ids = {tensor for tensor, info in enumerate(trace.tensors) if info.kind == "input"}
    for op in trace.ops:
        shows = op_record(op.name).shows not in (Shows.NOTHING, Shows.PICKED)
        if shows and isinstance(op.args[0], Ref) and op.args[0].id in ids:
            kind = trace.tensors[op.args[0].id].dtype  # a rounded float may be no id: a sample, a distance
            ids |= {output for output in op.results if rounded or trace.tensors[output].dtype == kind}
    return ids


def _head_columns(trace: Trace, axes: Axes) -> set[Term]:
    """Return the leaves of a weight's dim that form the entire last dim of an output of the model."""
    in_weights = {
        find(leaf)
        for tensor, info in enumerate(trace.tensors)
        if info.kind == "parameter" and len(info.shape) >= 2
        for leaf in leaves(axes.of(tensor)[0])
    }
    columns = set()
    for visit in trace.visits:
        if visit.module == "":
            for _, tensor in visit.outputs:
                terms = axes.of(tensor)
                last = leaves(terms[-1]) if len(terms) >= 2 else []
                if len(last) == 1 and find(last[0]) in in_weights and not last[0].events - {_LOOKED_UP, _PRODUCT}:
                    columns.add(find(last[0]))
    return columns


def products_to_gather(
    trace: Trace, axes: Axes, shards: Shards, tp: int, indivisible: Container[Term], demands: Demands = NO_DEMANDS
) -> set[int]:
    """Return the products and convolutions of a replicated value with a large weight that is not split: their outputs
    may be split and gathered at once.

    A weight that is not split because its units are indivisible stays replicated: the plan lists it with valid sizes.
    """
    total = sum(prod(t.shape) for t in trace.tensors if t.kind == "parameter" and len(t.shape) >= 2)
    wanted = set()
    products = {
        index: product for index, op in enumerate(trace.ops) if (product := product_weight(op, axes)) is not None
    }
    branches = branch_weights(axes, {weight for weight, _ in products.values() if len(axes.of(weight)) == 2})
    ends = _ends_of_products(trace, axes, products)
    for index, (weight, out) in products.items():
        inputs = {ref.id for ref in trace.ops[index].args if isinstance(ref, Ref)} - axes.computed.keys()
        if index not in ends or weight in branches or any(map(shards.is_split, inputs)):
            continue
        if any(shards.layout_of(term) is not None for term in axes.of(weight)):
            continue
        if not demands.may_gather(trace.tensors[axes.computed[weight]].names):
            continue
        shape, stored = trace.tensors[weight].shape, trace.tensors[axes.computed[weight]].shape
        grouped = op_record(trace.ops[index].name).drawn is Drawn.CONVOLUTION and groups_of(trace.ops[index]) > 1
        odd = grouped and groups_of(trace.ops[index]) % tp > 0
        odd = odd or any(find(leaf) in indivisible for term in axes.of(weight) for leaf in leaves(term))
        size = min(prod(shape), prod(stored))
        if size >= _WORTH_GATHERING * total and not odd and (shape[out] % tp == 0 or shape[out] >= _UNEVEN * tp):
            wanted.add(ends[index])
    return wanted | tables_to_gather(trace, axes, shards, _given_ids(trace, rounded=True), demands).keys()


def _ends_of_products(trace: Trace, axes: Axes, products: Container[int]) -> dict[int, int]:
    """Return, for each product, the op whose result its call returns: itself, or the one that adds the call's bias.
    Anything else that a call adds is replicated: such a product has no place for a gather."""
    ends: dict[int, int] = {}
    for call in trace.calls:
        product = call_record(call.name).product
        if product is None or product.out is None:
            continue
        if product.out[1] > 0:  # a convolution: its op adds the bias
            ends.update((index, index) for index in range(*call.ops))
        else:
            added = [index for index in range(*call.ops) if op_record(trace.ops[index].name).linear is Linear.ADDS]
            alone = len(added) == 1 and added_bias(trace.ops[added[0]], axes) is not None
            for index in filter(products.__contains__, range(*call.ops)):
                if alone and index < added[0]:
                    ends[index] = added[0]
                elif index >= max(added, default=index):
                    ends[index] = index
    return ends


def added_bias(op: Op, axes: Axes) -> int | None:
    """Return the one-dimensional parameter that an op adds to a value that is no parameter."""
    adds = op_record(op.name).linear is Linear.ADDS and not writes_in_place(op.name)
    if not adds or len(op.args) != 2 or not all(isinstance(arg, Ref) for arg in op.args):
        return None
    value, bias = (arg.id for arg in op.args)
    stored = axes.is_stored_weight(bias) and len(axes.of(bias)) == 1
    return bias if stored and value not in axes.weights else None


def product_weight(op: Op, axes: Axes) -> tuple[int, int] | None:
    """Return the weight in a product with an activation (transposed, in a matmul), and its dim that the result has."""
    product = op_record(op.name).product
    if product is None or product.out is None:
        return None
    other, weight = op.args[product.value], op.args[product.weight]
    if not isinstance(weight, Ref) or not isinstance(other, Ref) or _are_several(op, weight, axes):
        return None
    whole = weight.id in axes.weights or _is_one_weight(weight.id, axes)
    own = product.out[0]
    if op_record(op.name).drawn is Drawn.CONVOLUTION and transposed(op):
        own = 1  # its weight is in x out
    return (weight.id, own) if whole and other.id not in axes.computed else None


def _is_one_weight(tensor: int, axes: Axes) -> bool:
    """Return whether the tensor is a parameter scaled or masked elementwise, and no product of parameters."""
    if tensor not in axes.computed:
        return False
    own, other = (axes.of(t) for t in (tensor, axes.computed[tensor]))
    computed, stored = ({find(leaf) for term in terms for leaf in leaves(term)} for terms in (own, other))
    return computed == stored


def _are_several(op: Op, weight: Ref, axes: Axes) -> bool:
    """Return whether the op is a transposed convolution in groups or one of single channels, or multiplies several
    matrices."""
    if op_record(op.name).drawn is Drawn.CONVOLUTION:
        return groups_of(op) > 1 and (transposed(op) or axes.of(weight.id)[1].size == 1)
    return len(axes.of(weight.id)) > 2 and not _stretched(weight, axes)


def gathered_product(op: Op, axes: Axes) -> tuple[int, int] | None:
    """Return the parameter, a weight or a bias, that tells how the result of a gathered op is sharded, and its dim."""
    table = looked_up_in(op, axes)
    if table is not None:
        return table, 1
    bias = added_bias(op, axes)
    return product_weight(op, axes) if bias is None else (bias, 0)


def dim_of_result(op: Op) -> int:
    """Return the dim of the result along which a product is gathered: the features, the channels."""
    product = op_record(op.name).product
    return -1 if product is None or product.out is None else product.out[1]


def _stretched(weight: Any, axes: Axes) -> bool:
    """Return whether this is a matrix that was expanded over a batch, as some matmuls do."""
    if not isinstance(weight, Ref) or weight.id not in axes.weights:
        return False
    stored = {find(leaf) for term in axes.of(axes.sources[weight.id]) for leaf in leaves(term)}
    batch = {find(leaf) for leaf in leaves(axes.of(weight.id)[0])}
    return len(axes.of(axes.sources[weight.id])) == 2 and batch.isdisjoint(stored)


def gathered_leaves(trace: Trace, axes: Axes, *, every: bool = False) -> set[Term]:
    """Return the output axes of products to gather, where they are an axis of their own; `every`: all that are in such
    an output."""
    outputs: set[Term] = set()
    for index in axes.gathered:
        product = gathered_product(trace.ops[index], axes)
        if product is None:
            continue
        weight, dim = product
        out = leaves(axes.of(weight)[dim])
        if index in axes.taken and out[0].size == groups_of(trace.ops[index]):
            out = out[:1]  # groups of channels
        if every or len(out) == 1 and not out[0].events & (FORBIDDING | {"contract_w", "contract_a"}) - {_LOOKED_UP}:
            outputs.update(map(find, out))
    return outputs


def head_sites(
    trace: Trace, flow: CallFlow, shards: Shards, placement: Placement, vocabulary: set[Term]
) -> tuple[tuple[VocabularyTable | SplitLogits, ...], tuple[AllGather, ...]]:
    """Return vocabulary tables to mask, heads whose product leaves the model, and other split outputs to gather."""
    heads: dict[VocabularyTable | SplitLogits, None] = {}
    gathers: dict[AllGather, None] = {}
    for index, crossing in placement.embeddings.items():
        table = trace.calls[index].args[1].id
        heads[VocabularyTable(crossing.module, trace.tensors[table].shape[0], crossing.path)] = None
    for module, path, tensor, dim, layout in _split_outputs(trace, shards):
        back = dim - len(trace.tensors[tensor].shape)
        if _is_logits(tensor, dim, shards, vocabulary):
            crossing_of_head = _head_crossing(tensor, flow, shards)
            assert crossing_of_head is not None
            returned = () if UNRETURNED in path else (path,)
            heads[SplitLogits(crossing_of_head.module, layout.size, back, returned)] = None
        else:
            gathers[AllGather(module, "output", path, back, str(layout))] = None
    return tuple(heads), _of_every_block(tuple(gathers), trace)


def _of_every_block(gathers: tuple[AllGather, ...], trace: Trace) -> tuple[AllGather, ...]:
    """Merge gathers that are alike for all items of a sequence, whatever its length: the trace had fewer blocks."""
    returned = {path for visit in trace.visits if visit.parent is None for path, _ in visit.outputs}
    sites: dict[AllGather, None] = {}
    for site in gathers:
        *above, last = site.path or ("",)
        items = {path for path in returned if len(path) == len(site.path) and list(path[:-1]) == above}
        alike = {other.path for other in gathers if replace(other, path=site.path) == site}
        every = above and isinstance(last, int) and len(items) > 1 and items <= alike
        sites[replace(site, path=(*above, "*")) if every else site] = None
    return tuple(sites)


def refuse_unplaced_logits(
    trace: Trace, flow: CallFlow, shards: Shards, placement: Placement, vocabulary: set[Term]
) -> None:
    """Refuse logits for a loss inside forward that no module returns: they can only be gathered at its output."""
    for _, _, tensor, dim, _ in _split_outputs(trace, shards):
        if _is_logits(tensor, dim, shards, vocabulary) and _head_crossing(tensor, flow, shards) is None:
            placement.refusals.append(Refusal(-1, NotPlaced("logits-not-returned"), (tensor,)))


def _split_outputs(trace: Trace, shards: Shards) -> Iterator[tuple[str, tuple[Any, ...], int, int, Layout]]:
    """Yield the sharded outputs of the model, or of a submodule called alone: module, path, tensor, dim, layout."""
    for visit in trace.visits:
        if visit.parent is None:
            for path, tensor in visit.outputs:
                for dim, layout in enumerate(shards.layouts(tensor)):
                    if layout is not None:
                        yield visit.module, path, tensor, dim, layout


def _is_logits(tensor: int, dim: int, shards: Shards, vocabulary: set[Term]) -> bool:
    terms = shards.axes.of(tensor)
    return dim == len(terms) - 1 and find(terms[dim]) in vocabulary


def _head_crossing(tensor: int, flow: CallFlow, shards: Shards) -> Crossing | None:
    """Return where the product behind a split output leaves its module, walking back through split values."""
    seen = set()
    while tensor in flow.producer and tensor not in seen:
        seen.add(tensor)
        call = flow.producer[tensor]
        split = [t for t in flow.inputs[call] if shards.is_split(t)]
        activations = [t for t in split if not _is_of_weights(t, flow)]
        made_of_weight = len(activations) < len(split)
        if made_of_weight and not activations:
            module = flow.trace.calls[call].module
            leaving = [b for b in flow.leaving.get(tensor, []) if b.module == module and b.path == ()]
            return leaving[0] if leaving and module else None
        if not activations:
            return None
        tensor = activations[0]
    return None


def output_shapes(trace: Trace, axes: Axes) -> tuple[OutputShape, ...]:
    """Return the dims of the model's outputs that weights determine, whatever the inputs are.

    Only those that a product with a weight makes: a dim of a table of positions may be as long as the input is. A dim
    of size 1 does not count: it may be a batch.
    """
    axes_made: set[Term] = set()
    for index, op in enumerate(trace.ops):
        if index in axes.gathered or product_weight(op, axes) is not None:
            axes_made.add(find(axes.of(op.results[0])[dim_of_result(op)]))
    shapes: dict[tuple[Any, ...], OutputShape] = {}
    for visit in trace.visits:
        for path, tensor in visit.outputs if visit.module == "" else ():
            if UNRETURNED in path:
                continue
            sizes = trace.tensors[tensor].shape
            terms = enumerate(axes.of(tensor))
            features = tuple((dim, sizes[dim]) for dim, term in terms if sizes[dim] != 1 and find(term) in axes_made)
            earlier = shapes.setdefault(path, OutputShape(path, len(sizes), features))
            if earlier != OutputShape(path, len(sizes), features):  # it differs between calls
                shapes[path] = replace(earlier, features=())
    return tuple(shape for shape in shapes.values() if shape.features)


def _is_of_weights(tensor: int, flow: CallFlow) -> bool:
    """Return whether a tensor is a parameter, or computed from parameters alone (a head may normalise its rows)."""
    waiting, seen = [tensor], {tensor}
    while waiting:
        value = waiting.pop()
        made_of = [t for t in flow.inputs[flow.producer[value]] if t != value] if value in flow.producer else []
        if not made_of and (value in flow.producer or flow.trace.tensors[value].kind != "parameter"):
            return False
        waiting += [t for t in made_of if t not in seen]
        seen.update(made_of)
    return True
