"""The repeated stacks of a model: what FSDP2 wraps, what activation checkpointing recomputes, what plans count."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from autoplan.analyse.picture.stacks import Blocks, find_blocks, kind_of
from autoplan.common.options import check_argument
from autoplan.ops import call_record
from autoplan.values import Call, Stack, Trace
from autoplan.values.module_tree import ModuleTree

if TYPE_CHECKING:
    from torch import nn

__all__ = ["calls_causal", "layers", "stacks_of"]


def layers(model: nn.Module, trace: Trace | None = None, *, causal: frozenset[str] = frozenset()) -> tuple[Stack, ...]:
    """All repeated stacks of `model`, blocks in call order; works on meta models and runs nothing.

    With a `trace`, blocks are ordered and counted as they were called; without, as they are defined. `causal` are
    modules that called a causal attention (`calls_causal`).
    """
    from torch import nn

    from autoplan.hf.module_tree import module_tree

    check_argument("model", model, nn.Module, "give the model itself, an nn.Module")
    return stacks_of(module_tree(model), trace, causal)


def stacks_of(tree: ModuleTree, trace: Trace | None = None, causal: frozenset[str] = frozenset()) -> tuple[Stack, ...]:
    """`layers` on plain data."""
    found = find_blocks(tree)
    return tuple(_stack(blocks, found, tree, trace, causal) for blocks in found)


def calls_causal(trace: Trace) -> frozenset[str]:
    """The modules that told a call of attention that it is causal."""
    return frozenset(call.module for call in trace.calls if _is_causal(call))


def _is_causal(call: Call) -> bool:
    at, name = call_record(call.name).causal or (-1, "")
    return (call.args[at] if len(call.args) > at >= 0 else call.kwargs.get(name)) is True


def _stack(
    blocks: Blocks, found: tuple[Blocks, ...], tree: ModuleTree, trace: Trace | None, causal: frozenset[str]
) -> Stack:
    kind, guess = kind_of(blocks, found, tree, causal)
    names = [tree.nodes[block].name for block in blocks.blocks]
    notes = [*blocks.notes, guess]
    if trace is not None:
        names, called = _as_called(names, trace)
        notes.append(called)
    elif blocks.listed > len(names):
        notes.append(f"{blocks.listed} calls of {len(names)} modules")
    return Stack(blocks.name, kind, tuple(names), "; ".join(filter(None, notes)))


def _as_called(names: list[str], trace: Trace) -> tuple[list[str], str]:
    """The blocks in the order in which the trace first called them, and a note if some were called again."""
    calls = Counter(visit.module for visit in trace.visits if visit.module in names)
    standing_in = {
        f"{fold.container}.{key}": f"{fold.container}.{by}" for fold in trace.folds for key, by in fold.members
    }
    if all(name in calls for name in names):
        order = {name: place for place, name in enumerate(calls)}
        names = sorted(names, key=order.__getitem__)
    total = sum(calls[name] or calls[standing_in.get(name, name)] for name in names)
    if total <= len(names):
        return names, ""
    return names, f"{total} calls of {len(names)} modules"
