"""Experts that no token chose: they follow one that ran.

The problem: a model that keeps its experts in a list runs those that some token chose. With the few tokens of a trace
most are never seen, and what was not seen would stay whole. But a member of a list of equals is run by the code that
runs the others. So what the trace says of one that ran holds for those that did not, as with the blocks of a deep
stack that were left out before the run (see fold.py); they are taken out of the trace after it.

Only members of one list or dictionary of modules are taken for equals, only if they are of one kind, and only if they
hold matrices: a list may also hold the parts of a block, one after the other, of which a branch that nobody took runs
some (a second norm).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import nn

from autoplan.capture.fold import kinds_of
from autoplan.common.patterns import holders
from autoplan.values import Fold, Trace


def with_idle_members(trace: Trace, model: nn.Module) -> Trace:
    """The trace without modules that never ran, where another of their list did: that one stands for them."""
    folds = tuple(_folds(trace, model))
    if not folds:
        return trace
    idle = {f"{fold.container}.{member}" for fold in folds for member, _ in fold.members}

    def stays(name: str) -> bool:
        return name not in idle and not any(holder in idle for holder in holders(name))

    return replace(
        trace,
        tensors=tuple(
            info if not info.names or any(map(stays, info.names)) else replace(info, kind="constant", names=())
            for info in trace.tensors
        ),
        module_classes={name: kind for name, kind in trace.module_classes.items() if stays(name)},
        attributes={name: found for name, found in trace.attributes.items() if stays(name)},
        folds=(*folds, *trace.folds),  # innermost first: a folded block has such lists, too
    )


def _folds(trace: Trace, model: nn.Module) -> Iterator[Fold]:
    ran = {visit.module for visit in trace.visits}
    busy = {holder for name in (*ran, *trace.read) for holder in holders(name)} | ran
    left_out = {fold.container: dict(fold.members) for fold in trace.folds}  # before the run: no need to ask again
    for name, container in model.named_modules():
        if not isinstance(container, nn.ModuleList | nn.ModuleDict) or name not in trace.module_classes:
            continue
        known = left_out.get(name, {})
        held = {key: one for key, one in container._modules.items() if one is not None and key not in known}
        members = {key: one for key, one in held.items() if any(p.dim() > 1 for p in one.parameters())}
        at_work = [key for key in members if f"{name}.{key}" in ran]
        idle = [key for key in members if f"{name}.{key}" not in busy]
        if not at_work or not idle:
            continue
        kinds = dict(zip(members, kinds_of(list(members.values())), strict=True))
        first = {kinds[key]: key for key in reversed(at_work)}
        followers = tuple((key, first[kinds[key]]) for key in idle if kinds[key] in first)
        if followers:
            yield Fold(name, followers)
