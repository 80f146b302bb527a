"""Large tables beside the one of tokens: cut by columns, and what was looked up gathered.

A recommender has a table for each kind of thing, a character model one for the shapes of its characters. Cut by rows,
ids of other ranks are masked and what was found is summed: that moves each number twice. Cut by columns every rank
looks up all ids, whatever they are, and the columns are gathered: each number moves once. So tables that nothing else
reads are cut by columns. (The table of tokens is cut by rows, as its head is.) Bags of rows are the same.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from autoplan.analyse.infer import Axes
from autoplan.analyse.shards import Shards
from autoplan.analyse.splits.requests import Demands
from autoplan.common.layout import chunk
from autoplan.ops.indexing import looks_up
from autoplan.values import Op, Ref, Trace, refs

__all__ = ["looked_up_in", "tables_to_gather"]

_LARGE = 0.02  # share of all matrix elements, of tables that ids of the input are looked up in
_MANY_ROWS = 4096  # from here on a table is large whatever its ids are: no model is that narrow


def tables_to_gather(
    trace: Trace, axes: Axes, shards: Shards, given: Collection[int], demands: Demands
) -> dict[int, int]:
    """The lookups (by index of the op) whose columns are to be gathered, with their table."""
    total = sum(prod(t.shape) for t in trace.tensors if t.kind == "parameter" and len(t.shape) >= 2)
    lookups = {index: table for index, op in enumerate(trace.ops) if (table := looked_up_in(op, axes)) is not None}
    readers: dict[int, set[int]] = {table: set() for table in lookups.values()}
    for index, op in enumerate(trace.ops):
        for tensor in refs((op.args, op.kwargs)):
            if axes.sources.get(tensor, tensor) in readers:
                readers[axes.sources.get(tensor, tensor)].add(index)
    found = {}
    for index, table in lookups.items():
        rows, width = trace.tensors[table].shape
        ids = {trace.ops[other].args[1].id for other in readers[table] if other in lookups}
        large = rows >= _MANY_ROWS or (ids <= set(given) and rows * width >= _LARGE * total)
        alone = readers[table] <= lookups.keys() and not any(map(shards.is_split, ids))
        whole = not shards.is_split(table) and bool(chunk(width, shards.tp, shards.tp - 1))
        if large and alone and whole and demands.may_gather(trace.tensors[table].names):
            found[index] = table
    return found


def looked_up_in(op: Op, axes: Axes) -> int | None:
    """The stored table that an op looks rows up in."""
    if not looks_up(op.name) or not all(isinstance(arg, Ref) for arg in op.args[:2]):
        return None
    table: int = op.args[0].id
    return table if axes.is_stored_weight(table) and len(axes.of(table)) == 2 else None
