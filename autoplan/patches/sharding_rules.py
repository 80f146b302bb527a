"""Ops of which DTensor has not heard, and by which torch asks parameters and gradients something.

`torch.autograd.detect_anomaly` asks each gradient for NaN, and what derives forward asks how parameters lie in memory,
before it calls the model (which says why it cannot be). For DTensor both would be an error about a missing rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from autoplan.patches.patched import Hold, Patch, Registered, hold

__all__ = ["SHARDING_RULES", "asked_of_all"]


def asked_of_all(patch: Patch | None = None) -> Hold:
    """Until the hold is released, DTensor answers these ops: of whole tensors."""
    return hold(patch or SHARDING_RULES, _places())


def _places() -> Iterator[Registered]:
    strategies, schemas = _tables()
    for op, (strategy, schema) in _made().items():
        yield Registered(strategies, op, strategy)
        yield Registered(schemas, op, schema)


def _tables() -> tuple[Any, Any]:
    """Where DTensor keeps how ops are sharded, and which of their arguments count."""
    known = DTensor._op_dispatcher.sharding_propagator
    return known.op_strategy_funcs, known.op_to_schema_info


def _rules() -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten
    of_one = {aten._is_any_true.default: lambda x: [([Replicate()], [Replicate()])]}
    two = (aten._has_same_storage_numel.default, aten._new_zeros_with_same_feature_meta.default)
    return of_one | {op: lambda x, y, **_: [([Replicate()], [Replicate(), Replicate()])] for op in two}


@cache
def _made() -> dict[Any, tuple[Any, Any]]:
    """What torch makes of the rules of each op: it is registered by torch's own function, and taken out again."""
    from torch.distributed.tensor.experimental import register_sharding  # brings context parallel with it

    tables, found = _tables(), {}
    for op, rule in _rules().items():
        before = [table.get(op) for table in tables]
        try:
            register_sharding(op)(rule)
            strategy, schema = (table[op] for table in tables)
        finally:
            for table, one in zip(tables, before, strict=True):
                table.pop(op, None)
                if one is not None:
                    table[op] = one
        found[op] = strategy, schema
    return found


def _canary() -> bool:
    """Does DTensor look such ops up in these two tables, and find ours there?"""
    apart = replace(SHARDING_RULES, name="canary of sharding rules")  # sharded models may hold the patch itself
    tables = _tables()
    before = [dict(table) for table in tables]
    held = asked_of_all(apart)
    try:
        inside = all(tables[0].get(op) is strategy and tables[1].get(op) is schema
                     for op, (strategy, schema) in _made().items())  # fmt: skip
    finally:
        held.release()
    asks = type(DTensor._op_dispatcher.sharding_propagator).propagate_op_sharding_non_cached.__code__.co_names
    return inside and [dict(table) for table in tables] == before and "op_strategy_funcs" in asks


SHARDING_RULES = Patch(
    name="sharding rules of ops",
    replaces="entries of DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs and op_to_schema_info, which "
    "torch.distributed.tensor.experimental.register_sharding makes",
    why="anomaly detection and forward derivatives ask parameters and gradients by ops that DTensor does not know",
    scope="while a model that `parallelize` has split lives, or one of its parameters",
    undone="taken out when the last such model is collected or undone",
    where="autoplan/execute/parameters/following.py",
    canary=_canary,
    without="anomaly detection and forward derivatives of a sharded model end in an error about a missing rule",
)
